"""What a manager remembers of an admitted request, and the checks on what it is given.

Records are immutable: a change makes a new one and swaps it in, so that a failure halfway has
nothing to repair here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import add
from typing import NamedTuple

from block_manager.metadata import (
    DiffusionKVContextMetadata,
    DiffusionKVMetadata,
    DiffusionKVSequenceMetadata,
)
from block_manager.requests import DiffusionKVContext, DiffusionKVRequest
from layout_core.errors import RequestError, TransferError

Tables = tuple[list[int], ...]
"""Block ids of a row, for each group."""


class Row(NamedTuple):
    """One sequence of an admitted request. Replaced as a whole, never changed in place."""

    request: DiffusionKVRequest
    tables: Tables  #: block ids for each group; ``NULL_BLOCK_ID`` where evicted
    cached_prefix_len: int
    first_key: int = 0
    computed_len: int = 0  #: prefix tokens whose K/V is finished, unless the record says all


class Record(NamedTuple):
    """An admitted request. Replaced as a whole, never changed in place."""

    generation: int
    rows: tuple[Row, ...]
    contexts: tuple[tuple[DiffusionKVContext, Tables], ...]
    computed: bool = False  #: all prefixes are finished
    receiving: bool = False
    failed_blocks: tuple[int, ...] | None = None

    def computed_len(self, row: Row) -> int:
        """Prefix tokens of one of the rows whose K/V is finished."""
        return row.request.prefix_len if self.computed else row.computed_len

    def block_ids(self) -> Iterator[int]:
        """Every block the request holds, once for each hold."""
        for tables in (*(row.tables for row in self.rows), *(t for _, t in self.contexts)):
            for table in tables:
                yield from table


def cut(blocks: list[int], needs: Sequence[Sequence[int]]) -> list[Tables]:
    """Tables of as many of the blocks, in order, as each row needs for each group."""
    tables, end = [], 0
    for need in needs:
        groups = []
        for count in need:
            start, end = end, end + count
            groups.append(blocks[start:end])
        tables.append(tuple(groups))
    return tables


def join_tables(found: Tables, fresh: Tables) -> Tables:
    """For each group, the blocks found in the cache and then the new ones."""
    return tuple(map(add, found, fresh))


def copy_tables(tables: Tables) -> Tables:
    """Lists of one's own with the same ids."""
    return tuple(map(list, tables))


def holds(record: Record, blocks: Sequence[int]) -> bool:
    return not set(record.block_ids()).isdisjoint(blocks)


def check_order(request_id: str, rows: Sequence[DiffusionKVRequest], num_rows: int | None) -> None:
    """Rows are there, all of them, in order: sequence ids 0, 1, 2, ..."""
    got = [row.sequence_id for row in rows]
    expected = list(range(len(rows) if num_rows is None else num_rows))
    if got and got == expected:
        return
    missing = [each for each in expected if each not in got]
    if num_rows is not None and missing:
        raise RequestError(
            f"request {request_id!r}: {num_rows} rows are declared, {len(rows)} supplied: "
            f"sequence ids {missing} are missing"
        )
    if not rows:
        raise RequestError(f"request {request_id!r}: expected at least one row, got none")
    raise RequestError(
        f"request {request_id!r}: expected rows in the order of sequence ids {expected}, got {got}"
    )


def contexts_of(rows: Sequence[DiffusionKVRequest]) -> tuple[DiffusionKVContext, ...]:
    """The distinct contexts that rows read, in order of first mention."""
    contexts: dict[str, DiffusionKVContext] = {}
    for row in rows:
        for context in row.kv_contexts:
            known = contexts.setdefault(context.context_id, context)
            if known != context:
                raise RequestError(
                    f"row {row.request_id!r}: context {context.context_id!r} contradicts another "
                    f"row's: {context} against {known}"
                )
    return tuple(contexts.values())


def check_readable(request_id: str, record: Record) -> None:
    if record.failed_blocks is not None:
        raise TransferError(
            f"request {request_id!r}: the K/V of blocks {list(record.failed_blocks)} was not "
            "received and is not readable; free the request",
            block_ids=record.failed_blocks,
        )
    if record.receiving:
        raise TransferError(
            f"request {request_id!r}: its K/V is being received and is not readable yet; call "
            "complete_transfer once it has arrived"
        )


def payload_of(request_id: str, record: Record) -> DiffusionKVMetadata:
    """The payload of a record; its lists are copies that the receiver may keep."""
    return DiffusionKVMetadata(
        request_id,
        record.generation,
        tuple(map(_sequence_of, record.rows)),
        tuple(
            [
                DiffusionKVContextMetadata(
                    context.context_id, context.cache_role, context.num_tokens, copy_tables(tables)
                )
                for context, tables in record.contexts
            ]
        ),
    )


def _sequence_of(row: Row) -> DiffusionKVSequenceMetadata:
    request, tables, cached, first_key, _ = row
    contexts = request.kv_contexts
    return DiffusionKVSequenceMetadata(
        request.sequence_id,
        request.prefix_len,
        request.target_len,
        request.seq_len,
        copy_tables(tables),
        cached,
        tuple([context.context_id for context in contexts]) if contexts else (),
        0,
        first_key,
    )
