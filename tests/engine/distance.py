# SPDX-License-Identifier: Apache-2.0
"""Runs in bfloat16 that should be the same, compared by how far quantization moves the model.

Sums in another order make single codes round the other way. The yardstick is the *effect*: how far an engine with the
INT2 cache is from one with the model's own. Re-coding some numbers moves logprobs by less on average than coding all of
them (root mean square), and no token by more than twice the largest effect; `scripts/soak.py` derives it. A wrong head,
page or rotation moves more.
"""

import math
import statistics
from dataclasses import dataclass


@dataclass(frozen=True)
class Distance:
    """How far two runs of the same prompts are apart.

    Attributes:
        drift: nats, change of every prompt token's logprob, and of every generated one's before the first difference.
        margins: nats, at the first differences, how far the token was ahead in the run where it was clearer.
        compared: share of the generated tokens before the first differences.

    """

    drift: list[float]
    margins: list[float]
    compared: float

    @property
    def rms(self) -> float:
        return math.sqrt(statistics.fmean(change**2 for change in self.drift))

    @property
    def largest(self) -> float:
        return max(self.drift)


def distance(got: dict, want: dict, scenarios: tuple[str, ...] = ("score", "mixed")) -> Distance:
    """Of two engines' results, over scenarios of the kind `generate`."""
    drift, margins, compared, total = [], [], 0, 0
    for scenario in scenarios:
        for one, other in zip(got[scenario][0], want[scenario][0], strict=True):
            tokens, expected = one["token_ids"][0], other["token_ids"][0]
            same = next((i for i, (a, b) in enumerate(zip(tokens, expected, strict=True)) if a != b), len(tokens))
            pairs = list(zip(one["logprobs"][0][:same], other["logprobs"][0][:same], strict=True))
            if one["prompt_logprobs"]:
                pairs += zip(one["prompt_logprobs"][1:], other["prompt_logprobs"][1:], strict=True)
            drift += [abs(a - b) for a, b in pairs]
            if same < len(tokens):
                margins.append(max(one["margins"][0][same], other["margins"][0][same]))
            compared += same
            total += len(tokens)
    return Distance(drift, margins, compared / total)


def assert_alike(run: Distance, effect: Distance) -> None:
    """``run`` is apart by re-coded numbers at most, where the whole cache makes ``effect``."""
    print(
        f"drift rms {run.rms:.4f} (effect {effect.rms:.4f}), largest {run.largest:.3f} ({effect.largest:.3f}), "
        f"compared {run.compared:.0%} ({effect.compared:.0%}), margins {[round(m, 2) for m in run.margins]}"
    )
    assert all(math.isfinite(change) for change in run.drift)
    assert run.rms <= effect.rms
    assert run.largest <= 2 * effect.largest
    assert max(run.margins, default=0.0) <= 4 * effect.largest  # two tokens, each twice the effect
    assert run.compared >= effect.compared / 2
