# SPDX-License-Identifier: Apache-2.0
"""The decode kernels compile for every architecture, attend within the registers and memory the schedule counts on.

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
STACK = {(4, 64): 0, (8, 64): 112, (16, 64): 0, (4, 128): 48, (8, 128): 64, (16, 128): 56, (4, 256): 160, (8, 256): 8}
"""Bytes a thread of the attend kernel may spill on sm_90, by rows and head size: what Triton 3.6 or 3.9 needs."""
ARCHITECTURES = [80, 89, 100, 120]


MAX_SHARED = 99 * 1024  # of a block on the architectures with least


def compiled_usage(
    kernel, pointers: dict[str, str], constants: dict, *, capability: int, warps: int, registers: int | None
) -> dict[str, int]:
    """Registers, bytes of stack and of shared memory of a kernel."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {}
    for name in names:
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            signature[name] = "*" + pointers[name.removesuffix("_ptr")]
        else:
            signature[name] = "fp32" if name == "scale_log2" else "i32"
    aligned = [n for n in names if n.endswith("_ptr") or ("stride" in n and "table" not in n)]
    attributes = {(names.index(n),): [["tt.divisibility", 16]] for n in aligned if n not in constants}
    source = ASTSource(kernel, signature, {(names.index(n),): v for n, v in constants.items()}, attributes)
    compiled = triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps, "maxnreg": registers}
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = dict(re.findall(r"(REG|STACK):(\d+)", usage.stdout + usage.stderr))
    return {"registers": int(found["REG"]), "stack": int(found["STACK"]), "shared": compiled.metadata.shared}


def compile_attend(rows: int, head_size: int, zero: str, capability: int, soft_cap: float = 0.0) -> dict[str, int]:
    from triton_ops import attend_decode
    from triton_ops.layout import PageLayout
    from triton_ops.schedule import ENTRY_FIELDS, WINDOW_TILE, register_limit
    from triton_ops.soft_cap import soft_cap_log2

    layout = PageLayout(head_size, zero)
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
        "PAGE_BYTES": layout.page_bytes,
        "TILE": WINDOW_TILE,
        "BLOCK": 16,
        "ENTRY_FIELDS": ENTRY_FIELDS,
        "MAX_WEIGHT": attend_decode._MAX_WEIGHT,
        "SOFT_CAP": soft_cap_log2(soft_cap),
        "PREFETCH": attend_decode.prefetches_pages(rows, (capability // 10, capability % 10)),
        "COMPILED": True,
        "PDL": capability >= 90,
    }
    return compiled_usage(
        attend_decode._attend_kernel,
        pointers,
        constants,
        capability=capability,
        warps=1,
        registers=register_limit(rows, head_size),
    )


def compile_prepare(requests: int, head_size: int, zero: str, capability: int) -> dict[str, int]:
    from triton_ops import prepare

    constants = {
        "GROUP": 4,
        "HEADS": 8,
        "HEAD_SIZE": head_size,
        "ROWS": 4,
        "ROW_BLOCKS": 1,
        "TOKEN_ZERO": zero == "token",
        "MAX_INTEGER": prepare.MAX_INTEGER,
        "PROGRAM_ROWS": prepare.PROGRAM_ROWS,
        "STEP": prepare.matrix_step(head_size),
        "PDL": capability >= 90,
    }
    pointers = {"query": "bf16", "halves": "fp16", "unit": "fp32", "key_mean": "fp32", "query_start": "i32"}
    pointers |= {"seq_lens": "i32", "fragments": "i8", "plain": "fp16", "sums": "i32", "factors": "fp32"}
    return compiled_usage(
        prepare._prepare_kernel, pointers, constants, capability=capability, warps=prepare.WARPS, registers=None
    )


def compile_merge(requests: int, head_size: int, zero: str, capability: int) -> dict[str, int]:
    from triton_ops import attend_decode
    from triton_ops.schedule import REQUEST_FIELDS, decode_grid

    grid = decode_grid(
        num_requests=requests, max_query_len=1, num_query_heads=32, num_kv_heads=8, head_size=head_size,
        multiprocessors=132, capability=(capability // 10, capability % 10),
    )  # fmt: skip
    options = attend_decode.merge_options(grid=grid, num_kv_heads=8, head_size=head_size, multiprocessors=132)
    constants = {
        "HEADS": 8,
        "GROUP": 4,
        "HEAD_SIZE": head_size,
        "ROWS": grid.rows,
        "ROW_BLOCKS": grid.row_blocks,
        "REQUEST_FIELDS": REQUEST_FIELDS,
        "M": options.rows,
        "SLOTS": options.slots,
        "TAIL": options.tail,
        "COLUMNS": attend_decode.merge_columns(head_size),
        "HAS_LSE": True,
        "COMPILED": True,
        "PDL": capability >= 90,
    }
    pointers = {"partial": "fp32", "stats": "fp32", "requests": "i32", "query_start": "i32", "seq_lens": "i32"}
    pointers |= {"rotation": "fp32", "mean": "fp32", "output": "bf16", "lse": "fp32"}
    return compiled_usage(
        attend_decode._merge_kernel,
        pointers,
        constants,
        capability=capability,
        warps=attend_decode.MERGE_WARPS,
        registers=None,
    )


def in_a_process(variants: list[tuple]) -> list[dict[str, int]]:
    """What compiled variants use: each the name of a kernel in `COMPILERS` and arguments of its function."""
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

    variants = [("attend", rows, d, zero, 90, 0.0) for rows, d in SHIPPED for zero in ("page", "token")]
    variants += [("attend", rows, d, "page", 90, 50.0) for rows, d in [(4, 128), (16, 128), (4, 256), (8, 256)]]
    for (_, rows, d, zero, _, cap), used in zip(variants, in_a_process(variants), strict=True):
        name = f"{rows} rows, head size {d}, zero={zero}, soft cap {cap}: {used}"
        assert used["registers"] <= register_limit(rows, d), name
        assert used["shared"] + 1024 <= shared_bytes(rows=rows, head_size=d), name
        assert used["stack"] <= STACK[rows, d], name


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["prepare", "merge"])
def test_little_is_spilled_on_sm90(kernel):
    variants = [(kernel, requests, d, "page", 90) for requests in (1, 8, 32) for d in (64, 128)]
    for variant, used in zip(variants, in_a_process(variants), strict=True):
        assert used["stack"] <= 64, (variant, used)


@pytest.mark.slow
def test_prepare_leaves_registers_on_sm90():
    """The programs of attend start beside it: 8 warps of 64 registers are a quarter of a multiprocessor's."""
    (used,) = in_a_process([("prepare", 1, 128, "page", 90)])
    assert used["registers"] <= 80, used
    assert used["stack"] == 0, used


@pytest.mark.slow
@pytest.mark.parametrize("capability", ARCHITECTURES)
def test_other_architectures_compile(capability):
    shapes = [(4, 128, "page"), (8, 64, "token"), (16, 128, "page")]
    variants: list[tuple] = [("attend", *shape, capability) for shape in shapes]
    variants += [("attend", 8, 256, "token", capability, 50.0)]
    shapes = [(1, 128, "page"), (8, 256, "token")]
    variants += [(kernel, *shape, capability) for kernel in ("prepare", "merge") for shape in shapes]
    for (kernel, *shape), used in zip(variants, in_a_process(variants), strict=True):
        assert kernel == "attend" or used["shared"] <= MAX_SHARED, (kernel, shape, used)


COMPILERS = {"attend": compile_attend, "prepare": compile_prepare, "merge": compile_merge}

if __name__ == "__main__":
    print(json.dumps([COMPILERS[kernel](*variant) for kernel, *variant in json.loads(sys.argv[1])]))
