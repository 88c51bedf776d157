"""How the torch engine cuts rows into calls, and that a step reads nothing back."""

from __future__ import annotations

import itertools
from array import array
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from backends.torch_cuda.kernels.sdpa import STACKED_CELLS, extent_of
from backends.torch_cuda.kernels.segments import MIN_RUN, TILE, Mode, Segment, segment_row
from backends.torch_cuda.paged import paged_attention
from backends.torch_cuda.paging import cell_rows, page_geometry
from layout_core.rows import PagedAttentionRow
from layout_core.visibility import Visibility, row_intervals
from tests.engines.test_torch_paged import (
    ENGINE,
    LAYOUTS,
    Tables,
    plan,
    poisoned,
    random,
    row,
    slots_of,
)
from tests.oracle import dense_attention, mask_from_intervals, visible
from tests.tolerances import assert_close


def intervals(
    queries: int, keys: int, start: int, spans: Any = None, **rule: Any
) -> tuple[array[int], array[int]]:
    one = PagedAttentionRow("r", queries, keys, kv_start_pos=start, sequence_id=0, read_only=True)
    return row_intervals(one, Visibility(**rule), spans)


@pytest.mark.parametrize(
    ("queries", "keys", "start", "spans", "causal", "expected"),
    [
        (100, 300, 200, None, False, [Segment(0, 100, 0, 300, Mode.FULL)]),
        (300, 300, 0, None, True, [Segment(0, 300, 0, 300, Mode.CAUSAL)]),
        (
            # the step of a model: a causal prefix, then a full span
            120, 120, 0, [(40, 120)], True,
            [Segment(0, 40, 0, 40, Mode.CAUSAL), Segment(40, 120, 0, 120, Mode.FULL)],
        ),
        (
            # not square: tiles, each over the keys that it sees
            600, 1000, 400, None, True,
            [
                Segment(0, TILE, 0, 656, Mode.MASKED),
                Segment(TILE, 2 * TILE, 0, 912, Mode.MASKED),
                Segment(2 * TILE, 600, 0, 1000, Mode.MASKED),
            ],
        ),
        (5, 3, -2, None, True, [Segment(2, 5, 0, 3, Mode.MASKED)]),
        (4, 0, 0, None, False, []),
        (0, 9, 0, None, False, []),
        (1, 9, 8, None, True, [Segment(0, 1, 0, 9, Mode.FULL)]),
    ],
)  # fmt: skip
def test_rows_are_cut_into_the_fewest_calls(
    queries: int, keys: int, start: int, spans: Any, causal: bool, expected: list[Segment]
) -> None:
    lo, hi = intervals(queries, keys, start, spans, causal=causal)
    assert segment_row(lo, hi) == expected


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_segments_show_exactly_what_the_intervals_show(data: st.DataObject) -> None:
    """Arbitrary intervals, built from runs so that every mode appears."""
    lo: list[int] = []
    hi: list[int] = []
    for _ in range(data.draw(st.integers(0, 5))):
        count = data.draw(st.sampled_from([1, 2, MIN_RUN - 1, MIN_RUN, 40, TILE + 3]))
        first, last = sorted(data.draw(st.tuples(st.integers(0, 60), st.integers(0, 60))))
        slope = data.draw(st.sampled_from(["flat", "hi", "both"]))
        for i in range(count):
            lo.append(first + (i if slope == "both" else 0))
            hi.append(last + (i if slope != "flat" else 0))
    keys = max(hi, default=0)
    truth = mask_from_intervals(lo, hi, keys) if lo else np.zeros((0, keys), bool)
    shown = np.zeros_like(truth)
    end = 0
    for segment in segment_row(array("i", lo), array("i", hi)):
        assert end <= segment.start < segment.end
        assert segment.first < segment.last
        end = segment.end
        part = shown[segment.start : segment.end, segment.first : segment.last]
        if segment.mode is Mode.FULL:
            part[:] = True
        elif segment.mode is Mode.CAUSAL:
            assert part.shape[0] == part.shape[1]
            part[:] = np.tril(np.ones(part.shape, bool))
        else:
            part[:] = truth[segment.start : segment.end, segment.first : segment.last]
            assert truth[segment.start : segment.end].any(axis=1).all()
    assert np.array_equal(shown, truth)


class Watch(TorchDispatchMode):
    """Counts operations, and those that hand a device's value to the host."""

    READS = (
        "_local_scalar_dense",
        "nonzero",
        "masked_select",
        "item",
        "equal",
        "_to_copy",
        "unique",
    )

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))

    @property
    def reads(self) -> dict[str, int]:
        return {name: self.seen[name] for name in self.READS if self.seen[name]}


def test_a_step_of_unchanged_rows_reads_nothing_back() -> None:
    """Update and forward of a piecewise, partly read-only batch: no value reaches the host."""
    resolved = plan()
    tables = Tables({("r", 0): [7, 3, 12, 5], ("r", 1): [8, 10], ("r", "text"): [4]})
    rows = [
        row(30, 30),
        row(4, 15, 11, sequence_id=1),
        row(2, 3, 1, sequence_id=None, context_id="text", read_only=True),
    ]
    rng = np.random.default_rng(0)
    pool = poisoned(resolved)
    ENGINE.write(pool, 0, random(rng, 3, 2, 32), random(rng, 3, 2, 32), torch.tensor([32, 33, 34]))
    ENGINE.write(
        pool, 0, random(rng, 11, 2, 32), random(rng, 11, 2, 32),
        torch.tensor([*range(64, 72), 80, 81, 82]),
    )  # fmt: skip
    query, key, value = (random(rng, 36, heads, 32) for heads in (4, 2, 2))
    batch = ENGINE.prepare(
        resolved,
        rows,
        tables,
        visibility=Visibility(causal=True),
        num_heads=4,
        spans=[[(10, 29)], [], []],
    )
    with Watch() as watch:
        ENGINE.update(batch, rows, tables)
        out, _ = ENGINE.forward_paged(pool, 0, query, key, value, batch)
    assert bool(torch.isfinite(out).all())
    assert watch.seen["index_copy_"] == 2
    # K and V of the writing rows, cells of each row but the last, which lies in one block
    assert watch.seen["index_select"] == 2 + 2
    assert watch.reads == {}
    with Watch() as control:  # the double does count a read
        float(out.sum())
    assert control.reads == {"_local_scalar_dense": 1}


def test_a_full_row_is_one_call() -> None:
    resolved = plan()
    tables = Tables({("r", 0): [7, 3, 12, 5]})
    rng = np.random.default_rng(0)
    query, key, value = (random(rng, 30, heads, 32) for heads in (4, 2, 2))
    pool = poisoned(resolved)
    batch = ENGINE.prepare(
        resolved, [row(30, 30)], tables, visibility=Visibility(causal=False), num_heads=4
    )
    with Watch() as watch:
        out, _ = ENGINE.forward_paged(pool, 0, query, key, value, batch)
    assert out.is_contiguous()
    calls = {name: n for name, n in watch.seen.items() if "scaled_dot_product" in name}
    assert sum(calls.values()) == 1, calls


def test_a_piecewise_batch_is_a_call_for_each_run_of_its_rows() -> None:
    """Not one for each layer, which only a kernel that takes intervals can do."""
    resolved = plan()
    tables = Tables({("r", 0): [7, 3, 12, 5], ("r", 1): [8, 10, 2, 9]})
    rows = [row(32, 32), row(20, 32, 12, sequence_id=1)]
    rng = np.random.default_rng(0)
    query, key, value = (random(rng, 52, heads, 32) for heads in (4, 2, 2))
    pool = poisoned(resolved)
    ENGINE.write(pool, 0, random(rng, 12, 2, 32), random(rng, 12, 2, 32),
                 slots_of(tables.blocks["r", 1], 12, 8))  # fmt: skip
    batch = ENGINE.prepare(
        resolved,
        rows,
        tables,
        visibility=Visibility(causal=True),
        num_heads=4,
        spans=[[(16, 32)], [(12, 32)]],
    )
    with Watch() as watch:
        ENGINE.forward_paged(pool, 0, query, key, value, batch)
    # row 0: its causal prefix and its span; row 1: all of its queries lie in the span
    assert [len(work.segments) for work in batch.work.rows] == [2, 1]
    assert sum(n for name, n in watch.seen.items() if "scaled_dot_product" in name) == 3


def test_short_rows_of_equal_shape_share_a_call_and_stay_apart() -> None:
    """Three shapes among eight rows, in mixed order: three calls, and no row sees another."""
    lengths = [20, 9, 20, 33, 9, 20, 33, 20]
    blocks = iter(range(1, 40))
    tables = Tables({("r", i): [next(blocks) for _ in range(-(-n // 8))]
                     for i, n in enumerate(lengths)})  # fmt: skip
    rows = [row(5, n, n - 5, sequence_id=i) for i, n in enumerate(lengths)]
    resolved = plan(num_blocks=40)
    rng = np.random.default_rng(0)
    pool = poisoned(resolved)
    keys = [random(rng, n, 2, 32) for n in lengths]
    values = [random(rng, n, 2, 32) for n in lengths]
    fill = [row(n, n, sequence_id=i) for i, n in enumerate(lengths)]
    full = Visibility(causal=False)
    batch = ENGINE.prepare(resolved, fill, tables, visibility=full, num_heads=4)
    ENGINE.write(pool, 0, torch.cat(keys), torch.cat(values), batch.tensors.slots)
    query = random(rng, 40, 4, 32)
    batch = ENGINE.prepare(resolved, rows, tables, visibility=full, num_heads=4)
    with Watch() as watch:
        out, _ = ENGINE.forward_paged(pool, 0, query, None, None, batch)
    assert sum(n for name, n in watch.seen.items() if "scaled_dot_product" in name) == 3
    with_lse, lse = paged_attention(pool, 0, query, None, None, batch, return_lse=True)
    assert lse is not None
    for i, n in enumerate(lengths):
        at = slice(5 * i, 5 * i + 5)
        expected, expected_lse = dense_attention(
            query[at].numpy(), keys[i].numpy(), values[i].numpy(), np.ones((5, n), bool)
        )
        assert_close(out[at].numpy(), expected, "attention", "float32", f"row {i}")
        assert_close(with_lse[at].numpy(), expected, "attention", "float32", f"row {i}")
        assert_close(lse[at].numpy(), expected_lse, "lse", "float32", f"row {i}")
    changed = keys[2] + 1.0
    slots = slots_of(tables.blocks["r", 2], 20, 8)
    ENGINE.write(pool, 0, changed, values[2], slots)
    again, _ = ENGINE.forward_paged(pool, 0, query, None, None, batch)
    same = [i for i in range(8) if torch.equal(out[5 * i : 5 * i + 5], again[5 * i : 5 * i + 5])]
    assert same == [0, 1, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_of_adjacent_blocks_is_read_where_it_lies(layout: str, dtype: str) -> None:
    """In layouts that keep its tokens at even distances; the others gather, and both agree.

    In 16 bits where its tokens are side by side too: elsewhere gathering is faster.
    """
    resolved = plan(layout, dtype, layers=2)
    rng = np.random.default_rng(0)
    ids = [3, 4, 5, 6, 7]
    pool = poisoned(resolved)
    key, value = random(rng, 37, 2, 32, dtype=dtype), random(rng, 37, 2, 32, dtype=dtype)
    ENGINE.write(pool, 1, key, value, slots_of(ids, 37, 8))
    query = random(rng, 21, 4, 32, dtype=dtype)
    rule = Visibility(causal=False, window_left=9, window_right=6)
    batch = ENGINE.prepare(
        resolved, [row(21, 37, 13, read_only=True)], Tables({("r", 0): ids}), visibility=rule,
        num_heads=4,
    )  # fmt: skip
    with Watch() as watch:
        out, _ = ENGINE.forward_paged(pool, 1, query, None, None, batch)
    even = layout in (("LBNHC", "LHBNC") if dtype == "float32" else ("LHBNC",))
    assert ("index_select" not in watch.seen) == even
    expected, _ = dense_attention(
        *(x.double().numpy() for x in (query, key, value)),
        visible(21, 37, kv_start_pos=13, window_left=9, window_right=6),
    )
    assert_close(out.double().numpy(), expected, "attention", dtype, layout)


def test_extents_are_found_by_brute_force() -> None:
    """Every run of ids, first key and last key: where one is found, it is where each cell lies."""
    found = 0
    for layout in LAYOUTS:
        geometry = page_geometry(plan(layout, num_blocks=9, block_size=4).layers[1])
        for ids in ([2], [2, 3], [2, 3, 4], [3, 2], [2, 4], [2, 2], [5, 6, 8], [1, 5, 6]):
            table = torch.tensor(ids)
            for first in range(4 * len(ids)):
                for last in range(first + 1, 4 * len(ids) + 1):
                    extent = extent_of(geometry, ids, first, last)
                    rows = cell_rows(geometry, table, first, last).view(2, -1)
                    starts = (rows * geometry.cell_pitch).tolist()
                    even = all(
                        b - a == starts[0][1] - starts[0][0]
                        for head in starts
                        for a, b in itertools.pairwise(head)
                    )
                    if extent is None:
                        assert not even or last - first <= 4
                        continue
                    found += 1
                    assert starts == [
                        [extent.start + h * extent.head_stride + i * extent.token_stride
                         for i in range(last - first)] for h in range(2)
                    ]  # fmt: skip
    assert found > 500


def test_long_rows_are_not_stacked() -> None:
    tables = Tables({("r", i): list(range(1 + 70 * i, 71 + 70 * i)) for i in range(3)})
    rows = [row(1, 1400, 1399, sequence_id=i) for i in range(3)]
    resolved = plan(num_blocks=220, block_size=20)
    batch = ENGINE.prepare(resolved, rows, tables, visibility=Visibility(causal=True), num_heads=2)
    assert 2 * 2 * 1400 <= STACKED_CELLS < 3 * 2 * 1400
    assert [len(work.starts) for work in batch.work.rows] == [2, 1]
