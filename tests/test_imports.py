# SPDX-License-Identifier: Apache-2.0
"""The import rule: data flows one way, and only `compat.py` knows vLLM's version."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
VLLM_FACING = {"compat.py", "plugin.py", "cache_spec.py", "cache_manager.py", "backend.py", "offload.py", "prefill.py"}
STANDARD = set(sys.stdlib_module_names)
ALLOWED = {
    "triton_ops": {"torch", "triton", "einops", "triton_ops"},
    "calib": {
        *("torch", "numpy", "transformers", "datasets", "einops", "safetensors", "tqdm", "huggingface_hub"),
        *("calib", "triton_ops", "oscar_vllm.artifact", "oscar_vllm.errors"),
    },
}


def imports(path: Path) -> set[str]:
    """Modules a file imports, at any depth."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} uses a relative import"
            names.add(node.module or "")
    return {name for name in names if name.split(".")[0] not in STANDARD}


def files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("path", [*files("triton_ops"), *files("calib")], ids=lambda p: str(p.relative_to(ROOT)))
def test_lower_layers_import_only_what_they_may(path):
    allowed = ALLOWED[path.relative_to(ROOT).parts[0]]
    foreign = {name for name in imports(path) if name not in allowed and name.split(".")[0] not in allowed}
    assert not foreign


@pytest.mark.parametrize("path", files("oscar_vllm"), ids=lambda p: p.name)
def test_only_vllm_facing_modules_import_vllm(path):
    uses_vllm = any(name.split(".")[0] == "vllm" for name in imports(path))
    assert not uses_vllm or path.name in VLLM_FACING


@pytest.mark.parametrize("path", files("oscar_vllm"), ids=lambda p: p.name)
def test_only_compat_looks_at_the_version(path):
    if path.name != "compat.py":
        text = path.read_text()
        assert "vllm.__version__" not in text
        assert "vllm.version" not in text


def test_importing_the_package_is_free():
    """The entry point is imported by every vLLM process, whether it uses the plugin or not."""
    code = "import sys, oscar_vllm; print([m for m in ('torch', 'vllm', 'triton') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True, cwd=ROOT).strip() == "[]"
