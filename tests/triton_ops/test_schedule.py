# SPDX-License-Identifier: Apache-2.0
"""The device-side schedule: every unit of every request is read exactly once, and splits are even."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.triton_ops.step_cases import DEVICES
from triton_ops.layout import PAGE_TOKENS
from triton_ops.schedule import (
    MAX_QUERY_LEN,
    WINDOW_TILE,
    DecodeGrid,
    DecodeSchedule,
    decode_grid,
    resident_programs,
)

H200 = {"multiprocessors": 132, "capability": (9, 0)}


def schedule_of(requests, entries, *, sink=64, recent=256, null=None, device="cpu"):
    """Entries and request records for ``requests[r] = (tokens before, tokens of the step)``."""
    lengths = torch.tensor([before + new for before, new in requests])
    table = torch.ones(len(requests), int(lengths.max()) // 16 + 1, dtype=torch.int32)
    for r, block in null or []:
        table[r, block] = 0
    schedule = DecodeSchedule.allocate(max_requests=len(requests), multiprocessors=8, device=device)
    schedule.entries.fill_(-77)
    schedule.requests.fill_(-77)
    schedule.update(
        grid=DecodeGrid(requests=len(requests), rows=4, row_blocks=1, entries=entries),
        query_start_loc=torch.tensor([0, *(new for _, new in requests)]).cumsum(0).int().to(device),
        seq_lens=lengths.int().to(device),
        window_table=table.to(device),
        window_block_size=16,
        sink=sink,
        recent=recent,
    )
    return schedule.entries[:entries].cpu().tolist(), schedule.requests.cpu().tolist()


def needed_tokens(before, new, sink, recent, null_blocks):
    """Tokens some query of the request reads from windows and from pages, by the rule of `reference.attend`."""
    windows, pages = set(), set()
    for q in range(before, before + new):
        for t in range(q + 1):
            present = t // 16 not in null_blocks
            if (t < sink or t > q - recent) and (present or t >= before):
                windows.add(t)
            elif t >= sink:
                pages.add(t)
    return windows, pages


def check(requests, entries, *, sink=64, recent=256, null=()):
    """Coverage, order of the partials and balance; returns units per used entry."""
    records, per_request = schedule_of(requests, entries, sink=sink, recent=recent, null=null)
    used = [record for record in records if record[0] >= 0]
    slots, sizes = set(), []
    for r, (before, new) in enumerate(requests):
        mine = [record for record in used if record[0] == r]
        if new == 0:
            assert not mine
            continue
        first, step = sum(n for _, n in requests[:r]), before
        position, tiles, pages, window_slots, history_slots = 0, set(), set(), [], []
        for record in mine:
            _, token, queries, q0, begin, end, window_slot, history_slot = record[:8]
            sink_tiles, recent_tile, window_tiles, first_page, whole_end = record[8:13]
            assert (token, queries, q0) == (first, new, step)
            assert begin == position < end
            position = end
            sizes.append(end - begin)
            tiles |= {
                i if i < sink_tiles else recent_tile + i - sink_tiles for i in range(begin, min(end, window_tiles))
            }
            pages |= {i - window_tiles + first_page for i in range(max(begin, window_tiles), end)}
            if begin < window_tiles:
                window_slots.append(window_slot)
            if end > window_tiles:
                history_slots.append(history_slot)
        base, windows, total, _ = per_request[r]
        assert [*window_slots, *history_slots] == list(range(base, base + total))
        assert len(window_slots) == windows
        assert slots.isdisjoint(range(base, base + total))
        slots |= set(range(base, base + total))
        missing = {b for q, b in null if q == r}
        from_windows, from_pages = needed_tokens(before, new, sink, recent, missing)
        assert {t // WINDOW_TILE for t in from_windows} <= tiles
        assert {t // PAGE_TOKENS for t in from_pages} <= pages
        in_vain = tiles - {t // WINDOW_TILE for t in from_windows}
        assert len(in_vain) <= 1 + len(missing), "only null blocks amid present ones, and an edge, are read in vain"
        assert all((p + 1) * PAGE_TOKENS <= before + new for p in pages), "only complete pages"
        whole = {t // PAGE_TOKENS for t in range(sink, max(before - recent + 1, 0)) if t // PAGE_TOKENS < whole_end}
        for page in whole:
            for t in range(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS):
                assert t < sink or t <= before - recent
    assert len(used) <= entries
    assert not slots or max(slots) < entries + len(requests)
    return sizes


REQUEST = st.tuples(st.integers(0, 1500), st.integers(0, 4)).filter(lambda r: sum(r) > 0)


@settings(max_examples=15)
@given(
    requests=st.lists(REQUEST, min_size=1, max_size=5),
    spare=st.integers(0, 40),
    sink=st.sampled_from([0, 16, 64, 128]),
    recent=st.sampled_from([128, 256, 400]),
)
def test_every_unit_is_read_once(requests, spare, sink, recent):
    check(requests, len(requests) + spare, sink=sink, recent=recent)


@pytest.mark.parametrize("entries", [3, 4, 5, 11, 12, 60, 200])
def test_splits_are_as_short_as_fits(entries):
    requests = [(2999, 1), (129, 1), (700, 1)]
    records, _ = schedule_of(requests, 250)
    units = [max(record[5] for record in records if record[0] == r) for r in range(3)]
    smallest = next(n for n in range(1, 100) if sum(math.ceil(u / n) for u in units) <= entries)
    assert max(check(requests, entries)) == smallest


def test_null_blocks_extend_history():
    check([(640, 1), (900, 3)], 12, null=[(0, b) for b in range(24, 40)] + [(1, 41), (1, 45)])


@pytest.mark.parametrize("entries", [3, 8, 50])
def test_splits_are_even(entries):
    sizes = check([(3000, 1), (200, 1), (700, 1)], entries)
    units = sum(sizes)
    # The unit count per split is the smallest that fits: with one unit less there would be too many splits.
    assert max(sizes) <= -(-units // max(1, entries - 2))


def test_a_skewed_batch_is_as_balanced_as_an_even_one():
    """1 request of 128k and 31 of 4k: the longest split stays within a tenth of the mean."""
    records, _ = schedule_of([(131071, 1)] + [(4095, 1)] * 31, 198)
    sizes = [record[5] - record[4] for record in records if record[0] >= 0]
    assert len(sizes) > 190
    assert max(sizes) <= 1.1 * sum(sizes) / len(sizes) + 1


@pytest.mark.parametrize("device", [d for d in DEVICES if d.values[0] == "cuda"])
def test_the_gpu_agrees_with_the_interpreter_rules(device):
    requests = [(before, 1) for before in range(0, 3000, 23)]
    records, per_request = schedule_of(requests, 4 * len(requests), device=device)
    assert {record[0] for record in records} - {-1} == set(range(len(requests)))
    assert all(total >= windows > 0 for _, windows, total, _ in per_request)


def test_one_wave_when_the_batch_fits():
    sizes = {"num_query_heads": 32, "num_kv_heads": 8, "head_size": 128, "max_query_len": 1, **H200}
    programs = 132 * resident_programs(rows=4, head_size=128, capability=(9, 0))
    for requests in (1, 8, 32, 64, 200):
        grid = decode_grid(num_requests=requests, **sizes)
        assert grid.entries >= requests
        if requests * 8 <= programs:
            assert programs - 8 < grid.entries * 8 <= programs


@pytest.mark.parametrize("queries", [1, 2, 5, MAX_QUERY_LEN])
@pytest.mark.parametrize("groups", [1, 3, 4, 7, 16])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_rows_cover_the_queries(queries, groups, d):
    grid = decode_grid(
        num_requests=2, max_query_len=queries, num_query_heads=2 * groups, num_kv_heads=2, head_size=d, **H200
    )
    assert 0 <= grid.rows * grid.row_blocks - queries * groups < grid.rows


def test_refusals():
    with pytest.raises(ValueError, match="attend_prefill"):
        decode_grid(num_requests=1, max_query_len=17, num_query_heads=2, num_kv_heads=2, head_size=64, **H200)
    with pytest.raises(ValueError, match="sink=8"):
        schedule_of([(100, 1)], 4, sink=8)
    with pytest.raises(ValueError, match="do not fit"):
        schedule_of([(100, 1)], 1 << 20)
