"""Rows of a paged attention step, and how their positions become slots.

A row is one sequence of a request (a CFG branch) or one named context. It owns a block table
row, which a :class:`BlockTables` hands out. Nothing here knows a framework.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from layout_core.errors import RowError

PAD_SLOT = -1
"""A slot that is never written, not even wrapped to the last one."""

NULL_BLOCK_ID = 0
"""The block held back for ever in a pool made with ``null_block=True``."""


@dataclass(frozen=True, slots=True)
class PagedAttentionRow:
    """What one row does in one step.

    The row's queries stand at positions ``kv_start_pos + i`` for ``i`` in ``[0, query_len)``.
    They see keys in ``[first_key, seq_len)``, narrowed by the visibility rule.

    Args:
        request_id: the request that owns the row; not empty.
        query_len: queries of this row in this step; >= 0.
        seq_len: keys of the row after this step's writes; >= 0.
        kv_start_pos: position of the first query. In a writing row the span
            ``[kv_start_pos, kv_start_pos + query_len)`` lies within ``[0, seq_len]``. In a
            read-only row it may be negative (bottom-right alignment: ``seq_len - query_len``).
        first_key: first position that was not evicted; in ``[0, seq_len]``.
        sequence_id: which sequence of the request; exactly one of it and ``context_id``.
        context_id: which named context of the request.
        read_only: the row writes no K/V; it may be repeated in a batch.

    Raises:
        RowError: a field out of its range, naming field, value and row.
    """

    request_id: str
    query_len: int
    seq_len: int
    kv_start_pos: int = 0
    first_key: int = 0
    sequence_id: int | None = None
    context_id: str | None = None
    read_only: bool = False

    def __post_init__(self) -> None:
        where = f"row of request {self.request_id!r}"
        if not isinstance(self.request_id, str) or not self.request_id:
            raise RowError(f"request_id: expected a non-empty string, got {self.request_id!r}")
        if (self.sequence_id is None) == (self.context_id is None):
            raise RowError(
                f"{where}: expected exactly one of sequence_id and context_id, got "
                f"sequence_id={self.sequence_id!r}, context_id={self.context_id!r}"
            )
        for name in ("query_len", "seq_len", "kv_start_pos", "first_key"):
            value = getattr(self, name)
            if type(value) is not int:
                raise RowError(f"{where}: {name}: expected an int, got {value!r}")
        for name in ("query_len", "seq_len"):
            if getattr(self, name) < 0:
                raise RowError(f"{where}: {name}: expected >= 0, got {getattr(self, name)}")
        if not 0 <= self.first_key <= self.seq_len:
            raise RowError(
                f"{where}: first_key: expected a position in [0, {self.seq_len}], "
                f"got {self.first_key}"
            )
        if not self.read_only:
            end = self.kv_start_pos + self.query_len
            if self.kv_start_pos < 0 or end > self.seq_len:
                raise RowError(
                    f"{where}: a writing row's span must lie within [0, {self.seq_len}), got "
                    f"[{self.kv_start_pos}, {end})"
                )
            if self.query_len and self.kv_start_pos < self.first_key:
                raise RowError(
                    f"{where}: kv_start_pos: position {self.kv_start_pos} was evicted "
                    f"(first_key is {self.first_key}) and cannot be written again"
                )

    @property
    def identity(self) -> tuple[str, int | str]:
        """What owns the block table row: ``(request_id, sequence_id or context_id)``."""
        if self.sequence_id is not None:
            return (self.request_id, self.sequence_id)
        assert self.context_id is not None  # checked when the row was built
        return (self.request_id, self.context_id)


@runtime_checkable
class BlockTables(Protocol):
    """Who knows which blocks a row owns: ``block_manager.RowTable``, or a runner's own."""

    @property
    def version(self) -> int:
        """Changes whenever any row's blocks may have changed; never returns to an old value."""
        ...

    def block_ids(self, row: PagedAttentionRow, group: int) -> array[int]:
        """Manager block ids (``array("i")``) of ``row`` in ``group``, in position order."""
        ...


@dataclass(frozen=True, slots=True)
class Bucket:
    """Static shapes to pad a batch to, so that other lengths compile no new program.

    Args:
        tokens: queries of all rows together, at least the real number.
        rows: rows, at least the real number.
        blocks: block table entries of each row, at least the longest row's.
    """

    tokens: int
    rows: int
    blocks: int

    def __post_init__(self) -> None:
        for name in ("tokens", "rows", "blocks"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise RowError(f"bucket.{name}: expected an int >= 1, got {value!r}")


def compute_slot_mapping(
    block_ids: Sequence[int],
    positions: Iterable[int],
    block_size: int,
    *,
    null_block: bool = True,
) -> array[int]:
    """Slots of positions of one row: ``block_id * block_size + position % block_size``.

    A position before 0 or past the row's blocks is :data:`PAD_SLOT`, as is one on the null
    block: it never lands in another row's block.

    Args:
        block_ids: the row's block ids, in position order.
        positions: positions in the row.
        block_size: tokens of a block; >= 1.
        null_block: whether block 0 is held back.

    Returns:
        ``array("q")`` with one slot for each position.
    """
    if block_size < 1:
        raise RowError(f"block_size: expected >= 1, got {block_size}")
    slots = array("q")
    for position in positions:
        index, inside = divmod(position, block_size)
        if not 0 <= index < len(block_ids) or (null_block and block_ids[index] == NULL_BLOCK_ID):
            slots.append(PAD_SLOT)
        else:
            slots.append(block_ids[index] * block_size + inside)
    return slots
