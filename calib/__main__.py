# SPDX-License-Identifier: Apache-2.0
"""``python -m calib --model MODEL --output-dir DIR``: fit the constants of a model's 2-bit KV cache."""

import argparse
import os
import sys
from dataclasses import fields, replace
from pathlib import Path

from calib.hub import check_repository, push
from calib.rotation import CHOICES, PRESETS, flag
from oscar_vllm.errors import OscarArtifactError, OscarConfigError, OscarUnsupportedError

HELP = {
    "granularity": "one basis per KV head, or one for all heads of a layer (head)",
    "composition": "rotation of values, and of keys with --allocation uniform: U eigenvectors, H Hadamard, "
                   "P bit-reversed order (UH)",
    "key_target": "U of keys from the queries' covariance or from the keys' own (query)",
    "query_weight": "queries count by what their outputs may lose by errors in history, or all alike (history)",
    "positions": "statistics for all positions of the longest context, or for those of the samples alone (context)",
    "value_target": "U of values from the attention's output, its mean-field stand-in, or the values (output)",
    "allocation": "bits of key directions by their variance, or two for each (spectral)",
    "max_bits": "most bits of a direction with --allocation spectral (8)",
    "spread": "Hadamard rotations inside groups of directions of equal bits (groups)",
    "zero": "subtract each page's mean key, or store a zero per token (page)",
    "quantizer": "step from the deviation of a row, or from its extremes; minmax needs --zero token (gauss)",
    "centre": "calibrated means to subtract; of keys only with --zero token (none)",
}
"""Help of the options that set a `Recipe`, with what --preset default has."""


def parser() -> argparse.ArgumentParser:
    """The command line. Options of the recipe have no default here: they replace the preset's."""
    top = argparse.ArgumentParser(
        prog="python -m calib", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    top.add_argument("--model", required=True, help="hub id or folder of a transformers model")
    top.add_argument("--output-dir", required=True, help="folder of the artifact; a killed run resumes from it")
    top.add_argument("--revision", help="hub revision of the model")
    top.add_argument("--overwrite", action="store_true", help="replace an artifact in --output-dir")
    top.add_argument("--keep-statistics", action="store_true",
                     help="leave the statistics in --output-dir: a run with other method options starts from them")
    top.add_argument("--push-to-hub", metavar="REPOSITORY", help="also publish the artifact on the Hugging Face Hub")
    top.add_argument("--trust-remote-code", action="store_true", help="passed to transformers")
    data = top.add_argument_group("text")
    data.add_argument("--dataset", help="NAME or NAME:CONFIG of a Hugging Face dataset, or a .jsonl or .txt file "
                      "(default: a small mixture that comes with the package)")
    data.add_argument("--split", default="train", help="split of a Hugging Face dataset (%(default)s)")
    data.add_argument("--text-field", default="text", help="field that holds the text (%(default)s)")
    data.add_argument("--num-samples", type=int, default=10, help="samples for the statistics (%(default)s)")
    data.add_argument("--held-out", type=int, default=2, help="samples to choose and measure by (%(default)s)")
    data.add_argument("--max-length", type=int, default=2048, help="tokens per sample (%(default)s)")
    data.add_argument("--max-position", type=int, metavar="N", help="tokens of the longest context to be served "
                      "(the model's limit, at most 131072)")
    data.add_argument("--seed", type=int, default=0, help="which samples (%(default)s)")
    run = top.add_argument_group("model execution")
    run.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"),
                     help="auto: float32 on a CPU, the checkpoint's own elsewhere")
    run.add_argument("--device-map", help="passed to transformers, such as auto (default: one GPU, else the CPU)")
    segments = top.add_argument_group("BF16 segments")
    segments.add_argument("--sink", type=int, default=64, help="tokens at the start (%(default)s)")
    segments.add_argument("--recent", type=int, default=256, help="tokens at the end (%(default)s)")
    recipe = top.add_argument_group("method", "each option replaces what the preset says")
    recipe.add_argument("--preset", default="default", choices=tuple(PRESETS),
                        help="default: what measures best; reference: the OSCAR paper exactly")
    for name, legal in CHOICES.items():
        recipe.add_argument(flag(name), type=type(legal[0]), choices=legal, help=HELP[name])
    recipe.add_argument("--ridge", type=float,
                        help="regularization of the queries' covariance, in its mean diagonals (1e-4)")
    recipe.add_argument("--attended", type=float, help="weight of keys by what outputs may lose by their errors, with "
                        "--allocation spectral (1)")
    recipe.add_argument("--key-constant", type=float,
                        help="kappa (gauss, above 0) or clip quantile (minmax, at most 1) of keys (1.1; searched with "
                        "--allocation uniform)")
    recipe.add_argument("--value-constant", type=float, help="likewise of values (default: searched)")
    return top


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; 0, or 1 with one line on stderr when the run is refused."""
    options = vars(parser().parse_args(arguments))
    preset = PRESETS[options.pop("preset")]
    changes = {field.name: options.pop(field.name) for field in fields(preset)}
    repository, output_dir = options.pop("push_to_hub"), options.pop("output_dir")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        if repository is not None:
            check_repository(repository)
        recipe = replace(preset, **{name: value for name, value in changes.items() if value is not None})
        from calib.pipeline import calibrate

        result = calibrate(options.pop("model"), output_dir, recipe=recipe, **options)
        print(result.table())
        print(f"artifact {result.artifact.artifact_id} written")
        if repository is not None:
            print(f"published: {push(Path(output_dir), repository)}")
    except (OscarConfigError, OscarUnsupportedError, OscarArtifactError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
