"""A failure at any step of a change leaves the state as it was.

Two kinds of fault are planted. Inside the manager and the row table, an exception is raised at
each executed line in turn. Inside the pool, whose calls check everything before they change
anything, each call fails in turn. The only lines left out are ``with`` statements, which are
also "executed" when their block is left: an exception there would keep Python itself from
closing the block.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

import block_manager.cache_manager
import block_manager.records
import block_manager.row_table
from block_manager import BlockPool, DiffusionKVCacheManager, DiffusionKVContext, RowTable
from tests.manager.helpers import admit, config, manager, row

FILES = {
    block_manager.cache_manager.__file__,
    block_manager.records.__file__,
    block_manager.row_table.__file__,
}
UNDO = {"_restore"}


class Planted(Exception):
    """The fault."""


@contextmanager
def fault_at_line(number: int) -> Iterator[list[str]]:
    """Raise ``Planted`` at the ``number``-th line executed in FILES; yields the lines seen."""
    seen: list[str] = []
    fired = False

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal fired
        code = frame.f_code
        if code.co_filename not in FILES or code.co_name in UNDO:
            return None
        if event == "line" and not fired:
            text = linecache.getline(code.co_filename, frame.f_lineno).strip()
            if not text.startswith("with "):
                seen.append(text)
                if len(seen) == number:
                    fired = True
                    raise Planted(text)
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        yield seen
    finally:
        sys.settrace(previous)


def _warm_manager() -> DiffusionKVCacheManager:
    """Two groups, a full pool with idle cached blocks, a fork, a context."""
    m = manager(30, 4, 8, 4, cross=(2,))
    text = DiffusionKVContext("text", "cross", 6)
    for name in ("old", "a"):
        start = 0 if name == "a" else 500
        request = [
            row(name, i, prefix=range(start + 100 * i, start + 100 * i + 12), kv_contexts=[text])
            for i in range(2)
        ]
        admit(m, name, request)
        m.publish_request(name)
    m.free_request("old")
    m.fork_request("a", "child")
    return m


def _reserve(m: DiffusionKVCacheManager) -> object:
    # one warm row, one cold, and so few fresh blocks that cached ones must be evicted
    return m.reserve_request(
        "new", [row("new", 0, prefix=12), row("new", 1, prefix=range(900, 912), target=8)]
    )


def _advance(m: DiffusionKVCacheManager) -> object:
    longer = [row("child", i, prefix=range(100 * i, 100 * i + 14), target=6) for i in range(2)]
    return m.advance_request("child", longer)


CHANGES: dict[str, Callable[[DiffusionKVCacheManager], object]] = {
    "reserve": _reserve,
    "publish": lambda m: m.publish_request("fresh"),
    "free": lambda m: m.free_request("a"),
    "fork": lambda m: m.fork_request("a", "other"),
    "make_writable": lambda m: m.make_writable("child"),
    "advance": _advance,
    "evict": lambda m: m.evict_before("a", 8),
    "fail_transfer": lambda m: m.fail_transfer(
        "a", [m.get_metadata("a").sequences[0].block_ids[0][0]]
    ),
}


def _prepared(change: str) -> DiffusionKVCacheManager:
    m = _warm_manager()
    if change == "publish":
        m.free_request("child")
        m.free_request("a")
        admit(
            m, "fresh", [row("fresh", i, prefix=range(700 + 50 * i, 716 + 50 * i)) for i in (0, 1)]
        )
    return m


def _check_that_it_works(change: str) -> None:
    m = _prepared(change)
    cached = m.block_pool.num_cached_blocks
    result = CHANGES[change](m)
    assert result is not None
    if change == "reserve":
        assert m.block_pool.num_cached_blocks < cached  # it had to evict
    if change in ("make_writable", "advance"):
        assert any(result.copies)  # type: ignore[attr-defined]


@pytest.mark.parametrize("change", CHANGES)
def test_a_fault_at_any_line_of_the_manager_leaves_no_trace(change: str) -> None:
    _check_that_it_works(change)  # so every fault below has something to spoil
    number = 0
    m = _prepared(change)
    before = m.state()
    while True:
        number += 1
        with fault_at_line(number) as seen:
            try:
                CHANGES[change](m)
            except Planted:
                pass
            else:
                break  # fewer lines than `number`: all have been tried
        assert m.state() == before, f"after a fault at {seen[-1]!r}"
        m.check()
    assert number > 20
    assert m.state() != before
    m.check()


POOL_CALLS = ["allocate", "touch", "free", "publish", "unpublish"]


@pytest.mark.parametrize("change", CHANGES)
def test_a_fault_in_any_pool_call_leaves_no_trace(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = 0
    for name in POOL_CALLS:
        real = getattr(BlockPool, name)
        for nth in range(8):
            for before_it in (True, False):
                m = _prepared(change)
                state = m.state()
                calls = 0

                def failing(
                    self: BlockPool,
                    *args: Any,
                    nth: int = nth,
                    before_it: bool = before_it,
                    real: Any = real,
                    **kwargs: Any,
                ) -> Any:
                    nonlocal calls
                    calls += 1
                    if calls == nth + 1 and before_it:
                        raise Planted
                    result = real(self, *args, **kwargs)
                    if calls == nth + 1:
                        raise Planted
                    return result

                monkeypatch.setattr(BlockPool, name, failing)
                try:
                    CHANGES[change](m)
                except Planted:
                    failures += 1
                    assert m.state() == state, (name, nth, before_it)
                monkeypatch.setattr(BlockPool, name, real)
                m.check()
    assert failures >= 2


def _table() -> tuple[RowTable, DiffusionKVCacheManager]:
    m = _warm_manager()
    t = RowTable(
        config(30, 4, 8, 4, cross=(2,)), max_model_len=64, max_rows=8, max_rows_per_request=4
    )
    t.install(m.get_metadata("a"))
    return t, m


TABLE_CHANGES: dict[str, Callable[[RowTable, DiffusionKVCacheManager], object]] = {
    "install": lambda t, m: t.install(m.get_metadata("child")),
    "replace": lambda t, m: t.replace(m.get_metadata("a")),
    "remove": lambda t, m: t.remove(["a"]),
}


@pytest.mark.parametrize("change", TABLE_CHANGES)
def test_a_fault_at_any_line_of_the_row_table_leaves_no_trace(change: str) -> None:
    t, m = _table()
    m.evict_before("a", 8)
    before = t.state()
    number = 0
    while True:
        number += 1
        with fault_at_line(number) as seen:
            try:
                TABLE_CHANGES[change](t, m)
            except Planted:
                pass
            else:
                break
        assert t.state() == before, f"after a fault at {seen[-1]!r}"
    assert number > 15
    assert t.state() != before


def test_this_test_would_see_a_trace() -> None:
    m = _warm_manager()
    before = m.state()
    m._next_generation += 1
    assert m.state() != before
    m._next_generation -= 1
    m.block_pool.allocate(1)
    assert m.state() != before
    with pytest.raises(ValueError, match=r"counted|held and"):
        m.check()
