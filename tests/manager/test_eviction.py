"""Frames go, pages stay or go: eviction units are not paging units."""

from __future__ import annotations

import pytest

from block_manager import RequestError, RowTable
from layout_core.errors import BlockTableError
from layout_core.resolve import resolve_layout
from layout_core.rows import PagedAttentionRow
from layout_core.step import plan_step
from layout_core.visibility import Visibility
from tests.manager.helpers import admit, config, manager, row, rows


@pytest.mark.parametrize(
    ("frame", "units", "first_key", "gone"),
    [(6, 1, 6, 1), (6, 2, 12, 3), (4, 1, 4, 1), (5, 1, 5, 1), (3, 1, 3, 0), (7, 2, 14, 3)],
)
def test_a_frame_goes_and_a_page_shared_with_the_next_stays(
    frame: int, units: int, first_key: int, gone: int
) -> None:
    m = manager(32)
    before = admit(m, "a", [row("a", prefix=18, target=6)]).sequences[0].block_ids[0]
    free = m.num_free_blocks
    metadata = m.evict_oldest("a", frame, units)
    (sequence,) = metadata.sequences
    assert sequence.first_key == first_key
    assert sequence.block_ids[0] == [0] * gone + before[gone:]
    assert m.num_free_blocks == free + gone
    m.check()
    m.free_request("a")
    assert m.num_free_blocks == 31


def test_what_was_dropped_is_never_read_again() -> None:
    m = manager(32)
    cfg = config(32)
    table = RowTable(cfg, max_model_len=64)
    table.install(admit(m, "a", rows("a", 2, prefix=18, target=6)))
    version = table.version
    table.replace(m.evict_oldest("a", 6))
    assert table.version > version
    resolved = resolve_layout(cfg)
    visibility = Visibility(causal=False)

    def step(first_key: int) -> object:
        steps = [
            PagedAttentionRow("a", 6, 24, kv_start_pos=18, first_key=first_key, sequence_id=i)
            for i in range(2)
        ]
        return plan_step(resolved, steps, table, visibility=visibility)

    plan = step(6)
    assert set(plan.lo) == {6}  # type: ignore[attr-defined]
    assert set(plan.hi) == {24}  # type: ignore[attr-defined]
    assert min(plan.slots) >= 4  # type: ignore[attr-defined]
    with pytest.raises(BlockTableError, match="positions before 6 were evicted, got 0"):
        step(0)


def test_rows_advance_frame_by_frame_in_a_window() -> None:
    # frames of 6 tokens, pages of 4, at most 3 frames kept: use stays flat for ever
    m = manager(16)
    tokens = list(range(600))
    admit(m, "a", [row("a", prefix=tokens[:6], target=6)])
    used = set()
    for frames in range(2, 60):
        m.publish_request("a")
        update = m.advance_request("a", [row("a", prefix=tokens[: 6 * frames], target=6)])
        assert update is not None
        keep = max(0, 6 * (frames - 2))
        metadata = m.evict_before("a", keep)
        assert metadata.sequences[0].first_key == keep
        used.add(15 - m.num_free_blocks)
        m.check()
    assert max(used) <= 6
    m.close()
    assert m.num_free_blocks == 15


def test_each_row_has_a_first_key_of_its_own_and_never_goes_back() -> None:
    m = manager(64, 4, 8)
    admit(m, "a", [row("a", i, prefix=16) for i in range(2)])
    metadata = m.evict_before("a", {1: 13})
    assert [s.first_key for s in metadata.sequences] == [0, 13]
    assert [[t.count(0) for t in s.block_ids] for s in metadata.sequences] == [[0, 0], [3, 1]]
    again = m.evict_before("a", {1: 5})
    assert again == metadata  # the same generation too: nothing changed
    m.check()


def test_a_fork_keeps_what_its_parent_dropped() -> None:
    m = manager(32)
    admit(m, "parent", [row("parent", prefix=16)])
    child = m.fork_request("parent", "child")
    free = m.num_free_blocks
    m.evict_before("parent", 8)
    assert m.num_free_blocks == free
    assert m.get_metadata("child") == child
    m.free_request("child")
    assert m.num_free_blocks == free + 2
    m.check()


def test_dropped_blocks_that_were_published_can_still_be_found() -> None:
    m = manager(32)
    admit(m, "a", [row("a", prefix=16)])
    m.publish_request("a")
    m.evict_before("a", 8)
    assert m.publish_request("a") == 0
    assert admit(m, "b", [row("b", prefix=16)]).sequences[0].cached_prefix_len == 16
    m.check()


def test_bad_evictions_are_refused() -> None:
    m = manager(32)
    admit(m, "a", [row("a")])
    before = m.state()
    with pytest.raises(
        RequestError, match=r"first_key: expected a position in the prefix, \[0, 8\]"
    ):
        m.evict_before("a", 9)
    with pytest.raises(RequestError, match=r"has no rows \[3\]; it has \[0\]"):
        m.evict_before("a", {3: 1})
    with pytest.raises(RequestError, match="expected unit_tokens >= 1 and units >= 0, got 0 and 1"):
        m.evict_oldest("a", 0)
    assert m.state() == before
    m.evict_before("a", 4)
    with pytest.raises(RequestError, match=r"writes: expected positions in \[4, 12\]"):
        m.make_writable("a", {0: (3, 5)})


def test_a_pool_without_a_null_block_cannot_evict() -> None:
    m = manager(32, null_block=False)
    admit(m, "a", [row("a")])
    with pytest.raises(ValueError, match="made with null_block=False"):
        m.evict_before("a", 4)
    assert m.num_free_blocks == 29
    m.check()
