# SPDX-License-Identifier: Apache-2.0
"""The calibration artifact: a folder with one codec per attention layer and the story of how it was made.

``oscar_rotations.safetensors`` holds, for every full-attention layer i, ``layers.{i}.<name>`` with the tensors of
`triton_ops.codec.LayerCodec`; ``oscar_config.json`` holds everything else. A layer that is absent stays BF16.
The artifact's id is a hash of both files' content: any change after saving is found when loading.

Needs torch and safetensors, neither vLLM nor the model's weights.
"""

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from oscar_vllm.errors import OscarArtifactError, OscarUnsupportedError
from triton_ops.codec import UNIT_STEP, LayerCodec, Quantizer, hadamard, rotation_codec, unbiased_gain
from triton_ops.layout import Zero, page_head_size

CONFIG_FILE = "oscar_config.json"
TENSOR_FILE = "oscar_rotations.safetensors"
FORMAT = "oscar_int2"
SCHEMA_VERSION = 1
SERVABLE_KL = 0.05
"""Nats on held-out text above which `Artifact.not_for_serving` speaks. Between what works and what does not in
docs/fidelity.md: default calibrations have 0.003 to 0.018; fixed rotations with 0.10 and 0.11 (SmolLM2) cost 12 % of
perplexity, and the reference answered 4 to 6 % of the needles of which the default answers 40 to 57 %."""

_COUNTS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_size")
_GEOMETRY = ("model_type", *_COUNTS, "rope_theta", "rope_type", "rope_factor")
"""What `model_geometry` returns; the first are whole numbers."""

ORTHOGONALITY_TOLERANCE = 1e-4
INVERSE_TOLERANCE = 1e-3
"""Largest |E^T Q - gain|; encode and query matrices are rounded to float32 after a whitening of condition up to 1e4."""


_ROPE_ALIASES = {"su": "longrope", "mrope": "default", "telechat3-yarn": "yarn"}
"""Names of rope types that vLLM replaces when it loads a configuration."""


def _calibration_command(model: str) -> str:
    return f"python -m calib --model {model} --output-dir <directory>"


# ---------------------------------------------------------------------------------------------- model geometry


def model_geometry(config: Any) -> dict[str, Any]:
    """What of a model a codec depends on, from its Hugging Face configuration (not its weights).

    Args:
        config: a transformers configuration; of a multimodal model the text part is taken.

    Raises:
        OscarUnsupportedError: the model has latent attention (MLA) or a head size that fits no page.

    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    model_type = getattr(text, "model_type", "unknown")
    if getattr(text, "kv_lora_rank", None):
        raise OscarUnsupportedError(
            f"{model_type} uses latent attention (kv_lora_rank={text.kv_lora_rank}): its cache holds no keys and "
            "values per head; serve it with --kv-cache-dtype auto"
        )
    query_heads = text.num_attention_heads
    head_size = getattr(text, "head_dim", None) or text.hidden_size // query_heads
    try:
        page_head_size(head_size)
    except ValueError as error:
        raise OscarUnsupportedError(f"{model_type}: {error}; serve it with --kv-cache-dtype auto") from None
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    if isinstance(rope.get("full_attention"), Mapping):
        rope = rope["full_attention"]
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    factor = rope.get("factor")
    return {
        "model_type": model_type,
        "hidden_size": text.hidden_size,
        "num_hidden_layers": text.num_hidden_layers,
        "num_attention_heads": query_heads,
        "num_key_value_heads": getattr(text, "num_key_value_heads", None) or query_heads,
        "head_size": head_size,
        "rope_theta": float(rope.get("rope_theta") or getattr(text, "rope_theta", None) or 0.0),
        "rope_type": _ROPE_ALIASES.get(rope_type, rope_type),
        "rope_factor": None if factor is None else float(factor),
    }


# ---------------------------------------------------------------------------------------------- the artifact


@dataclass(frozen=True)
class Artifact:
    """One calibrated model.

    Attributes:
        layers: layer index -> codec for padded heads (`triton_ops.layout.page_head_size`); layers that keep BF16 are
            absent.
        geometry: `model_geometry` of the model it was fitted on.
        model: name or path of that model; revision: its hub revision, None = unknown or local.
        revision: see model.
        sink: tokens kept in BF16 at the start of a sequence when the constants were chosen; recent: at its end.
        recent: see sink.
        method: how the codecs were made (granularity, composition, targets, allocation, …).
        calibration: data, tokens, seed, library versions.
        metrics: held-out figures: ``"model"`` and per layer under the layer's index as a string.

    """

    layers: dict[int, LayerCodec]
    geometry: dict[str, Any]
    model: str
    revision: str | None = None
    sink: int = 64
    recent: int = 256
    method: dict[str, Any] = field(default_factory=dict)
    calibration: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)

    @property
    def not_for_serving(self) -> str | None:
        """Why the model should not be served with this artifact; None if nothing measured speaks against it."""
        kl = self.metrics.get("model", {}).get("kl")
        if kl is None or kl <= SERVABLE_KL:
            return None
        return (
            f"NOT FOR SERVING: KL of {kl:.3f} nats to the exact model on held-out text, above {SERVABLE_KL}; answers "
            "will be worse. Calibrate with the default recipe on more text, or serve with --kv-cache-dtype auto"
        )

    @property
    def max_position(self) -> int | None:
        """Tokens of the longest context it was calibrated for; None: no matter, or not known.

        Bits by spectrum hold for the positions that calibration looked at (calib/positions.py). Before it looked at
        more than the samples, ``max_position`` was not recorded.
        """
        if self.method.get("allocation") != "spectral":
            return None
        return self.calibration.get("max_position", self.calibration.get("max_length"))

    @property
    def zero(self) -> Zero:
        """``"page"`` or ``"token"``; the same for every layer."""
        return next(iter(self.layers.values())).zero

    @property
    def fingerprint(self) -> str:
        """Hash of the geometry, 16 hex digits."""
        return hashlib.sha256(json.dumps(self.geometry, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def artifact_id(self) -> str:
        """Hash of tensors and configuration, 12 hex digits."""
        return _artifact_id(self._tensors(), self._config())

    def _tensors(self) -> dict[str, Tensor]:
        return {
            f"layers.{index}.{name}": tensor.cpu().clone(memory_format=torch.contiguous_format)  # layers may share one
            for index, codec in self.layers.items()
            for name, tensor in codec.tensors()
        }

    def _config(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "schema_version": SCHEMA_VERSION,
            "model": {
                "id": self.model,
                "revision": self.revision,
                "geometry": self.geometry,
                "fingerprint": self.fingerprint,
            },
            "segments": {"sink": self.sink, "recent": self.recent},
            "group": page_head_size(self.geometry["head_size"]),
            "method": self.method,
            "layers": {
                str(index): {
                    "zero": codec.zero,
                    "key_quantizer": {"kind": codec.key_quantizer.kind, "constant": codec.key_quantizer.constant},
                    "value_quantizer": {"kind": codec.value_quantizer.kind, "constant": codec.value_quantizer.constant},
                }
                for index, codec in sorted(self.layers.items())
            },
            "calibration": self.calibration,
            "metrics": self.metrics,
        }

    def save(self, directory: str | os.PathLike) -> Path:
        """Validate, then write both files; a reader never sees half of one.

        Raises:
            OscarArtifactError: see `validate`.

        """
        self.validate()
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        config, tensors = self._config(), self._tensors()
        config["artifact_id"] = _artifact_id(tensors, config)
        try:
            text = json.dumps(config, indent=2, allow_nan=False)
        except ValueError as error:
            raise OscarArtifactError(f"the artifact's metrics are not finite ({error}); check the model") from error
        partial = {name: directory / f"{name}.partial" for name in (TENSOR_FILE, CONFIG_FILE)}
        save_file(tensors, partial[TENSOR_FILE], metadata={"format": "pt"})
        partial[CONFIG_FILE].write_text(text + "\n", encoding="utf-8")
        for name, path in partial.items():
            os.replace(path, directory / name)
        return directory

    @classmethod
    def load(cls, source: str | os.PathLike, *, revision: str | None = None) -> "Artifact":
        """Read and validate an artifact.

        Args:
            source: a folder, or the id of a Hugging Face Hub repository (the local cache is enough when offline).
            revision: hub revision; only with a hub id.

        Raises:
            OscarArtifactError: missing, damaged, of another schema, or not valid.

        """
        directory = _resolve(source, revision)
        config = _read_config(directory)
        try:
            tensors = load_file(directory / TENSOR_FILE)
        except FileNotFoundError:
            raise OscarArtifactError(f"{directory} lacks {TENSOR_FILE}; copy it there or calibrate again") from None
        except (SafetensorError, OSError, ValueError) as error:
            raise OscarArtifactError(
                f"{directory / TENSOR_FILE} is damaged ({error}); copy it anew or calibrate again"
            ) from error
        artifact_id = config.pop("artifact_id", None)
        actual = _artifact_id(tensors, config)
        if actual != artifact_id:
            raise OscarArtifactError(
                f"{directory}: the content has id {actual}, but {CONFIG_FILE} says {artifact_id}; a file was changed "
                "or damaged after saving; copy it anew or calibrate again"
            )
        try:
            artifact = _parse(config, tensors)
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError, IndexError) as error:
            raise OscarArtifactError(f"{directory / CONFIG_FILE} does not follow the schema: {error!r}") from error
        artifact.validate()
        return artifact

    def validate(self) -> None:
        """Check shapes, finiteness, inverse and orthogonal matrices, levels and digits of every layer.

        Raises:
            OscarArtifactError: the first thing that is wrong, with its layer and value.

        """
        if not self.layers:
            raise OscarArtifactError("the artifact has no layer; calibrate a model that has full-attention layers")
        zeros = {codec.zero for codec in self.layers.values()}
        if len(zeros) > 1:
            raise OscarArtifactError(f"all layers must store key zeros alike, found {sorted(zeros)}")
        try:
            expected = (self.geometry["num_key_value_heads"], page_head_size(self.geometry["head_size"]))
        except ValueError as error:
            raise OscarArtifactError(f"the artifact's model cannot be served: {error}") from None
        for index, codec in self.layers.items():
            if not 0 <= index < self.geometry["num_hidden_layers"]:
                raise OscarArtifactError(
                    f"layer {index} is beyond the model's {self.geometry['num_hidden_layers']} layers"
                )
            if (codec.num_kv_heads, codec.head_size) != expected:
                raise OscarArtifactError(
                    f"layer {index} has {codec.num_kv_heads} KV heads of size {codec.head_size}, the model's pages "
                    f"have {expected[0]} of size {expected[1]}"
                )
            _validate_codec(index, codec)

    def check_model(self, config: Any) -> None:
        """Compare with the model that is to be served.

        Args:
            config: its Hugging Face configuration.

        Raises:
            OscarArtifactError: the geometry differs; the message names the fields and the command to calibrate.

        """
        geometry = model_geometry(config)
        differences = [
            f"{name} is {geometry[name]!r}, fitted on {self.geometry.get(name)!r}"
            for name in geometry
            if geometry[name] != self.geometry.get(name)
        ]
        if differences:
            served = getattr(config, "_name_or_path", "") or "<model>"
            raise OscarArtifactError(
                f"artifact {self.artifact_id} was fitted on {self.model} and does not fit this model: "
                f"{'; '.join(differences)}. Make one for it: {_calibration_command(served)}"
            )


def _artifact_id(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, allow_nan=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:12]


def _resolve(source: str | os.PathLike, revision: str | None) -> Path:
    directory = Path(source)
    if os.path.isdir(directory):  # False, not an error, for what cannot be a path
        if revision is not None:
            raise OscarArtifactError(
                f"revision {revision!r} has no meaning for the local folder {directory}; leave it out"
            )
        return directory
    name = str(source)
    hint = f"give a folder made by `{_calibration_command('<model>')}` or a hub id"
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise OscarArtifactError(f"artifact folder {name} does not exist; {hint}")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=[CONFIG_FILE, TENSOR_FILE]))
    except Exception as error:
        raise OscarArtifactError(
            f"artifact {name} is neither a folder nor available from the hub ({type(error).__name__}); {hint}"
        ) from error


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / CONFIG_FILE
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise OscarArtifactError(
            f"{directory} holds no {CONFIG_FILE}; make an artifact with `{_calibration_command('<model>')}`"
        ) from None
    except (ValueError, RecursionError, OSError) as error:
        raise OscarArtifactError(f"{path} is damaged ({error}); copy it anew or calibrate again") from error
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise OscarArtifactError(f"{path} is not an {FORMAT} artifact")
    if config.get("schema_version") != SCHEMA_VERSION:
        raise OscarArtifactError(
            f"{path} has schema version {config.get('schema_version')!r}, this program reads {SCHEMA_VERSION}; "
            "update oscar-vllm or calibrate again"
        )
    return config


def _parse(config: dict[str, Any], tensors: dict[str, Tensor]) -> Artifact:
    layers = {}
    for key, entry in config["layers"].items():
        prefix = f"layers.{int(key)}."
        if entry["zero"] not in ("page", "token"):
            raise ValueError(f"zero is {entry['zero']!r}")
        layers[int(key)] = LayerCodec(
            zero=entry["zero"],
            key_quantizer=Quantizer(**entry["key_quantizer"]),
            value_quantizer=Quantizer(**entry["value_quantizer"]),
            **{name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)},
        )
    model, segments = config["model"], config["segments"]
    geometry = dict(model["geometry"])
    for name in _GEOMETRY:
        if name not in geometry:
            raise KeyError(name)
        if name in _COUNTS and type(geometry[name]) is not int:
            raise TypeError(f"{name} is {geometry[name]!r}")
    return Artifact(
        layers=layers,
        geometry=geometry,
        model=str(model["id"]),
        revision=model["revision"],
        sink=int(segments["sink"]),
        recent=int(segments["recent"]),
        method=dict(config["method"]),
        calibration=dict(config["calibration"]),
        metrics=dict(config["metrics"]),
    )


def _validate_codec(index: int, codec: LayerCodec) -> None:
    d = codec.head_size
    for name in ("key_quantizer", "value_quantizer"):
        if not math.isfinite(getattr(codec, name).constant):
            raise OscarArtifactError(f"layer {index}: {name} has the constant {getattr(codec, name).constant}")
    for name, tensor in codec.tensors():
        integer = name in ("key_levels", "key_digit")
        if tensor.dtype != (torch.int32 if integer else torch.float32):
            raise OscarArtifactError(f"layer {index}: {name} has dtype {tensor.dtype}")
        if not integer and not bool(torch.isfinite(tensor).all()):
            raise OscarArtifactError(f"layer {index}: {name} holds non-finite values; calibrate again")
    identity = torch.eye(d, dtype=torch.float64)
    rotation = codec.value_rotation.double()
    error = (rotation @ rotation.mT - identity).abs().amax((1, 2))
    if error.max() > ORTHOGONALITY_TOLERANCE:
        raise OscarArtifactError(
            f"layer {index}, KV head {int(error.argmax())}: value_rotation is not orthogonal, max|RR^T - I| = "
            f"{error.max():.2e} > {ORTHOGONALITY_TOLERANCE:.0e}"
        )
    # A direction's slots stand together, lowest digit first: `owner` numbers the directions along the slots.
    digit = codec.key_digit.long()
    owner = (digit == 0).long().cumsum(1) - 1
    if bool((digit[:, 0] != 0).any()) or bool(((digit.diff(dim=1) != 1) & (digit[:, 1:] != 0)).any()):
        raise OscarArtifactError(f"layer {index}: key_digit does not count 0, 1, … within each direction")
    slots = torch.zeros_like(owner).scatter_add_(1, owner, torch.ones_like(owner)).gather(1, owner)
    if bool((slots > 4).any()) or bool((codec.key_levels.long() != 4**slots).any()):
        raise OscarArtifactError(
            f"layer {index}: key_levels must be 4**slots of the direction with at most 4 slots (8 bits), so that the "
            f"bits sum to {2 * d} per head"
        )
    same = owner[:, :, None] == owner[:, None, :]  # [H, slot, slot]
    first = torch.searchsorted(owner, owner)  # slot of the direction's digit 0
    encode, query = codec.key_encode.double(), codec.key_query.double()
    weight = 4.0**digit
    base_encode = encode.gather(2, first[:, None].expand_as(encode))
    base_query = query.gather(2, first[:, None].expand_as(query)) * weight[:, None]
    if not torch.equal(encode, base_encode) or bool(((query - base_query).abs() > 1e-6 * base_query.abs()).any()):
        raise OscarArtifactError(f"layer {index}: the columns of a direction's digits do not belong together")
    product = (encode.mT @ query) / weight[:, None]
    if codec.zero == "page" and bool((codec.key_weight <= 0).any()):
        raise OscarArtifactError(f"layer {index}: key_weight must be positive")
    error = torch.stack([(product - gain[:, None] * same).abs().amax((1, 2)) for gain in _gains(codec, slots)]).amin(0)
    if error.max() > INVERSE_TOLERANCE:
        raise OscarArtifactError(
            f"layer {index}, KV head {int(error.argmax())}: key_encode and key_query are not inverse to each other, "
            f"max|E^T Q - gain| = {error.max():.2e} > {INVERSE_TOLERANCE:.0e}"
        )


def _gains(codec: LayerCodec, slots: Tensor) -> list[Tensor]:
    """[H, d] factors by which slots may be read back larger than they were stored: none, or those of unbiased levels.

    A step follows from its slot's weight in the row scale, in which directions count alike or by their levels.
    """
    gains = [torch.ones(slots.shape, dtype=torch.float64)]
    if codec.zero == "page":
        lowest = codec.key_digit == 0
        for share in (torch.ones_like(gains[0]), 1 / codec.key_levels.double()):
            share = share / (share * lowest).sum(1, keepdim=True)
            step = (codec.key_weight.double() * slots / share).sqrt()
            gain = torch.ones_like(step)
            for bits in UNIT_STEP:
                own = codec.key_levels == 2**bits
                gain[own] = unbiased_gain(bits, step[own])
            gains.append(gain)
    return gains


# ---------------------------------------------------------------------------------------------- other sources


def hadamard_codecs(num_layers: int, num_kv_heads: int, head_size: int, zero: Zero = "page") -> dict[int, LayerCodec]:
    """Codecs that need no data: Hadamard rotations, `gauss` with kappa 1.1 (1.2 for keys about their page's mean).

    Heads that are padded are rotated with their padding, by a Hadamard matrix of the page's head size: every rotated
    element is a sum over all real ones, so none is padding where a row's deviation is taken.

    Args:
        num_layers: layers that get one.
        num_kv_heads: H.
        head_size: of the model's heads.
        zero: see `LayerCodec`.

    Raises:
        OscarUnsupportedError: the head size fits no page.

    """
    try:
        size = page_head_size(head_size)
    except ValueError as error:
        raise OscarUnsupportedError(str(error)) from None
    rotation = hadamard(size).expand(num_kv_heads, size, size)
    codec = rotation_codec(
        rotation,
        rotation,
        zero=zero,
        key_quantizer=Quantizer("gauss", 1.2 if zero == "page" else 1.1),
        value_quantizer=Quantizer("gauss", 1.1),
    )
    return dict.fromkeys(range(num_layers), codec)


def import_rotationzoo(
    keys: str | os.PathLike,
    values: str | os.PathLike,
    config: Any,
    *,
    model: str,
    key_clip: float = 0.96,
    value_clip: float = 0.92,
    sink: int = 64,
    recent: int = 256,
) -> Artifact:
    """Artifact from two RotationZoo ``.pt`` files (the rotations published with the paper).

    Format version 1 has one rotation [d, d] per layer, version 2 one per KV head [H, d, d]; rows are multiplied from
    the left, ``x @ rotation``. The quantizer is the paper's: clip at a quantile, then minimum and maximum.

    Args:
        keys: file with the key rotations; values: file with the value rotations.
        values: see keys.
        config: the model's Hugging Face configuration.
        model: its name.
        key_clip: quantile of |x| at which keys are clipped; value_clip likewise.
        value_clip: see key_clip.
        sink: BF16 tokens at the start; recent: at the end.
        recent: see sink.

    Raises:
        OscarArtifactError: a file is no RotationZoo file or does not fit the model. Nothing in it is executed.
        OscarUnsupportedError: the model's heads are padded, which no file provides for.

    """
    geometry = model_geometry(config)
    heads, d = geometry["num_key_value_heads"], geometry["head_size"]
    if page_head_size(d) != d:
        raise OscarUnsupportedError(
            f"heads of size {d} are padded to {page_head_size(d)}, and rotations of size {d} would leave the padding "
            f"among the codes; calibrate instead: {_calibration_command(model)}"
        )
    key_rotations, value_rotations = (_rotationzoo_layers(path, heads, d) for path in (keys, values))
    if key_rotations.keys() != value_rotations.keys():
        raise OscarArtifactError(
            f"{keys} has layers {sorted(key_rotations)}, {values} has layers {sorted(value_rotations)}; they must agree"
        )
    layers = {
        index: rotation_codec(
            key_rotations[index],
            value_rotations[index],
            zero="token",
            key_quantizer=Quantizer("minmax", key_clip),
            value_quantizer=Quantizer("minmax", value_clip),
        )
        for index in key_rotations
    }
    artifact = Artifact(
        layers=layers,
        geometry=geometry,
        model=model,
        sink=sink,
        recent=recent,
        method={"name": "rotationzoo", "keys": Path(keys).name, "values": Path(values).name},
    )
    artifact.validate()
    return artifact


def _rotationzoo_layers(path: str | os.PathLike, heads: int, head_size: int) -> dict[int, Tensor]:
    """Layer index -> rotation [H, d, d] of one RotationZoo file."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise OscarArtifactError(f"{path} does not exist") from None
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise OscarArtifactError(f"{path} is no RotationZoo file that can be read safely: {reason}") from error
    version = content.get("format_version") if isinstance(content, dict) else None
    if not isinstance(version, int) or version not in (1, 2):
        raise OscarArtifactError(f"{path} has format_version {version!r}; RotationZoo versions 1 and 2 can be imported")
    entries = content.get("layers")
    if isinstance(entries, list):
        entries = dict(enumerate(entries))
    if not isinstance(entries, dict) or not entries:
        raise OscarArtifactError(f"{path} has no layers")
    shape = (head_size, head_size) if version == 1 else (heads, head_size, head_size)
    layers = {}
    for index, entry in entries.items():
        rotation = entry.get("rotation") if isinstance(entry, dict) else None
        if not isinstance(rotation, Tensor) or tuple(rotation.shape) != shape:
            found = tuple(rotation.shape) if isinstance(rotation, Tensor) else None
            raise OscarArtifactError(f"{path}: layer {index} has a rotation of shape {found}, the model needs {shape}")
        if not rotation.is_floating_point() or rotation.layout != torch.strided or not str(index).isdecimal():
            raise OscarArtifactError(f"{path}: layer {index!r} is {rotation.dtype}, {rotation.layout}; not a rotation")
        layers[int(index)] = rotation.double().expand(heads, head_size, head_size)
    return layers
