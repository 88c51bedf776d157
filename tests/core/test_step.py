"""Rows, slots, and one step of paged attention laid out as integers."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layout_core import (
    BlockTables,
    Bucket,
    FullAttentionSpec,
    PagedAttentionRow,
    ResolvedLayout,
    Visibility,
    compute_slot_mapping,
    plan_step,
    resolve_layout,
    single_group_config,
)
from layout_core.errors import BlockTableError, RowError

CAUSAL = Visibility(True)


@dataclass
class Tables:
    """Block ids by identity."""

    blocks: dict[tuple[str, int | str], list[int]]
    version: int = field(default=1)

    def block_ids(self, row: PagedAttentionRow, group: int) -> array[int]:
        assert group == 0
        return array("i", self.blocks[row.identity])


def row(query_len: int, seq_len: int, start: int = 0, **fields: Any) -> PagedAttentionRow:
    values: dict[str, Any] = {"request_id": "r", "sequence_id": 0} | fields
    return PagedAttentionRow(query_len=query_len, seq_len=seq_len, kv_start_pos=start, **values)


def resolved(
    num_blocks: int = 10, null_block: bool = True, kernel: int | None = None
) -> ResolvedLayout:
    spec = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=4, dtype="float16")
    config = single_group_config(spec, num_blocks, ["a"], "LBNHC")
    return resolve_layout(config, kernel_block_sizes=[kernel], null_block=null_block)


# Slots


def test_slots_of_the_field() -> None:
    # vllm#54296: row 0 of [[5], [9]], positions 0 and 16
    assert compute_slot_mapping([5], [0, 16], 16).tolist() == [80, -1]
    assert compute_slot_mapping([0], [0, 1], 4).tolist() == [-1, -1]
    assert compute_slot_mapping([0], [0, 1], 4, null_block=False).tolist() == [0, 1]
    assert compute_slot_mapping([3], [-1], 4).tolist() == [-1]
    with pytest.raises(RowError, match=r"block_size: expected >= 1, got 0"):
        compute_slot_mapping([3], [0], 0)


@given(
    st.lists(st.integers(0, 20), max_size=5),
    st.lists(st.integers(-3, 30), max_size=10),
    st.integers(1, 6),
)
@settings(deadline=None)
def test_slots_are_in_the_rows_blocks_or_nowhere(
    ids: list[int], positions: list[int], size: int
) -> None:
    for position, slot in zip(positions, compute_slot_mapping(ids, positions, size)):
        inside = 0 <= position < len(ids) * size and ids[position // size] != 0
        assert slot == (ids[position // size] * size + position % size if inside else -1)


# Rows


@pytest.mark.parametrize(
    ("fields", "wording"),
    [
        ({"request_id": ""}, r"request_id: expected a non-empty string, got ''"),
        ({"context_id": "c"}, r"expected exactly one of sequence_id and context_id"),
        ({"sequence_id": None}, r"expected exactly one of sequence_id and context_id"),
        ({"query_len": -1}, r"query_len: expected >= 0, got -1"),
        ({"query_len": 2.0}, r"query_len: expected an int, got 2.0"),
        ({"seq_len": 3}, r"span must lie within \[0, 3\), got \[0, 4\)"),
        ({"start": -1}, r"span must lie within \[0, 8\), got \[-1, 3\)"),
        ({"first_key": 9}, r"first_key: expected a position in \[0, 8\], got 9"),
        ({"first_key": 2}, r"position 0 was evicted \(first_key is 2\)"),
    ],
)
def test_malformed_rows(fields: dict[str, Any], wording: str) -> None:
    values: dict[str, Any] = {"query_len": 4, "seq_len": 8} | fields
    with pytest.raises(RowError, match=wording):
        row(**values)


def test_identities() -> None:
    assert row(1, 1).identity == ("r", 0)
    assert row(1, 1, sequence_id=None, context_id="text").identity == ("r", "text")
    assert row(5, 3, -2, read_only=True).kv_start_pos == -2


def test_buckets_are_positive() -> None:
    with pytest.raises(RowError, match=r"bucket.rows: expected an int >= 1, got 0"):
        Bucket(tokens=1, rows=0, blocks=1)


# Steps

TABLES = Tables({("r", 0): [3, 7], ("r", 1): [2], ("r", "c"): [9, 1, 4]})


def test_tables_are_block_tables() -> None:
    assert isinstance(TABLES, BlockTables)


def test_a_step_as_integers() -> None:
    rows = [
        row(3, 6, 3),
        row(2, 2, sequence_id=1),
        row(2, 9, 7, sequence_id=None, context_id="c", read_only=True),
    ]
    step = plan_step(resolved(), rows, TABLES, visibility=CAUSAL)
    assert (step.num_tokens, step.num_rows, step.max_blocks, step.block_size) == (7, 3, 3, 4)
    assert step.query_lens.tolist() == [3, 2, 2]
    assert step.seq_lens.tolist() == [6, 2, 9]
    assert step.kv_starts.tolist() == [3, 0, 7]
    assert step.cu_seqlens.tolist() == [0, 3, 5, 7]
    assert step.slots.tolist() == [15, 28, 29, 8, 9, -1, -1]
    assert step.hi.tolist() == [4, 5, 6, 1, 2, 8, 9]
    assert set(step.lo) == {0}
    assert step.block_table.tolist() == [3, 7, 0, 2, 0, 0, 9, 1, 4]
    assert step.matches(rows, 1)
    assert not step.matches(rows, 2)
    assert not step.matches(rows[:2], 1)


def test_a_bucket_pads_to_static_shapes() -> None:
    step = plan_step(resolved(), [row(3, 6, 3)], TABLES, visibility=CAUSAL, bucket=Bucket(5, 2, 4))
    assert (step.num_tokens, step.num_real_tokens, step.num_rows, step.max_blocks) == (5, 3, 2, 4)
    assert step.slots.tolist() == [15, 28, 29, -1, -1]
    assert step.hi.tolist() == [4, 5, 6, 0, 0]
    assert step.block_table.tolist() == [3, 7, 0, 0, 0, 0, 0, 0]
    assert step.cu_seqlens.tolist() == [0, 3, 3]
    warm_up = plan_step(resolved(), [], TABLES, visibility=CAUSAL, bucket=Bucket(4, 1, 2))
    assert set(warm_up.slots) == {-1}
    assert set(warm_up.hi) == {0}


@pytest.mark.parametrize(
    ("bucket", "wording"),
    [
        (Bucket(2, 1, 2), r"bucket.tokens: the step has 3, the bucket holds 2"),
        (Bucket(3, 1, 1), r"bucket.blocks: the step has 2, the bucket holds 1"),
    ],
)
def test_a_bucket_that_is_too_small(bucket: Bucket, wording: str) -> None:
    with pytest.raises(RowError, match=wording):
        plan_step(resolved(), [row(3, 6, 3)], TABLES, visibility=CAUSAL, bucket=bucket)


def test_a_split_group_counts_kernel_blocks() -> None:
    step = plan_step(resolved(kernel=2), [row(3, 6, 3)], TABLES, visibility=CAUSAL)
    assert step.block_size == 2
    assert step.block_table.tolist() == [6, 7, 14, 15]
    # a slot is the same token in either count
    assert step.slots.tolist() == [15, 28, 29]


@pytest.mark.parametrize(
    ("rows", "blocks", "wording"),
    [
        ([row(1, 9, 8)], [3, 7], r"position 8 is past the row's 2 blocks .* seq_len 9 needs 3"),
        ([row(1, 5, 4)], [3, 10], r"row 0 \(request 'r', 0\): block id 10 is outside \[0, 10\)"),
        ([row(1, 5, 4)], [-1, 3], r"block id -1 is outside"),
        ([row(1, 5, 4)], [0, 3], r"entry 0 is the null block, and queries see keys \[0, 4\) in it"),
        ([row(8, 8)], [3, 3], r"block 3 at entry 1 is written twice in this step, first by row 0"),
    ],
)
def test_tables_that_contradict_the_rows(
    rows: list[PagedAttentionRow], blocks: list[int], wording: str
) -> None:
    with pytest.raises(BlockTableError, match=wording):
        plan_step(resolved(), rows, Tables({("r", 0): blocks}), visibility=CAUSAL)


def test_null_blocks_where_nobody_looks() -> None:
    tables = Tables({("r", 0): [0, 3]})
    evicted = row(1, 6, 5, first_key=4)
    assert plan_step(resolved(), [evicted], tables, visibility=CAUSAL).slots.tolist() == [13]
    windowed = row(1, 6, 5)
    step = plan_step(resolved(), [windowed], tables, visibility=Visibility(True, window_left=1))
    assert step.lo.tolist() == [4]
    blind = Visibility(True, window_left=0)
    with pytest.raises(BlockTableError, match=r"is the null block, and queries see keys \[3, 4\)"):
        plan_step(resolved(), [row(1, 4, 3, read_only=True)], tables, visibility=blind)
    free = plan_step(resolved(null_block=False), [row(1, 1)], tables, visibility=CAUSAL)
    assert free.slots.tolist() == [0]


def test_one_writer_for_each_identity() -> None:
    with pytest.raises(RowError, match=r"row 1 .*identity of a writing row must be unique"):
        plan_step(resolved(), [row(1, 1), row(1, 2, 1)], TABLES, visibility=CAUSAL)
    twice = [row(1, 4, 3, read_only=True), row(1, 4, 3, read_only=True)]
    assert plan_step(resolved(), twice, TABLES, visibility=CAUSAL).slots.tolist() == [-1, -1]
    shared = Tables({("r", 0): [3], ("r", 1): [3]})
    with pytest.raises(BlockTableError, match=r"block 3 .* written twice in this step"):
        plan_step(resolved(), [row(1, 1), row(1, 1, sequence_id=1)], shared, visibility=CAUSAL)
