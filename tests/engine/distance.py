# SPDX-License-Identifier: Apache-2.0
"""Runs in bfloat16 that should be the same, compared by how far quantization moves the model.

Sums in another order make single codes round the other way. The yardstick is the *effect*: how far an engine with the
INT2 cache is from one with the model's own. Re-coding some numbers moves logprobs by less on average than coding all of
them (root mean square), and no token by more than twice the largest effect; `scripts/soak.py` derives it. A wrong head,
page or rotation moves more.

Tokens are compared up to the first difference of two answers, and a fault that changes tokens at once must not escape
by that. So the first difference is judged too: one run has token a ahead of b by m, the other b ahead of a by at least
m', so that logprob(a) - logprob(b) changed by at least m + m', and the logprob of a or of b by at least (m + m') / 2,
its *shift*. Equal runs part where a drift exceeds a margin, large drifts sooner than small ones: with margins spread
evenly near 0 a difference d of two drifts parts them with a chance in proportion to |d|, and the mean of the shifts'
squares is E|d|**3 / (4 E|d|), at most E|x|**3 / (2 E|x|) for drifts x of two tokens. Normal drifts of
root mean square s leave shifts of root mean square s, models with experts larger ones: where two experts are nearly
tied, few drifts are far larger than all others.
"""

import math
import statistics
from dataclasses import dataclass

ENOUGH = 30
"""Generated tokens from which on runs are compared: their root mean square is then known to 1 / sqrt(2 * 30) = 13 %."""


def root_mean_square(values: list[float]) -> float:
    return math.sqrt(statistics.fmean(value**2 for value in values)) if values else 0.0


@dataclass(frozen=True)
class Distance:
    """How far two runs of the same prompts are apart.

    Attributes:
        drift: nats, change of every prompt token's logprob, and of every generated one's before the first difference.
        shifts: nats, at the first differences, how far the logprob of one of the two tokens moved at least.
        compared: generated tokens before the first differences.
        answers: number of answers.

    """

    drift: list[float]
    shifts: list[float]
    compared: int
    answers: int

    @property
    def rms(self) -> float:
        return root_mean_square(self.drift)

    @property
    def expected_shift(self) -> float:
        """Root mean square of the shifts that such drifts leave, see the module."""
        return math.sqrt(math.fsum(x**3 for x in self.drift) / (2 * math.fsum(self.drift)))

    @property
    def largest(self) -> float:
        return max(self.drift)

    @property
    def common(self) -> float:
        """Tokens of an answer before its first difference, on average."""
        return self.compared / self.answers


def distance(got: dict, want: dict, scenarios: tuple[str, ...] = ("score", "mixed")) -> Distance:
    """Of two engines' results, over scenarios of the kind `generate`."""
    drift, shifts, compared, answers = [], [], 0, 0
    for scenario in scenarios:
        for one, other in zip(got[scenario][0], want[scenario][0], strict=True):
            tokens, expected = one["token_ids"][0], other["token_ids"][0]
            same = next((i for i, (a, b) in enumerate(zip(tokens, expected, strict=True)) if a != b), len(tokens))
            pairs = list(zip(one["logprobs"][0][:same], other["logprobs"][0][:same], strict=True))
            if one["prompt_logprobs"]:
                pairs += zip(one["prompt_logprobs"][1:], other["prompt_logprobs"][1:], strict=True)
            drift += [abs(a - b) for a, b in pairs]
            if same < len(tokens):
                shifts.append((one["margins"][0][same] + other["margins"][0][same]) / 2)
            compared += same
            answers += 1
    return Distance(drift, shifts, compared, answers)


def assert_alike(run: Distance, effect: Distance) -> None:
    """``run`` is apart by re-coded numbers at most, where the whole cache makes ``effect``.

    Its answers stay together at least half as long as those of ``effect``, counted in tokens of an answer: the two may
    come from answers of different lengths.
    """
    print(
        f"drift rms {run.rms:.4f} (effect {effect.rms:.4f}), largest {run.largest:.3f} ({effect.largest:.3f}), "
        f"{run.compared} tokens compared, {run.common:.1f} an answer ({effect.common:.1f}), "
        f"shifts {[round(shift, 2) for shift in run.shifts]} ({effect.expected_shift:.2f} expected)"
    )
    assert all(math.isfinite(change) for change in [*run.drift, *run.shifts])
    assert run.rms <= effect.rms
    assert run.largest <= 2 * effect.largest
    assert root_mean_square(run.shifts) <= effect.expected_shift
    assert max(run.shifts, default=0.0) <= 2 * effect.largest
    assert run.compared >= ENOUGH
    assert run.common >= effect.common / 2
