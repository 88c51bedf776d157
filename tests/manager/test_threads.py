"""A manager and a row table may be used from several threads at once."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from block_manager import RequestError, RowTable
from layout_core.rows import PagedAttentionRow
from tests.manager.helpers import config, manager, row


@pytest.fixture
def eager_switching() -> Iterator[None]:
    """Switch threads as often as Python can, so that races show."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_threads_share_a_manager_and_a_row_table(eager_switching: None) -> None:
    m = manager(64)
    table = RowTable(config(64), max_model_len=64)

    def work(worker: int) -> int:
        done = 0
        for turn in range(60):
            name = f"{worker}-{turn}"
            shared = (turn % 3) * 100  # prompts that other threads use as well
            rows = [row(name, i, prefix=range(shared, shared + 9)) for i in range(2)]
            metadata = m.reserve_request(name, rows, num_rows=2)
            if metadata is None:
                continue
            table.install(metadata)
            owned = [list(sequence.block_ids[0]) for sequence in metadata.sequences]
            m.publish_request(name)
            child = m.fork_request(name, f"{name}-child")
            update = m.make_writable(child.request_id)
            for index, ids in enumerate(owned):
                found = table.block_ids(PagedAttentionRow(name, 1, 13, sequence_id=index), 0)
                assert list(found) == ids
            table.remove([(name, metadata.allocation_generation)])
            assert m.free_request(name)
            assert m.free_request(child.request_id)
            done += update is not None
        return done

    with ThreadPoolExecutor(6) as pool:
        done = list(pool.map(work, range(6)))
    assert sum(done) > 60
    m.check()
    assert m.num_free_blocks == 63
    assert table.num_rows == 0


def test_one_request_has_one_winner(eager_switching: None) -> None:
    m = manager(512)
    refusals: list[str] = []

    def reserve(worker: int) -> bool:
        try:
            return m.reserve_request("same", [row(f"w{worker}")]) is not None
        except RequestError as error:
            refusals.append(str(error))
            return False

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(reserve, range(64)))
    assert sum(won) == 1
    assert refusals == ["request 'same': is already admitted"] * 63
    assert m.num_free_blocks == 511 - 3
    m.check()
