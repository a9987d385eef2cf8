# SPDX-License-Identifier: Apache-2.0
"""The window manager inside vLLM's own KVCacheManager and BlockPool, driven as the scheduler drives them.

`Engine` plays scheduler and worker. It knows what every window slot holds (a digest of the tokens up to the one written
there), so a read of a block that was freed, never written or overwritten by somebody else is found where it happens.
"""

from collections import deque
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus

import oscar_vllm
from oscar_vllm.cache_spec import SinkWindowSpec

PAGE, BLOCK, MAX_LEN = 128, 16, 4096
WINDOWS, HISTORY = 0, 1  # group indices
TOKEN = torch.uint8


@pytest.fixture(autouse=True, scope="module")
def registered_with_vllm():
    oscar_vllm.register()
    init_none_hash(sha256)


def window_spec(**changes) -> SinkWindowSpec:
    fields = {"sink": 64, "recent": 256, "in_flight_tokens": 8192, "block_size": BLOCK} | changes
    return SinkWindowSpec(num_kv_heads=1, head_size=128, dtype=TOKEN, state_content_bytes=512, **fields)


@dataclass
class Step:
    """A scheduled step of one request: tokens, how many of them are drafts, and the table the worker was given."""

    tokens: int
    drafts: int
    table: list


@dataclass
class Running:
    request: Request
    hit: int = 0
    processed: int = 0
    in_flight: deque = field(default_factory=deque)
    table: list = field(default_factory=list)
    digests: list = field(default_factory=list)  # [i] stands for the tokens up to and including i


class Engine:
    def __init__(self, spec: SinkWindowSpec, num_blocks: int = 400, caching: bool = True, use_eagle: bool = False):
        oscar_vllm.register()
        init_none_hash(sha256)
        self.spec, self.caching = spec, caching
        history = FullAttentionSpec(block_size=PAGE, num_kv_heads=1, head_size=128, dtype=TOKEN)
        groups = [KVCacheGroupSpec(["w"], spec), KVCacheGroupSpec(["h"], history)]
        self.manager = KVCacheManager(
            KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups),
            max_model_len=MAX_LEN,
            scheduler_block_size=PAGE,
            hash_block_size=spec.block_size if caching else PAGE,
            max_in_flight_tokens=spec.in_flight_tokens or None,
            enable_caching=caching,
            use_eagle=use_eagle,
        )
        self.pool = self.manager.block_pool
        self.windows = self.manager.coordinator.single_type_managers[WINDOWS]
        self.running: dict[str, Running] = {}
        self.contents: dict[tuple[int, int], int] = {}  # (block, offset) -> digest
        self.scheduled: deque[tuple[str, Step]] = deque()  # in the order in which the worker runs them
        self.count = 0
        self._predicted: tuple[int, int] | None = None
        predict = self.manager.coordinator.get_num_blocks_to_allocate

        def recording(**arguments):
            predicted = predict(**arguments)
            self._predicted = (predicted, self.pool.get_num_free_blocks())
            return predicted

        self.manager.coordinator.get_num_blocks_to_allocate = recording

    def request(self, tokens: list[int]) -> Request:
        self.count += 1
        hasher = get_request_block_hasher(self.windows.block_size, sha256) if self.caching else None
        return Request(str(self.count), tokens, SamplingParams(max_tokens=MAX_LEN), None, block_hasher=hasher)

    def held(self, request_id: str) -> list:
        return [block for block in self.windows.req_to_blocks.get(request_id, ()) if not block.is_null]

    def used(self) -> int:
        return self.pool.num_gpu_blocks - 1 - self.pool.get_num_free_blocks()

    def _allocate(self, request: Request, tokens: int, **arguments):
        """allocate_slots, checking that exactly the predicted blocks left the pool."""
        allocated = self.manager.allocate_slots(request, tokens, **arguments)
        if allocated is not None:
            predicted, free = self._predicted
            assert free - self.pool.get_num_free_blocks() == predicted
            at_junction = self.spec.tail_blocks if request.request_id in self.windows._junctions else 0
            assert len(self.held(request.request_id)) <= self.spec.max_blocks_per_request + at_junction
        return allocated

    def start(self, request: Request, chunk: int = 8192) -> bool:
        """Admit a waiting request with its prefix hit and schedule its first chunk. False: does not fit now."""
        blocks, hit, boundary = self.manager.get_computed_blocks(request)
        request.shared_prefix_boundary = boundary
        tokens = min(chunk, request.num_tokens - hit)
        allocated = self._allocate(
            request, tokens, num_new_computed_tokens=hit, new_computed_blocks=blocks, full_sequence_must_fit=True
        )
        if allocated is None:
            return False
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = hit
        running = Running(request, hit=hit, processed=hit)
        running.table = [block.block_id for block in self.windows.req_to_blocks[request.request_id]]
        self.running[request.request_id] = running
        self._launch(running, tokens, 0)
        return True

    def step(self, request_id: str, chunk: int = 8192, drafts: int = 0) -> bool:
        """Schedule the next chunk, or one token and ``drafts`` draft tokens. False: no blocks, or nothing to do."""
        running = self.running[request_id]
        request = running.request
        left = request.num_tokens - request.num_computed_tokens
        if left > 1:
            tokens, drafts = min(chunk, left), 0
        elif left == 1 or running.in_flight:  # running ahead, the sampled token is not known yet
            tokens = 1 + drafts
        else:
            return False
        new = self._allocate(request, tokens, num_lookahead_tokens=self.spec.lookahead_tokens)
        if new is None:
            return False
        running.table += [block.block_id for block in new.blocks[WINDOWS]]
        self._launch(running, tokens, drafts)
        return True

    def _launch(self, running: Running, tokens: int, drafts: int) -> None:
        request = running.request
        step = Step(tokens, drafts, list(running.table))
        running.in_flight.append(step)
        self.scheduled.append((request.request_id, step))
        request.num_computed_tokens += tokens
        request.num_in_flight_tokens += tokens

    def process(self, request_id: str, rejected: int = 0, sampled: int = 7) -> None:
        """The worker runs the request's oldest step after all scheduled before it; the scheduler takes its output.

        A request may have hit blocks that an earlier step fills, so the order matters.
        """
        running = self.running[request_id]
        while self.scheduled[0][1] is not running.in_flight[0]:
            self.process(self.scheduled[0][0])
        self.scheduled.popleft()
        request, step = running.request, running.in_flight.popleft()
        rejected = min(rejected, step.drafts)
        start, end = running.processed, running.processed + step.tokens
        step_ids = list(request.all_token_ids[start:end])
        step_ids += [2000 + sampled + position for position in range(start + len(step_ids), end)]  # drafts
        self._extend(running, start, step_ids)
        for position in range(start, end):
            block = step.table[position // self.spec.block_size]
            if block != 0:
                self.contents[block, position % self.spec.block_size] = running.digests[position]
        self._read(running, step, start)
        running.processed = end - rejected
        request.num_in_flight_tokens -= step.tokens
        request.num_computed_tokens -= rejected
        known = request.num_tokens
        if running.processed >= known:  # the accepted drafts and the newly sampled token
            request.append_output_token_ids([*step_ids[known - start : running.processed - start], sampled])

    def _extend(self, running: Running, start: int, token_ids: list[int]) -> None:
        """Digests of all tokens up to the step's last; a prefix hit brings its tokens with it."""
        before = running.request.all_token_ids[len(running.digests) : start]
        del running.digests[start:]
        for token in [*before, *token_ids]:
            running.digests.append(hash((running.digests[-1] if running.digests else 0, token)))

    def _read(self, running: Running, step: Step, start: int) -> None:
        """Every token that the queries of this step read from the window holds what it should."""
        sinks = range(min(self.spec.sink, start))
        recents = range(max(len(sinks), start - self.spec.recent + 1), start)
        for position in [*sinks, *recents]:
            block = step.table[position // self.spec.block_size]
            if block == 0:
                optional = position < running.hit and position not in sinks and not self.spec.require_recent
                assert optional, f"token {position} of {start} is read from a null block (hit {running.hit})"
                continue
            held = self.contents.get((block, position % self.spec.block_size))
            assert held == running.digests[position], f"token {position} of {start} was overwritten"

    def run(self, request: Request, chunk: int = 8192, generate: int = 0) -> int:
        """Prefill and generate alone; returns the hit length. The request stays until `finish`."""
        assert self.start(request, chunk)
        self.process(request.request_id)
        while request.num_computed_tokens < request.num_prompt_tokens + generate:
            assert self.step(request.request_id, chunk)
            self.process(request.request_id)
        return self.running[request.request_id].hit

    def finish(self, request_id: str) -> None:
        self._forget(request_id)
        self.manager.free(self.running.pop(request_id).request)

    def _forget(self, request_id: str) -> None:
        """Steps of a request that is gone do not run."""
        self.scheduled = deque(entry for entry in self.scheduled if entry[0] != request_id)

    def preempt(self, request_id: str) -> None:
        """Free everything; the tokens in flight are dropped, the request may be started again."""
        self._forget(request_id)
        request = self.running.pop(request_id).request
        self.manager.free(request)
        request.num_computed_tokens = request.num_in_flight_tokens = 0
        request.status = RequestStatus.PREEMPTED


def prompt(length: int, family: int = 0, shared: int = 0) -> list[int]:
    """``shared`` tokens common to all families, then the family's own."""
    return [position % 97 for position in range(min(shared, length))] + [
        (family * 131 + position * 7) % 9973 + 100 for position in range(shared, length)
    ]


# ---- what is held ---------------------------------------------------------------------------------------------------


def test_a_long_prefill_chunk_holds_sinks_and_tail_only():
    engine = Engine(window_spec())
    request = engine.request(prompt(3000))
    assert engine.start(request)
    table = engine.windows.req_to_blocks["1"]
    real = [index for index, block in enumerate(table) if not block.is_null]
    assert real == [0, 1, 2, 3, *range((3000 - 256 + 1) // 16, 188)]


def test_decode_keeps_one_tail_and_gives_back_the_rest():
    engine = Engine(window_spec())
    engine.run(engine.request(prompt(1000)), generate=600)
    assert len(engine.held("1")) <= 4 + 17
    engine.finish("1")
    assert engine.used() == 0


def test_blocks_of_a_step_in_flight_are_not_given_away():
    spec = window_spec(concurrent_batches=2)
    engine = Engine(spec)
    request = engine.request(prompt(1600))
    engine.start(request, chunk=400)
    assert engine.step("1", chunk=400)
    assert engine.step("1", chunk=400)  # three steps ahead of the worker: one more than the spec allows for reads
    first = {block.block_id for block in engine.held("1")}
    assert set(engine.running["1"].in_flight[0].table[9:25]) - {0} <= first


def test_admission_asks_for_the_peak_and_never_for_more():
    spec = window_spec(concurrent_batches=2)
    engine = Engine(spec, num_blocks=1 + 32 + spec.max_blocks_per_request)
    request = engine.request(prompt(4000))
    assert engine.start(request, chunk=500)
    while request.num_computed_tokens < 4000:
        assert engine.step("1", chunk=500)
        engine.process("1")
    engine.process("1")
    engine.preempt("1")
    assert engine.start(request, chunk=500), "a request that fits an empty pool must be admitted with its own hit too"
    assert engine.running["1"].hit == 3968


def test_running_out_of_blocks_is_reported_not_raised():
    engine = Engine(window_spec(), num_blocks=60)
    assert engine.start(engine.request(prompt(1000)))
    assert not engine.start(engine.request(prompt(3000, family=1)))
    engine.finish("1")
    assert engine.used() == 0


def test_external_tokens_bring_null_windows():
    engine = Engine(window_spec())
    request = engine.request(prompt(700))
    assert engine._allocate(request, 60, num_external_computed_tokens=640) is not None
    table = engine.windows.req_to_blocks["1"]
    assert all(block.is_null for block in table[:40])
    assert not any(block.is_null for block in table[40:])
    engine.manager.free(request)
    assert engine.used() == 0


@pytest.mark.parametrize(("local", "external"), [(0, 640), (128, 512), (384, 256), (0, 128)])
def test_a_connector_fills_the_blocks_that_it_announced(local, external):
    """Real blocks stand where it brings their content and the request may read them, and nowhere else."""
    engine = Engine(window_spec())
    if local:
        engine.run(engine.request(prompt(local + 20)))
        engine.finish(str(engine.count))
    request = engine.request(prompt(700))
    blocks, hit, _ = engine.manager.get_computed_blocks(request)
    assert hit == local
    total, first = local + external, local // BLOCK
    announced = {first, first + 1, total // BLOCK - 3, total // BLOCK - 1, total // BLOCK + 5}
    engine.windows.expect_load(request.request_id, announced)
    asked = {
        "num_new_computed_tokens": hit,
        "new_computed_blocks": blocks,
        "num_external_computed_tokens": external,
        "delay_cache_blocks": True,
        "full_sequence_must_fit": True,
    }
    assert engine._allocate(request, 0, reserved_blocks=engine.pool.get_num_free_blocks(), **asked) is None
    assert engine._allocate(request, 0, **asked) is not None
    table = engine.windows.req_to_blocks[request.request_id]
    loaded = [index for index in range(first, len(table)) if not table[index].is_null]
    held = {*range(4), *range(max(0, total - 255) // BLOCK, total // BLOCK)}
    assert loaded == sorted(announced & held & set(range(first, total // BLOCK)))
    assert len(table) == total // BLOCK
    assert all(table[index].block_hash is None for index in loaded), "not to be found before it is there"
    request.num_computed_tokens = total
    engine.manager.cache_blocks(request, total)
    assert all(table[index].block_hash is not None for index in loaded)
    engine.manager.free(request)
    assert engine.used() == 0
    assert not any(getattr(engine.windows, name) for name in ("_expected_loads", "_boundaries", "_scan_from"))


def test_what_a_connector_announced_last_counts():
    engine = Engine(window_spec())
    request = engine.request(prompt(700))
    engine.windows.expect_load(request.request_id, [0, 1, 2, 3])
    engine.windows.expect_load(request.request_id, [])
    assert engine._allocate(request, 60, num_external_computed_tokens=640) is not None
    assert all(block.is_null for block in engine.windows.req_to_blocks[request.request_id][:40])


# ---- prefix caching -------------------------------------------------------------------------------------------------


def recents_found(engine: Engine, request_id: str) -> int:
    """Recent window tokens that a request got from its prefix hit."""
    running = engine.running[request_id]
    first = max(engine.spec.sink, running.hit - engine.spec.recent + 1)
    return sum(running.table[position // BLOCK] != 0 for position in range(first, running.hit))


def test_hits_are_as_long_as_those_of_plain_pages():
    engine = Engine(window_spec())
    for length in (127, 128, 129, 640, 700, 1025):
        engine.run(engine.request(prompt(length, family=length)))
        engine.finish(str(engine.count))
        again = engine.run(engine.request(prompt(length, family=length)))
        assert again == (length - 1) // PAGE * PAGE
        engine.finish(str(engine.count))


def test_the_same_prompt_finds_most_of_its_recent_tokens():
    engine = Engine(window_spec())
    engine.run(engine.request(prompt(1000)), generate=500)
    engine.finish("1")
    engine.run(engine.request(prompt(1000)))
    # The tail of the prompt is (1000 - 256, 1000]; of the hit at 896 it covers what lies above 744.
    assert recents_found(engine, "2") == 896 - 744 // BLOCK * BLOCK


def test_a_conversation_finds_generated_pages_and_their_recent_tokens():
    engine = Engine(window_spec())
    request = engine.request(prompt(500))
    engine.run(request, generate=450)
    history = list(request.all_token_ids)
    engine.finish("1")
    assert engine.run(engine.request([*history, *prompt(40, family=5)])) == 896
    assert recents_found(engine, "2") >= 128


def test_a_hit_needs_the_sinks():
    engine = Engine(window_spec())
    request = engine.request(prompt(1000))
    engine.run(request)
    sink = engine.windows.req_to_blocks["1"][2]
    engine.finish("1")
    engine.pool.evict_blocks({sink.block_id})
    assert engine.run(engine.request(prompt(1000))) == 0


def test_without_sinks_configured_a_hit_needs_no_window_at_all():
    """It is shortened by the recent tail alone, which is computed again."""
    engine = Engine(window_spec(sink=0))
    engine.run(engine.request(prompt(1000)), generate=600)
    engine.pool.evict_blocks({block.block_id for block in engine.pool.blocks if block.block_id in _windows(engine)})
    engine.finish("1")
    assert engine.run(engine.request(prompt(1000))) == 896 - 256
    engine.finish("2")
    assert engine.run(engine.request(prompt(1000))) == 896


def _windows(engine: Engine) -> set[int]:
    """Blocks that carry a hash of the window group."""
    from vllm.v1.core.kv_cache_utils import get_group_id

    return {b.block_id for b in engine.pool.blocks if b.block_hash and get_group_id(b.block_hash) == WINDOWS}


def test_required_recents_shorten_the_hit_to_a_whole_tail():
    engine = Engine(window_spec(require_recent=True, replay_tokens=PAGE))
    engine.run(engine.request(prompt(1000)))
    engine.finish("1")
    assert engine.run(engine.request(prompt(1000))) == 896
    assert recents_found(engine, "2") == 255
    engine.finish("2")
    # Somebody who shares 640 tokens would resume at 640, whose tail nobody holds; the next one finds it.
    assert engine.run(engine.request(prompt(640) + prompt(300, family=3))) == 0
    engine.finish("3")
    assert engine.run(engine.request(prompt(640) + prompt(300, family=4))) == 640
    assert recents_found(engine, "4") == 255


SHARED = [(1500, 1024), (3000, 2500), (700, 200)]
"""Tokens of prompts, and how many of them are common to all."""


@pytest.mark.parametrize(("length", "shared"), SHARED)
@pytest.mark.parametrize("chunk", [8192, 512, 300])
@pytest.mark.parametrize("required", [False, True])
def test_the_tail_where_prompts_part_is_computed_once_more_and_then_found(length, shared, chunk, required):
    engine = Engine(window_spec(require_recent=required, replay_tokens=PAGE * required), num_blocks=3000)
    part = shared // PAGE * PAGE
    hits = []
    for family in range(1, 6):
        request = engine.request(prompt(length, family, shared))
        hits.append(engine.run(request, chunk=chunk, generate=5))
        if family > 2:
            assert recents_found(engine, request.request_id) == max(0, min(255, part - engine.spec.sink))
        engine.finish(request.request_id)
    # The second one pays; where recent tokens are required, it hits no more than what a chunk happened to leave whole.
    assert hits[0] == 0
    assert hits[1] == max(0, part - 256) or required or chunk < length
    assert hits[1] < part or chunk < length
    assert hits[2:] == [part] * 3
    assert not engine.windows._junctions


def test_a_pool_without_room_to_spare_keeps_no_tail_for_others():
    engine = Engine(window_spec(), num_blocks=1 + 3 * 12 + 90)
    for family in range(1, 5):
        request = engine.request(prompt(1500, family, 1024))
        engine.run(request)
        assert request.request_id not in engine.windows._junctions
        engine.finish(request.request_id)


def test_required_recents_are_whole_after_generation():
    engine = Engine(window_spec(require_recent=True, replay_tokens=PAGE))
    for generated in (100, 127, 128, 129, 400):
        request = engine.request(prompt(500, family=generated))
        engine.run(request, generate=generated)
        history = list(request.all_token_ids)
        engine.finish(request.request_id)
        assert engine.run(engine.request([*history, 5, 6])) == (len(history) - 1) // PAGE * PAGE
        engine.finish(str(engine.count))


def test_drop_eagle_block_gives_up_one_page():
    engine = Engine(window_spec(replay_tokens=PAGE), use_eagle=True)
    engine.run(engine.request(prompt(1000)))
    engine.finish("1")
    assert engine.run(engine.request(prompt(1000))) == 768
    engine.finish("2")
    hits = []
    for family in range(1, 5):
        hits.append(engine.run(engine.request(prompt(1500, family, 700))))
        engine.finish(str(engine.count))
    assert hits == [0, 512 - 256, 512, 512]


def test_blocks_that_left_the_window_are_reused_before_any_page():
    """The order of the free list after a generation: stale window blocks first, pages and sinks last."""
    engine = Engine(window_spec())
    request = engine.request(prompt(1000))
    engine.run(request, generate=1500)
    free = engine.pool.free_block_queue.get_all_free_blocks()
    hashed = [index for index, block in enumerate(free) if block.block_hash is not None]
    # Only the tail of the prompt's end is kept among the blocks given back so far: 16 of them at most.
    assert 0 < len(hashed) <= 16
    assert hashed == list(range(len(free) - len(hashed), len(free)))
    engine.finish("1")
    windows = _windows(engine)
    assert len(windows) <= 4 + 16 + 16 + 1


def test_many_generations_do_not_push_a_prefix_out_of_the_pool():
    """A pool just large enough for the prefix and one running request; decoding recycles its own window blocks."""
    engine = Engine(window_spec(), num_blocks=1 + 3 * 8 + 120)
    engine.run(engine.request(prompt(1000)))
    engine.finish("1")
    engine.run(engine.request(prompt(200, family=1)), generate=2500)
    engine.finish("2")
    assert engine.run(engine.request(prompt(1000))) == 896


def test_a_hit_keeps_its_tail_for_the_next_one():
    """Regenerating an answer: two requests resume at the same place, one after the other has moved far past it."""
    engine = Engine(window_spec())
    request = engine.request(prompt(500))
    engine.run(request, generate=450)
    history = list(request.all_token_ids)
    engine.finish("1")
    engine.run(engine.request([*history, *prompt(40, family=5)]), generate=600)
    engine.run(engine.request([*history, *prompt(40, family=6)]))
    assert engine.running["3"].hit == 896
    assert recents_found(engine, "3") == recents_found(engine, "2") or recents_found(engine, "3") >= 128


def test_a_shared_block_keeps_its_hash_until_its_last_owner_leaves():
    engine = Engine(window_spec())
    engine.run(engine.request(prompt(1000)))
    engine.run(engine.request(prompt(1000)))
    shared = [block for block in engine.held("2") if block.ref_cnt == 2]
    assert shared
    engine.finish("1")
    assert all(block.ref_cnt == 1 and block.block_hash is not None for block in shared)
    engine.finish("2")
    assert engine.used() == 0


def test_zeroing_is_told_every_real_block():
    engine = Engine(window_spec())
    engine.windows._record_new_block_ids = True
    engine.run(engine.request(prompt(700)))
    taken = engine.windows.take_new_block_ids()
    assert 0 not in taken
    assert {block.block_id for block in engine.held("1")} <= set(taken)


# ---- the state machine ----------------------------------------------------------------------------------------------


class Traffic(RuleBasedStateMachine):
    """Any order of admissions, chunks, decode steps with rejected drafts, preemptions, aborts and hits."""

    @initialize(
        sink=st.sampled_from([0, 32, 64]),
        batches=st.integers(1, 2),
        drafts=st.sampled_from([0, 0, 3]),
        invariant_prefill=st.booleans(),
        caching=st.booleans(),
        blocks=st.sampled_from([90, 160, 400]),
        block_size=st.sampled_from([8, 16]),
    )
    def set_up(self, sink, batches, drafts, invariant_prefill, caching, blocks, block_size):
        spec = window_spec(sink=sink, recent=128, concurrent_batches=batches, speculative_tokens=drafts)
        spec = replace(spec, lookahead_tokens=drafts, block_size=block_size)
        if invariant_prefill:
            spec = replace(spec, require_recent=True, replay_tokens=PAGE)
        self.engine = Engine(spec, num_blocks=blocks, caching=caching)
        self.waiting: list[Request] = []

    @rule(family=st.integers(0, 2), length=st.integers(1, 900), shared=st.sampled_from([0, 300]))
    def submit(self, family, length, shared):
        self.waiting.append(self.engine.request(prompt(length, family, shared)))

    @precondition(lambda self: self.waiting)
    @rule(chunk=st.sampled_from([64, 200, 256, 8192]))
    def start(self, chunk):
        if self.engine.start(self.waiting[0], chunk):
            self.waiting.pop(0)
        elif not self.engine.running:
            assert self.waiting[0].num_tokens > 128 * 20 or self.engine.pool.num_gpu_blocks < 100

    def _pick(self, data, condition=lambda running: True):
        names = [name for name, running in self.engine.running.items() if condition(running)]
        return data.draw(st.sampled_from(names)) if names else None

    @precondition(lambda self: self.engine.running)
    @rule(data=st.data(), chunk=st.sampled_from([64, 200, 8192]), drafts=st.integers(0, 3))
    def step(self, data, chunk, drafts):
        batches = self.engine.spec.concurrent_batches
        name = self._pick(data, lambda running: len(running.in_flight) < batches and running.request.num_tokens < 1400)
        if name is not None:
            self.engine.step(name, chunk, min(drafts, self.engine.spec.speculative_tokens))

    @precondition(lambda self: self.engine.running)
    @rule(data=st.data(), rejected=st.integers(0, 3), sampled=st.integers(5, 9))
    def process(self, data, rejected, sampled):
        name = self._pick(data, lambda running: running.in_flight)
        if name is not None:
            self.engine.process(name, rejected, sampled)

    @precondition(lambda self: self.engine.running)
    @rule(data=st.data(), steps=st.integers(1, 60), rejected=st.integers(0, 3))
    def decode(self, data, steps, rejected):
        name = self._pick(data, lambda running: running.request.num_tokens < 1300)
        for _ in range(steps if name else 0):
            running = self.engine.running[name]
            room = len(running.in_flight) < self.engine.spec.concurrent_batches
            scheduled = room and self.engine.step(name, 200, self.engine.spec.speculative_tokens)
            if not scheduled and not running.in_flight:
                break
            self.engine.process(name, rejected)

    @precondition(lambda self: self.engine.running)
    @rule(data=st.data())
    def finish(self, data):
        name = self._pick(data, lambda running: not running.in_flight)
        if name is not None:
            request = self.engine.running[name].request
            history = list(request.all_token_ids)
            self.engine.finish(name)
            if len(history) < 800 and data.draw(st.booleans(), label="continue the conversation"):
                self.waiting.append(self.engine.request([*history, 3, 4, 5]))

    @precondition(lambda self: self.engine.running)
    @rule(data=st.data())
    def preempt(self, data):
        name = self._pick(data, lambda running: not running.in_flight)
        if name is not None:
            self.waiting.insert(0, self.engine.running[name].request)
            self.engine.preempt(name)

    @invariant()
    def counts_add_up(self):
        if hasattr(self, "engine"):
            pages = self.engine.manager.coordinator.single_type_managers[HISTORY].req_to_blocks
            tables = [*self.engine.windows.req_to_blocks.values(), *pages.values()]
            held = {block.block_id for table in tables for block in table if not block.is_null}
            assert self.engine.used() == len(held)

    def teardown(self):
        if hasattr(self, "engine"):
            for name in list(self.engine.running):
                self.engine.finish(name)
            assert self.engine.used() == 0, "a block leaked"
            assert not self.engine.windows._boundaries
            assert not self.engine.windows._scan_from


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
