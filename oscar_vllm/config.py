# SPDX-License-Identifier: Apache-2.0
"""Options of the plugin: ``--additional-config '{"oscar": {...}}'`` as a checked dataclass.

Plain Python on purpose: neither torch nor vLLM is imported, so that every error of this module costs nothing.
"""

import difflib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from oscar_vllm.errors import OscarArtifactError, OscarConfigError

DTYPE = "oscar_int2"
"""The name users give to ``--kv-cache-dtype``."""

ALIAS = "oscar"
"""A short name for it, replaced by ``DTYPE`` before vLLM builds its configuration."""

DEFAULT_SINK = 64
DEFAULT_RECENT = 256
ARTIFACT_FOLDER = "oscar_int2"
"""Where a model's own artifact is looked for: ``<model folder>/oscar_int2``."""

_WINDOW_STEP = 16
_CHOICES = {
    "rotation": (None, "hadamard"),
    "prefill": ("exact", "invariant"),
    "payload": ("int2", "float"),
    "zero": (None, "page", "token"),
    "ops": ("auto", "reference"),
}


@dataclass(frozen=True)
class OscarConfig:
    """One engine's options. ``None`` stands for "not given": see :meth:`resolved`.

    Attributes:
        artifact: folder or hub id of a calibration artifact.
        revision: hub revision of the artifact (branch, tag or commit).
        rotation: ``"hadamard"`` serves without calibration data, with a fixed rotation. Excludes ``artifact``.
        prefill: ``"exact"``: tokens of the running step are attended unquantized (best quality, and what the results
            depend on is where the scheduler cut the chunks). ``"invariant"``: a token further back than ``recent`` is
            always read from its page, so results do not depend on chunks, batch or prefix hits.
        sink: tokens at the start of a sequence that stay unquantized. A multiple of 16 in 0..128.
        recent: most recent tokens that stay unquantized. A multiple of 16, at least 128 (one page).
        payload: ``"int2"``, or ``"float"``: pages store the values as they are. No compression; it exists to check
            everything around the quantizer.
        zero: where a key's zero point lives, ``"page"`` or ``"token"``. An artifact fixes it; choose it only together
            with ``rotation``.
        ops: ``"auto"``: Triton kernels on a GPU. ``"reference"``: the PyTorch reference everywhere, to compare with;
            slow, and on a GPU it runs without CUDA graphs.

    """

    artifact: str | None = None
    revision: str | None = None
    rotation: Literal["hadamard"] | None = None
    prefill: Literal["exact", "invariant"] = "exact"
    sink: int | None = None
    recent: int | None = None
    payload: Literal["int2", "float"] = "int2"
    zero: Literal["page", "token"] | None = None
    ops: Literal["auto", "reference"] = "auto"

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                allowed = ", ".join(repr(c) for c in choices if c is not None)
                raise OscarConfigError(f"oscar option {name}={value!r} is unknown; use one of: {allowed}")
        for name in ("artifact", "revision"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value.strip()):
                raise OscarConfigError(f"oscar option {name}={value!r} must be a non-empty string")
        _check_window("sink", self.sink, 0, 128)
        _check_window("recent", self.recent, 128, None)
        if self.rotation is not None and self.artifact is not None:
            raise OscarConfigError(
                f"oscar options artifact={self.artifact!r} and rotation={self.rotation!r} exclude each other; "
                "drop rotation to serve the artifact, or drop artifact to serve without calibration"
            )
        if self.revision is not None and self.artifact is None:
            raise OscarConfigError(f"oscar option revision={self.revision!r} needs artifact: a hub id")

    @classmethod
    def from_additional_config(cls, additional_config: Any) -> "OscarConfig":
        """Parse ``vllm_config.additional_config`` (or its JSON text); without an ``"oscar"`` entry all defaults.

        Raises:
            OscarConfigError: not a mapping, an unknown key, or a value out of range.

        """
        options = _mapping(additional_config, "--additional-config").get("oscar")
        return cls.from_options({} if options is None else options)

    @classmethod
    def from_options(cls, options: Any) -> "OscarConfig":
        """Parse the ``"oscar"`` entry itself: a mapping or its JSON text."""
        options = _mapping(options, 'additional config "oscar"')
        known = [field.name for field in fields(cls)]
        for key in options:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)[0]
                raise OscarConfigError(
                    f"oscar option {key!r} is unknown; did you mean {near!r}? Known: {', '.join(known)}"
                )
        return cls(**options)

    def resolved(
        self, *, sink: int | None = None, recent: int | None = None, zero: Literal["page", "token"] | None = None
    ) -> "OscarConfig":
        """Fill what was not given: first from the arguments (the artifact's values), then from the defaults.

        Raises:
            OscarConfigError: ``zero`` was given and the artifact has another one.

        """
        if self.zero is not None and zero is not None and self.zero != zero:
            raise OscarConfigError(
                f"oscar option zero={self.zero!r} contradicts the artifact, which was calibrated with {zero!r}; drop it"
            )

        def first(*values: Any) -> Any:
            return next(value for value in values if value is not None)

        return replace(
            self,
            sink=first(self.sink, sink, DEFAULT_SINK),
            recent=first(self.recent, recent, DEFAULT_RECENT),
            zero=first(self.zero, zero, "page"),
        )

    def to_options(self) -> dict[str, Any]:
        """The options that differ from "not given", for ``additional_config["oscar"]``; parses back to ``self``."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def artifact_source(self, model: str) -> str | None:
        """The artifact to load for ``model``: the option, else ``<model>/oscar_int2``; ``None`` in data-free mode.

        Raises:
            OscarArtifactError: there is neither; the message names the command that makes one.

        """
        if self.artifact is not None:
            return self.artifact
        if self.rotation is not None or self.payload == "float":
            return None
        folder = Path(model) / ARTIFACT_FOLDER
        if folder.is_dir():
            return str(folder)
        raise OscarArtifactError(missing_artifact_message(model))


def missing_artifact_message(model: str) -> str:
    """What to tell a user whose model has no artifact."""
    return (
        f"no OSCAR calibration artifact for model {model!r}: make one with "
        f"`python -m calib --model {model} --output-dir DIR` and pass "
        """--additional-config '{"oscar": {"artifact": "DIR"}}', or serve without calibration (lower quality) with """
        """--additional-config '{"oscar": {"rotation": "hadamard"}}'"""
    )


def _mapping(value: Any, what: str) -> Mapping[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise OscarConfigError(f"{what} is not valid JSON ({error}): {value[:200]!r}") from None
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise OscarConfigError(f"{what} must be a JSON object, got {type(value).__name__}: {value!r}")
    return value


def _check_window(name: str, value: Any, low: int, high: int | None) -> None:
    if value is None:
        return
    bounds = f"{low}..{high}" if high is not None else f"{low} or more"
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value % _WINDOW_STEP or value < low or (high is not None and value > high):
        raise OscarConfigError(f"oscar option {name}={value!r} must be a multiple of {_WINDOW_STEP}, {bounds} tokens")
