# SPDX-License-Identifier: Apache-2.0
"""Every kernel compiles for every architecture: the launches of one step, as its launchers make them.

No GPU is needed. Triton's interpreter, which the other tests switch on, replaces the kernels when they are imported, so
this file runs itself in a process without it. There launches are not executed but kept, and compiled for a target.
test_compile_decode.py looks at what the decode kernels use.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
ARCHITECTURES = [80, 89, 90, 100, 120]
KERNELS = {
    "append": {"_append_kernel"},
    "demote": {"_demote_kernel"},
    "gather": {"_gather_kernel"},
    "prefill": {"_prepare_kernel", "_attend_kernel"},
    "decode": {
        "_schedule_kernel",
        "_prepare_kernel",
        "_write_and_prepare_kernel",
        "_attend_kernel",
        "_merge_kernel",
    },
}


def launches(name: str, head_size: int, zero: str) -> list[tuple[Any, tuple, dict]]:
    """(kernel, positional, keyword arguments) of the launches of one part of a step."""
    import torch
    from triton.runtime.jit import JITFunction

    from triton_ops import (
        append,
        attend_decode,
        attend_prefill,
        demote,
        gather,
        layout,
        prepare,
        schedule,
        write_and_prepare,
    )
    from triton_ops.codec import Quantizer, rotation_codec

    kept: list[tuple[Any, tuple, dict]] = []
    JITFunction.run = lambda self, *args, grid, warmup, **kwargs: kept.append((self, args, kwargs))
    heads, tokens, pages = 2, 256, 4
    gauss = Quantizer("gauss", 1.1)
    bases = torch.eye(head_size).expand(heads, -1, -1)
    codec = rotation_codec(bases, bases, zero=zero, key_quantizer=gauss, value_quantizer=gauss).to("cpu")
    page = layout.PageLayout(head_size, zero)
    key = torch.zeros(tokens, heads, head_size, dtype=torch.bfloat16)
    query = torch.zeros(tokens, 4 * heads, head_size, dtype=torch.bfloat16)
    windows = torch.zeros(40, heads, 16, 2 * head_size, dtype=torch.bfloat16)
    metadata = {
        "query_start_loc": torch.tensor([0, tokens], dtype=torch.int32),
        "seq_lens": torch.tensor([2 * tokens], dtype=torch.int32),
    }
    tables = {
        "page_table": torch.zeros(1, 16, dtype=torch.int32),
        "window_table": torch.zeros(1, 48, dtype=torch.int32),
    }
    cache = {
        "pages": torch.zeros(pages, heads, page.page_bytes, dtype=torch.uint8),
        "windows": windows,
        "codec": codec,
        "layout": page,
        "sink": 64,
        **tables,
        **metadata,
    }
    sizes = {"num_tokens": tokens, "num_requests": 1}
    if name == "append":
        slots = torch.zeros(tokens, dtype=torch.int64)
        append.append(key=key, value=key, slot_mapping=slots, windows=windows, num_tokens=tokens)
    elif name == "demote":
        demote.demote(key=key, value=key, **cache, **sizes, max_query_len=tokens)
    elif name == "gather":
        plan = gather.plan_gather(
            query_lens=[tokens], max_seq_lens=[2 * tokens], seq_lens=metadata["seq_lens"], buffer_pages=pages
        )
        assert plan is not None
        out = torch.zeros(plan.rows, heads, head_size, dtype=torch.bfloat16)
        gather.gather(
            key=key, value=key, **cache, plan=plan, span=plan.spans[0], recent=256, key_out=out, value_out=out
        )
    elif name == "prefill":
        attend_prefill.attend_prefill(query=query, **cache, **sizes, scale=0.1, recent=256)
    else:
        query = query[:1]
        grid_sizes = {"num_query_heads": 4 * heads, "num_kv_heads": heads, "head_size": head_size}
        workspace = attend_decode.DecodeWorkspace.allocate(
            max_requests=1, max_query_len=1, device="cpu", multiprocessors=8, capability=(9, 0), **grid_sizes
        )
        grid = workspace.grid(num_requests=1, max_query_len=1, **grid_sizes)
        splits = schedule.DecodeSchedule.allocate(max_requests=1, multiprocessors=8, device="cpu")
        splits.update(
            grid=grid, window_table=tables["window_table"], window_block_size=16, sink=64, recent=256, **metadata
        )
        queries = {"query": query, "matrix": prepare.QueryMatrix.of(codec), "grid": grid, "scale": 0.1}
        queries["prepared"] = workspace.prepared
        prepare.prepare_query(codec=codec, **queries, **metadata)
        slots = {"slot_mapping": torch.zeros(1, dtype=torch.int64), "num_tokens": 1, "multiprocessors": 8}
        write_and_prepare.write_and_prepare(key=key[:1], value=key[:1], **slots, **queries, **cache)
        attend_decode.attend_decode(
            query=query,
            **cache,
            scale=0.1,
            recent=256,
            schedule=splits,
            workspace=workspace,
            output=torch.empty_like(query),
        )
    return kept


def compile_launch(kernel: Any, args: tuple, kwargs: dict, capability: int) -> int:
    """Bytes of shared memory of a launch compiled for a target."""
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    given = dict(zip(names, args, strict=False)) | {name: kwargs[name] for name in names if name in kwargs}
    options = {name: value for name, value in kwargs.items() if name not in names}
    signature, constants, attributes = {}, {}, {}
    types = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32"}
    types |= {torch.int64: "i64", torch.uint8: "u8", torch.int8: "i8"}
    for index, (name, parameter) in enumerate(zip(names, kernel.params, strict=True)):
        value = given[name]
        if parameter.is_constexpr or value is None:
            signature[name] = "constexpr"
            constants[(index,)] = True if name == "ASM" else value  # assembly, which launchers choose by the device
        elif isinstance(value, torch.Tensor):
            signature[name] = "*" + types[value.dtype]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
        if (index,) not in constants and not parameter.do_not_specialize:
            address = value.data_ptr() if isinstance(value, torch.Tensor) else value
            if isinstance(address, int) and address % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).metadata.shared


@pytest.mark.slow
@pytest.mark.parametrize("part", KERNELS)
def test_every_kernel_compiles_for_every_architecture(part):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, __file__, part], env=environment | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-3000:]
    compiled = json.loads(run.stdout)
    assert {(name, capability) for name, capability, _ in compiled} == {
        (name, capability) for name in KERNELS[part] for capability in ARCHITECTURES
    }
    for name, capability, shared in compiled:
        assert shared <= (227 if capability in (90, 100) else 163 if capability == 80 else 99) * 1024, (
            name,
            capability,
        )


def test_no_kernel_is_left_out():
    """Whatever is launched in triton_ops is launched here."""
    launched = {
        line.split("[")[0].strip().split()[-1]
        for path in (ROOT / "triton_ops").glob("*.py")
        for line in path.read_text().splitlines()
        if "_kernel[" in line
    }
    assert launched == set.union(*KERNELS.values())


if __name__ == "__main__":
    found = []
    for launched_kernel, positional, keywords in launches(sys.argv[1], 128, "page"):
        for architecture in ARCHITECTURES:
            shared_bytes = compile_launch(launched_kernel, positional, keywords, architecture)
            found.append((launched_kernel.__name__, architecture, shared_bytes))
    print(json.dumps(found))
