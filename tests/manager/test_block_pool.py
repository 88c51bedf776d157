"""The pool: order, counts, caching, refusals that change nothing, exact undo."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from block_manager import BlockPool, BlockPoolError


@pytest.mark.parametrize(("null_block", "usable"), [(True, [1, 2, 3]), (False, [0, 1, 2, 3])])
def test_the_null_block_is_held_back_or_not(null_block: bool, usable: list[int]) -> None:
    # field case 11: LMCache#2984, kvcached#398
    pool = BlockPool(4, null_block=null_block)
    assert pool.num_usable_blocks == pool.num_free_blocks == len(usable)
    assert pool.allocate(len(usable)) == usable
    with pytest.raises(BlockPoolError, match="1 blocks asked for, 0 are free"):
        pool.allocate(1)
    pool.free(usable)
    assert pool.num_free_blocks == len(usable)


def test_sixteen_pages_give_fifteen_blocks() -> None:
    pool = BlockPool(16)
    assert pool.num_usable_blocks == 15
    assert 0 not in pool.allocate(15)


@pytest.mark.parametrize(
    ("num_blocks", "null_block", "message"),
    [
        (1, True, "expected an int >= 2 with null_block=True, got 1"),
        (0, False, "expected an int >= 1 with null_block=False, got 0"),
        (2.0, True, "got 2.0"),
    ],
)
def test_a_pool_without_a_usable_block_is_refused(
    num_blocks: int, null_block: bool, message: str
) -> None:
    with pytest.raises(BlockPoolError, match=message):
        BlockPool(num_blocks, null_block=null_block)


def test_freed_blocks_come_back_first_and_in_the_order_of_the_free() -> None:
    pool = BlockPool(8)
    a, b, c = pool.allocate(3)
    pool.free([c, a])
    assert pool.allocate(3) == [c, a, 4]
    assert pool.ref_count(b) == 1


def test_double_free_in_one_call_uses_up_both_holds_and_a_third_raises() -> None:
    # field case 23: dynamo#13398
    pool = BlockPool(4)
    (block,) = pool.allocate(1)
    pool.touch([block])
    assert pool.ref_count(block) == 2
    free = pool.num_free_blocks
    pool.free([block, block])
    assert pool.num_free_blocks == free + 1
    before = pool.state()
    with pytest.raises(BlockPoolError, match=f"block {block} is freed 1 times and held 0 times"):
        pool.free([block])
    assert pool.state() == before


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([0], "block 0 is the null block, never freed"),
        ([1, 9], r"expected an int in \[0, 8\), got 9"),
        ([1, -1], "got -1"),
        ([1, 5], "block 5 is freed 1 times and held 0 times"),
        ([1, 2, 1], "block 1 is freed 2 times and held 1 times"),
        ([1, 2.0], "got 2.0"),
        ([1, "2"], "got '2'"),
        ([3, 3, 3], "block 3 is freed 3 times and held 2 times"),
    ],
)
@pytest.mark.parametrize("caching", [False, True])
def test_a_bad_free_raises_and_changes_nothing(caching: bool, ids: list[int], message: str) -> None:
    pool = BlockPool(8, enable_caching=caching)
    pool.allocate(4)
    pool.touch([3])
    pool.free([4])
    before = pool.state()
    with pytest.raises(BlockPoolError, match=message):
        pool.free(ids)
    assert pool.state() == before
    pool.check()


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, 0], "block 0 is the null block"),
        ([1, 4], "block 4 is free and holds nothing"),
        ([1, 6], "block 6 is free and holds nothing"),
        ([1, 8], "got 8"),
    ],
)
def test_a_bad_touch_raises_and_changes_nothing(ids: list[int], message: str) -> None:
    pool = BlockPool(8, enable_caching=True)
    pool.allocate(4)
    pool.free([4])
    before = pool.state()
    with pytest.raises(BlockPoolError, match=message):
        pool.touch(ids)
    assert pool.state() == before


def test_cached_blocks_are_found_while_idle_and_evicted_oldest_first() -> None:
    pool = BlockPool(4, enable_caching=True)
    a, b, c = pool.allocate(3)
    assert pool.publish([a, b, c], [b"a", b"b", b"c"]) == 3
    pool.free([b, a, c])
    assert pool.num_free_blocks == 3
    assert [pool.lookup(key) for key in (b"a", b"b", b"c")] == [a, b, c]
    pool.touch([b])  # used again, so it is no longer the oldest
    pool.free([b])
    assert pool.allocate(1) == [a]
    assert pool.lookup(b"a") is None
    assert pool.lookup(b"b") == b
    assert pool.allocate(2) == [c, b]
    assert pool.num_cached_blocks == 0
    pool.check()


def test_two_blocks_with_one_key_both_serve_hits() -> None:
    pool = BlockPool(4, enable_caching=True)
    a, b = pool.allocate(2)
    pool.publish([a], [b"k"])
    pool.publish([b], [b"k"])
    assert pool.lookup(b"k") == a
    pool.free([a])
    pool.allocate(2)  # takes the fresh block, then a
    assert pool.lookup(b"k") == b
    pool.check()


@pytest.mark.parametrize(
    ("ids", "keys", "message"),
    [
        ([1, 5], [b"x", b"y"], "block 5: cannot be published, nobody holds it"),
        ([1, 2], [b"x", b"other"], "block 2: already published under another key"),
        ([1, 1], [b"x", b"y"], "block 1: already published under another key"),
        ([1], [b"x", b"y"], "1 blocks and 2 keys"),
    ],
)
def test_a_bad_publish_raises_and_changes_nothing(
    ids: list[int], keys: list[bytes], message: str
) -> None:
    pool = BlockPool(8, enable_caching=True)
    pool.allocate(3)
    pool.publish([2], [b"mine"])
    before = pool.state()
    with pytest.raises(BlockPoolError, match=message):
        pool.publish(ids, keys)
    assert pool.state() == before


def test_publishing_needs_caching() -> None:
    pool = BlockPool(8)
    pool.allocate(1)
    with pytest.raises(BlockPoolError, match="enable_caching is False"):
        pool.publish([1], [b"k"])


def test_publishing_again_is_harmless() -> None:
    pool = BlockPool(8, enable_caching=True)
    pool.allocate(2)
    assert pool.publish([1, 2], [b"a", b"b"]) == 2
    assert pool.publish([1, 2], [b"a", b"b"]) == 0
    assert pool.is_writable(1) is False
    assert pool.unpublish([1]) == 1
    assert pool.is_writable(1) is True


def test_reset_forgets_held_and_idle_content() -> None:
    pool = BlockPool(8, enable_caching=True)
    pool.allocate(3)
    pool.publish([1, 2], [b"a", b"b"])
    pool.free([1])
    assert pool.reset_prefix_cache() == 2
    assert pool.lookup(b"a") is pool.lookup(b"b") is None
    assert pool.num_free_blocks == 5
    pool.check()


def test_the_queue_of_idle_blocks_does_not_grow_with_use() -> None:
    pool = BlockPool(8, enable_caching=True)
    pool.allocate(4)
    pool.publish([1, 2, 3, 4], [b"1", b"2", b"3", b"4"])
    pool.free([1, 2, 3, 4])
    for _ in range(1000):
        with pool.transaction():
            pool.touch([2])
            pool.free([2])
    assert len(pool._queue) <= 2 * 4 + 64 + 1
    assert pool.allocate(7) == [5, 6, 7, 1, 3, 4, 2]


@pytest.mark.parametrize("known", [True, False])
def test_blocks_freed_as_they_were_handed_out_are_reused_in_the_order_asked_for(
    known: bool,
) -> None:
    pool = BlockPool(10)
    pool.free(pool.allocate(3)[::-1])
    taken = pool.allocate(5)
    assert taken == [3, 2, 1, 4, 5]
    pool.free(taken, known=known)
    assert pool.allocate(5) == taken
    pool.free(taken, known=known, in_id_order=True)
    assert pool.allocate(5) == [1, 2, 3, 4, 5]
    pool.check()


@pytest.mark.parametrize("ask_first", [True, False])
def test_a_whole_batch_is_freed_once_and_only_as_long_as_nobody_shares_it(ask_first: bool) -> None:
    pool = BlockPool(10)
    one, two = pool.allocate(3), pool.allocate(2)
    assert [pool.ref_count(block) for block in range(7)] == [0, 1, 1, 1, 1, 1, 0]
    assert pool.ref_counts() == dict.fromkeys([*one, *two], 1)
    if ask_first:
        pool.settle()
        assert [pool.ref_count(block) for block in range(7)] == [0, 1, 1, 1, 1, 1, 0]
    pool.touch(two[:1])
    assert pool.ref_counts() == {1: 1, 2: 1, 3: 1, 4: 2, 5: 1}
    pool.free(two, known=True)
    assert [pool.ref_count(block) for block in two] == [1, 0]
    pool.free(one, known=True)
    before = pool.state()
    with pytest.raises(BlockPoolError, match="block 1 is freed 1 times and held 0 times"):
        pool.free(one, known=True)
    assert pool.state() == before
    pool.check()


def test_a_caller_may_change_the_lists_it_was_given() -> None:
    pool = BlockPool(8)
    taken = pool.allocate(3)
    taken[1] = 6  # never handed out
    before = pool.state()
    with pytest.raises(BlockPoolError, match="block 6 is freed 1 times and held 0 times"):
        pool.free(taken, known=True)
    assert pool.state() == before
    assert [pool.ref_count(block) for block in (1, 2, 3, 6)] == [1, 1, 1, 0]


class Planned(Exception):
    """Raised on purpose inside a transaction."""


def _act(pool: BlockPool, held: list[int], step: tuple[int, int, int]) -> None:
    """One change of the pool chosen by three numbers; keeps `held` a list of holds."""
    kind, number, pick = step
    if kind == 0 and pool.num_free_blocks:
        held += pool.allocate(min(number % 4, pool.num_free_blocks))
    elif kind == 1 and held:
        count = 1 + number % len(held)
        at = pick % len(held)
        chosen = (held[at:] + held[:at])[:count]
        pool.free(chosen, known=pick % 2 == 0, in_id_order=pick % 3 == 0)
        for block in chosen:
            held.remove(block)
    elif kind == 2:
        found = [pool.lookup(bytes([k])) for k in (number % 5, pick % 5)]
        ids = [block for block in found if block is not None]
        pool.touch(ids)
        held += ids
    elif kind == 3 and held:
        block = held[pick % len(held)]
        if pool.key_of(block) is None:
            pool.publish([block], [bytes([number % 5])])
    elif kind == 4:
        pool.unpublish([1 + pick % 8])


_steps = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9), st.integers(0, 9)), max_size=25)


@settings(max_examples=300, deadline=None)
@given(before=_steps, inside=_steps, caching=st.just(True))
def test_a_failed_transaction_restores_ids_counts_and_order(
    before: list[tuple[int, int, int]], inside: list[tuple[int, int, int]], caching: bool
) -> None:
    pool = BlockPool(9, enable_caching=caching)
    held: list[int] = []
    for step in before:
        _act(pool, held, step)
    pool.check()
    state, kept = pool.state(), list(held)

    def fail() -> None:
        with pool.transaction():
            for step in inside:
                _act(pool, held, step)
            raise Planned

    with pytest.raises(Planned):
        fail()
    assert pool.state() == state
    pool.check()
    pool.free(kept)
    assert pool.num_free_blocks == 8


def test_transactions_do_not_nest() -> None:
    pool = BlockPool(4)
    with (
        pytest.raises(BlockPoolError, match="one is already open"),
        pool.transaction(),
        pool.transaction(),
    ):
        raise AssertionError("not reached")


def test_building_and_using_a_pool_does_not_depend_on_its_size() -> None:
    # what a pool stores grows with the blocks used, not with the blocks there are
    small, large = BlockPool(1_000), BlockPool(1_000_000_000)
    for pool in (small, large):
        assert pool.allocate(3) == [1, 2, 3]
        pool.free([2])
    assert small.state() == large.state()
