# SPDX-License-Identifier: Apache-2.0
"""``python -m oscar_vllm doctor``: versions, GPU, plugin, a model's settings, self-test; for bug reports.
``python -m oscar_vllm inspect DIR``: check an artifact and show what it holds.
``python -m oscar_vllm import-rotationzoo``: make one from published rotation files.
"""

import argparse
import json
import os
import sys

from oscar_vllm.artifact import Artifact, import_rotationzoo
from oscar_vllm.config import OscarConfig
from oscar_vllm.doctor import ranges, render, report
from oscar_vllm.errors import OscarArtifactError, OscarConfigError, OscarUnsupportedError


def describe(artifact: Artifact) -> str:
    """The artifact in a few lines of text."""
    geometry = artifact.geometry
    codec = next(iter(artifact.layers.values()))
    head_size = geometry["head_size"]
    padded = "" if codec.head_size == head_size else f", padded to {codec.head_size}"
    lines = [
        f"artifact     {artifact.artifact_id}",
        f"model        {artifact.model}" + (f", revision {artifact.revision}" if artifact.revision else ""),
        f"geometry     {geometry['model_type']}, {geometry['num_hidden_layers']} layers, "
        f"{geometry['num_attention_heads']}/{geometry['num_key_value_heads']} heads of size {head_size}{padded}, "
        f"fingerprint {artifact.fingerprint}",
        f"layers       {len(artifact.layers)} with INT2 pages: {ranges(sorted(artifact.layers))}",
        f"key zeros    per {codec.zero}",
        f"segments     sink {artifact.sink}, recent {artifact.recent}",
        f"method       {json.dumps(artifact.method)}",
        f"calibration  {json.dumps(artifact.calibration)}",
    ]
    if "model" in artifact.metrics:
        lines.append(f"held out     {json.dumps(artifact.metrics['model'])}")
    if artifact.not_for_serving:
        lines.append(artifact.not_for_serving)
    lines.append("layer  key quantizer   value quantizer  directions with 0/2/4/6/8 bits per KV head")
    for index, codec in sorted(artifact.layers.items()):
        # A direction of b bits owns b/2 slots of 2**b levels each.
        counts = [int((codec.key_levels == 2**bits).sum()) / (bits // 2) for bits in (2, 4, 6, 8)]
        counts = [max(0, codec.num_kv_heads * head_size - sum(counts)), *counts]
        bits = " / ".join(f"{count / codec.num_kv_heads:.0f}" for count in counts)
        key, value = codec.key_quantizer, codec.value_quantizer
        lines.append(f"{index:5d}  {key.kind:6s} {key.constant:<7g}  {value.kind:6s} {value.constant:<8g}  {bits}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; 0, or 1 when something is refused (one line on stderr) or the doctor finds a problem."""
    parser = argparse.ArgumentParser(
        prog="python -m oscar_vllm", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser("doctor", help="what a bug report needs: versions, GPU, plugin, model, self-test")
    doctor.add_argument("--model", help="hub id or folder of a model whose settings to show; no weights are read")
    doctor.add_argument(
        "--options", default="{}", help='the "oscar" entry of --additional-config, such as \'{"artifact": "DIR"}\''
    )
    inspect = commands.add_parser("inspect", help="check an artifact and show what it holds")
    inspect.add_argument("artifact", help="folder or hub id")
    inspect.add_argument("--revision", help="hub revision")
    zoo = commands.add_parser("import-rotationzoo", help="make an artifact from RotationZoo .pt files")
    zoo.add_argument("--keys", required=True, help=".pt file with the key rotations")
    zoo.add_argument("--values", required=True, help=".pt file with the value rotations")
    zoo.add_argument("--model", required=True, help="hub id or folder of the model; only its config.json is read")
    zoo.add_argument("--output-dir", required=True, help="folder of the artifact")
    zoo.add_argument("--key-clip", type=float, default=0.96, help="quantile at which keys are clipped (%(default)s)")
    zoo.add_argument("--value-clip", type=float, default=0.92, help="likewise for values (%(default)s)")
    zoo.add_argument("--sink", type=int, default=64, help="BF16 tokens at the start (%(default)s)")
    zoo.add_argument("--recent", type=int, default=256, help="BF16 tokens at the end (%(default)s)")
    options = parser.parse_args(arguments)
    try:
        if options.command == "doctor":
            os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # vLLM logs to stdout
            chosen = OscarConfig.from_options(options.options).to_options()
            text, well = render(report(options.model, chosen))
            print(text)
            return 0 if well else 1
        if options.command == "inspect":
            artifact = Artifact.load(options.artifact, revision=options.revision)
        else:
            from transformers import AutoConfig

            from calib.pretrained import from_pretrained

            artifact = import_rotationzoo(
                options.keys,
                options.values,
                from_pretrained(AutoConfig, options.model),
                model=options.model,
                key_clip=options.key_clip,
                value_clip=options.value_clip,
                sink=options.sink,
                recent=options.recent,
            )
            artifact.save(options.output_dir)
    except (OscarArtifactError, OscarConfigError, OscarUnsupportedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(describe(artifact))
    return 0


if __name__ == "__main__":
    sys.exit(main())
