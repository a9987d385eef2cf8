# SPDX-License-Identifier: Apache-2.0
"""The attend kernel compiles for every architecture, within the registers and shared memory the schedule counts on.

No GPU is needed. Triton's interpreter, which the other tests switch on, replaces the kernels when they are imported, so
this file runs itself in a process without it and reads what that prints.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHIPPED = [(4, 64), (8, 64), (16, 64), (4, 128), (8, 128), (16, 128), (4, 256), (8, 256)]
ARCHITECTURES = [80, 89, 100, 120]


def compile_attend(rows: int, head_size: int, zero: str, capability: int) -> dict[str, int]:
    """Registers, bytes of stack and of shared memory of one variant."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from triton_ops import attend_decode
    from triton_ops.layout import PageLayout
    from triton_ops.schedule import ENTRY_FIELDS, WINDOW_TILE

    kernel, layout = attend_decode._attend_kernel, PageLayout(head_size, zero)
    options = attend_decode.attend_options(rows=rows, head_size=head_size)
    pointers = {"query": "bf16", "fragments": "i8", "plain": "fp16", "factors": "fp32", "sums": "i32", "codes": "i8"}
    pointers |= {"metadata": "fp16", "windows": "bf16", "page_table": "i32", "window_table": "i32", "entries": "i32"}
    pointers |= {"partial": "fp32", "stats": "fp32"}
    constants = {
        "HEADS": 8,
        "GROUP": rows,
        "HEAD_SIZE": head_size,
        "ROWS": rows,
        "ROW_BLOCKS": 1,
        "TOKEN_ZERO": zero == "token",
        "VALUE_CODES": layout.value_codes,
        "KEY_SCALE": layout.key_scale,
        "VALUE_SCALE": layout.value_scale,
        "VALUE_ZERO": layout.value_zero,
        "KEY_ZERO": layout.key_zero,
        "TILE": WINDOW_TILE,
        "BLOCK": 16,
        "ENTRY_FIELDS": ENTRY_FIELDS,
        "MAX_WEIGHT": attend_decode._MAX_WEIGHT,
        "KEY_CHUNK": options.key_chunk,
        "VALUE_CHUNK": options.value_chunk,
        "STAGES": options.stages,
        "WINDOW_STAGES": options.window_stages,
        "COMPILED": True,
        "PDL": capability >= 90,
    }
    names = kernel.arg_names
    signature = {}
    for name in names:
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            signature[name] = "*" + pointers[name.removesuffix("_ptr")]
        else:
            signature[name] = "fp32" if name == "scale_log2" else "i32"
    divisible = [n for n in names if n.endswith("_ptr") or ("stride" in n and "table" not in n)]
    attributes = {(names.index(n),): [["tt.divisibility", 16]] for n in divisible}
    source = ASTSource(kernel, signature, {(names.index(n),): v for n, v in constants.items()}, attributes)
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": 1, "maxnreg": options.registers},
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = dict(re.findall(r"(REG|STACK):(\d+)", usage.stdout + usage.stderr))
    return {"registers": int(found["REG"]), "stack": int(found["STACK"]), "shared": compiled.metadata.shared}


def in_a_process(variants: list[tuple[int, int, str, int]]) -> list[dict[str, int]]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, __file__, json.dumps(variants)],
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout)


@pytest.mark.slow
def test_resources_on_sm90():
    from triton_ops.schedule import register_limit, shared_bytes

    variants = [(rows, d, zero, 90) for rows, d in SHIPPED for zero in ("page", "token")]
    for (rows, d, zero, _), used in zip(variants, in_a_process(variants), strict=True):
        name = f"{rows} rows, head size {d}, zero={zero}: {used}"
        assert used["registers"] <= register_limit(rows, d), name
        assert used["shared"] + 1024 <= shared_bytes(rows=rows, head_size=d), name
        assert used["stack"] <= (64 if rows == 4 and d <= 128 else 512), name


@pytest.mark.slow
@pytest.mark.parametrize("capability", ARCHITECTURES)
def test_other_architectures_compile(capability):
    assert len(in_a_process([(4, 128, "page", capability), (8, 64, "token", capability)])) == 2


if __name__ == "__main__":
    print(json.dumps([compile_attend(*variant) for variant in json.loads(sys.argv[1])]))
