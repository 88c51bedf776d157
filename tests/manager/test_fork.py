"""Copy-on-write: a fork moves no bytes, and no writer changes what another row reads."""

from __future__ import annotations

import pytest

from block_manager import DiffusionKVAdmissionError, DiffusionKVContext, RequestError
from tests.manager.helpers import Memory, admit, manager, row, rows

SIZE = 4


def _tables(metadata: object) -> list[list[int]]:
    return [sequence.block_ids[0] for sequence in metadata.sequences]  # type: ignore[attr-defined]


def _fill(memory: Memory, metadata: object, name: str) -> None:
    for sequence in metadata.sequences:  # type: ignore[attr-defined]
        for position in range(sequence.seq_len):
            value = (name, sequence.sequence_id, position)
            memory.write(sequence.block_ids[0], SIZE, position, value)


def _read(memory: Memory, metadata: object) -> list[list[object]]:
    return [
        [memory.read(s.block_ids[0], SIZE, p) for p in range(s.seq_len)]
        for s in metadata.sequences  # type: ignore[attr-defined]
    ]


def test_a_fork_of_both_cfg_rows_takes_no_block_and_copies_nothing() -> None:
    # W2: vllm-omni#4907
    m = manager(32)
    parent = admit(m, "parent", rows("parent", 2, prefix=10))
    m.publish_request("parent")
    free = m.num_free_blocks
    child = m.fork_request("parent", "child")
    assert m.num_free_blocks == free
    assert _tables(child) == _tables(parent)
    assert [s.cached_prefix_len for s in child.sequences] == [10, 10]
    assert child.allocation_generation > parent.allocation_generation
    assert {m.block_pool.ref_count(b) for t in _tables(child) for b in t} == {2}
    m.check()


def test_the_first_write_to_shared_blocks_yields_the_copies_and_leaves_the_parent_intact() -> None:
    m, memory = manager(32), Memory()
    parent = admit(m, "parent", rows("parent", 2, prefix=10))
    _fill(memory, parent, "parent")
    m.publish_request("parent")
    m.fork_request("parent", "child")
    update = m.make_writable("child")
    assert update is not None
    # 10 prefix and 4 target tokens: block 2 holds both, block 3 targets alone
    sources = [source for source, _ in update.copies[0]]
    assert sources == [table[at] for table in _tables(parent) for at in (2, 3)]
    memory.copy_blocks(update.copies[0], SIZE)
    child = update.metadata
    assert _read(memory, child) == _read(memory, parent)
    before = _read(memory, parent)
    for sequence in child.sequences:
        for position in range(10, 14):
            memory.write(sequence.block_ids[0], SIZE, position, "child")
    assert _read(memory, parent) == before
    assert [values[:10] for values in _read(memory, child)] == [v[:10] for v in before]
    m.check()
    assert m.make_writable("child") is not None
    assert m.make_writable("child").copies == ([],)  # type: ignore[union-attr]
    assert m.get_metadata("child").allocation_generation == child.allocation_generation


def test_the_parent_must_ask_too() -> None:
    m, memory = manager(32), Memory()
    parent = admit(m, "parent", rows("parent", 1, prefix=10))
    _fill(memory, parent, "parent")
    child = m.fork_request("parent", "child")
    update = m.make_writable("parent")
    assert update is not None
    memory.copy_blocks(update.copies[0], SIZE)
    before = _read(memory, child)
    memory.write(update.metadata.sequences[0].block_ids[0], SIZE, 12, "later")
    assert _read(memory, child) == before
    assert _tables(update.metadata) != _tables(child)
    m.check()


def test_a_block_that_is_wholly_overwritten_is_not_copied() -> None:
    m = manager(32)
    admit(m, "parent", [row("parent", prefix=8, target=8)])
    m.fork_request("parent", "child")
    update = m.make_writable("child", {0: (6, 14)})
    assert update is not None
    old, new = m.get_metadata("parent").sequences[0], update.metadata.sequences[0]
    assert [a == b for a, b in zip(old.block_ids[0], new.block_ids[0])] == [True, False] + [
        False
    ] * 2
    assert update.copies == (
        [(old.block_ids[0][1], new.block_ids[0][1]), (old.block_ids[0][3], new.block_ids[0][3])],
    )


def test_appending_grows_both_rows_and_unshares_the_partial_block() -> None:
    m, memory = manager(64), Memory()
    parent = admit(m, "parent", rows("parent", 2, prefix=8, target=2))
    _fill(memory, parent, "parent")
    m.publish_request("parent")
    m.fork_request("parent", "child")
    longer = [row("child", i, prefix=range(1000 * i, 1000 * i + 10), target=6) for i in range(2)]
    update = m.advance_request("child", longer)
    assert update is not None
    assert [s.seq_len for s in update.metadata.sequences] == [16, 16]
    assert [len(t) for t in _tables(update.metadata)] == [4, 4]
    assert [s for s, _ in update.copies[0]] == [t[2] for t in _tables(parent)]
    assert [s.cached_prefix_len for s in update.metadata.sequences] == [8, 8]
    before = _read(memory, parent)
    memory.copy_blocks(update.copies[0], SIZE)
    for sequence in update.metadata.sequences:
        for position in range(10, 16):
            memory.write(sequence.block_ids[0], SIZE, position, "child")
    assert _read(memory, parent) == before
    assert m.get_metadata("parent") == parent
    m.check()
    m.close()
    assert m.num_free_blocks == 63


def test_groups_have_copies_of_their_own() -> None:
    m = manager(64, 4, 8)
    admit(m, "parent", [row("parent", prefix=10, target=4)])
    m.fork_request("parent", "child")
    update = m.make_writable("child")
    assert update is not None
    old, new = m.get_metadata("parent").sequences[0], update.metadata.sequences[0]
    assert update.copies == (
        [(old.block_ids[0][2], new.block_ids[0][2]), (old.block_ids[0][3], new.block_ids[0][3])],
        [(old.block_ids[1][1], new.block_ids[1][1])],
    )


def test_contexts_are_shared_and_stay_so() -> None:
    m = manager(32, 4, 4, cross=(1,))
    context = DiffusionKVContext("text", "cross", 6)
    parent = admit(m, "parent", [row("parent", kv_contexts=[context])])
    child = m.fork_request("parent", "child")
    assert child.contexts == parent.contexts
    m.free_request("parent")
    m.check()
    assert {m.block_pool.ref_count(b) for b in child.contexts[0].block_ids[1]} == {1}
    m.free_request("child")
    assert m.num_free_blocks == 31


def test_a_fork_of_an_unpublished_parent_computes_the_prefix_itself() -> None:
    m = manager(32)
    admit(m, "parent", rows("parent", 1))
    child = m.fork_request("parent", "child")
    assert [s.cached_prefix_len for s in child.sequences] == [0]


def test_writing_over_an_own_published_block_makes_it_unfindable() -> None:
    m = manager(32)
    admit(m, "a", [row("a")])
    m.publish_request("a")
    update = m.make_writable("a", {0: (5, 6)})
    assert update is not None
    assert update.copies == ([],)
    assert [s.cached_prefix_len for s in admit(m, "b", [row("b")]).sequences] == [4]


def test_hits_are_unshared_before_they_are_overwritten() -> None:
    m = manager(32)
    first = admit(m, "a", [row("a")])
    m.publish_request("a")
    admit(m, "b", [row("b")])
    update = m.make_writable("b", {0: (4, 12)})
    assert update is not None
    assert update.copies == ([],)  # block 1 is wholly overwritten
    assert update.metadata.sequences[0].block_ids[0][0] == first.sequences[0].block_ids[0][0]
    assert update.metadata.sequences[0].block_ids[0][1] != first.sequences[0].block_ids[0][1]
    m.check()


def test_too_few_blocks_for_the_copies_is_not_now() -> None:
    m = manager(7)
    admit(m, "parent", rows("parent", 2, prefix=6, target=6))
    m.fork_request("parent", "child")
    before = m.state()
    assert m.make_writable("child") is None
    assert m.state() == before
    m.free_request("parent")
    update = m.make_writable("child")
    assert update is not None
    assert update.copies == ([],)


def test_growing_past_the_pool_is_never() -> None:
    m = manager(5)
    admit(m, "a", [row("a")])
    before = m.state()
    with pytest.raises(DiffusionKVAdmissionError, match="needs 5 blocks, an empty pool has 4"):
        m.advance_request("a", [row("a", prefix=8, target=12)])
    assert m.state() == before


@pytest.mark.parametrize(
    ("new", "message"),
    [
        (lambda: [row("a", 0, prefix=12)], r"2 rows are declared, 1 supplied: sequence ids \[1\]"),
        (
            lambda: [row("b", i, prefix=12) for i in range(2)],
            "expected the row id 'a/0', got 'b/0'",
        ),
        (
            lambda: [row("a", i, prefix=7, target=9) for i in range(2)],
            "row 0: prefix_len: expected at least 8, got 7",
        ),
        (
            lambda: [row("a", i, prefix=8, target=3) for i in range(2)],
            "row 0: seq_len: expected at least 12, got 11",
        ),
    ],
)
def test_rows_cannot_be_lost_renamed_or_shortened(new: object, message: str) -> None:
    m = manager(32)
    admit(m, "a", rows("a", 2))
    before = m.state()
    with pytest.raises(RequestError, match=message):
        m.advance_request("a", new())  # type: ignore[operator]
    assert m.state() == before


@pytest.mark.parametrize(
    ("writes", "message"),
    [
        ({2: (0, 1)}, r"has no rows \[2\]; it has \[0, 1\]"),
        ({0: (0, 13)}, r"row 0: writes: expected positions in \[0, 12\], got \[0, 13\)"),
        ({1: (5, 4)}, r"row 1: writes: .* got \[5, 4\)"),
    ],
)
def test_bad_writes_are_refused(writes: dict[int, tuple[int, int]], message: str) -> None:
    m = manager(32)
    admit(m, "a", rows("a", 2))
    with pytest.raises(RequestError, match=message):
        m.make_writable("a", writes)


def test_a_child_is_new() -> None:
    m = manager(32)
    admit(m, "a", rows("a", 1))
    with pytest.raises(RequestError, match="request 'a': is already admitted"):
        m.fork_request("a", "a")
    m.fork_request("a", "b")
    with pytest.raises(RequestError, match="request 'b': is already admitted"):
        m.fork_request("a", "b")
