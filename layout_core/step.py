"""One step of paged attention as plain integers: the host half of ``Engine.prepare``.

Both engines take slots, block tables and intervals from here and only move them to their
device, so they cannot disagree about which byte a token owns or who sees it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from layout_core.errors import BlockTableError, RowError
from layout_core.rows import NULL_BLOCK_ID, PAD_SLOT, BlockTables, Bucket, PagedAttentionRow
from layout_core.views import ResolvedLayout
from layout_core.visibility import Spans, Visibility, visible_intervals


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """Rows, slots, tables and intervals of one step, padded to a bucket where one was given.

    ``T`` is ``num_tokens`` and ``R`` ``num_rows``, padding included; the real ones come first.
    """

    resolved: ResolvedLayout
    group: int
    visibility: Visibility
    rows: tuple[PagedAttentionRow, ...]  #: the real rows, in order
    spans: tuple[tuple[tuple[int, int], ...] | None, ...] | None
    bucket: Bucket | None
    version: int  #: of the block tables when the plan was made
    block_size: int  #: tokens of a block as ``block_table`` counts them (kernel blocks if split)
    num_tokens: int
    num_real_tokens: int
    num_rows: int
    max_blocks: int  #: entries of a block table row
    query_lens: array[int]  #: "i" [R]; 0 for a padded row
    seq_lens: array[int]  #: "i" [R]; 0 for a padded row
    kv_starts: array[int]  #: "i" [R]; position of each row's first query, may be negative
    cu_seqlens: array[int]  #: "i" [R + 1]; the last is ``num_real_tokens``
    lo: array[int]  #: "i" [T]; first visible key; 0 for a padded query
    hi: array[int]  #: "i" [T]; end of the visible keys; 0 for a padded query
    slots: array[int]  #: "q" [T]; −1 for a padded query and in a read-only row
    block_table: array[int]  #: "i" [R * max_blocks], row after row; unused entries are 0

    def matches(self, rows: Sequence[PagedAttentionRow], version: int) -> bool:
        """Whether these rows under this table version are what the plan was made for."""
        return self.version == version and self.rows == tuple(rows)


def plan_step(
    resolved: ResolvedLayout,
    rows: Sequence[PagedAttentionRow],
    tables: BlockTables,
    *,
    visibility: Visibility,
    group: int = 0,
    spans: Sequence[Spans | None] | None = None,
    bucket: Bucket | None = None,
) -> StepPlan:
    """Check a step and lay it out as integers.

    Args:
        resolved: the plan of the allocation.
        rows: the rows of the step; may be empty where a bucket is given (a warm-up batch).
        tables: block tables; ``block_ids`` counts manager blocks.
        visibility: the rule of the layers.
        group: the group whose table is used.
        spans: see :func:`layout_core.visibility.visible_intervals`.
        bucket: static shapes to pad to.

    Raises:
        RowError: two writing rows with one identity; more tokens, rows or blocks than the
            bucket holds.
        BlockTableError: a table too short for its row, an id out of range, a null block that
            a query sees or that a row writes, a block written twice.
        VisibilityError: malformed spans.
    """
    plan = resolved.group(group)
    view = resolved.layers[resolved.group_layers(group)[0]]
    ratio = view.blocks_per_manager_block
    version = tables.version
    _check_writers(rows)
    lo, hi = visible_intervals(rows, visibility, spans)

    written: dict[int, int] = {}  # block id -> row that writes it
    tables_of_rows: list[array[int]] = []
    slots = array("q")
    cu_seqlens = array("i", [0])
    first = 0
    for index, row in enumerate(rows):
        ids = _row_blocks(resolved, plan.block_size, row, index, tables.block_ids(row, group))
        last = first + row.query_len
        _check_null_blocks(
            resolved, plan.block_size, row, index, ids, lo[first:last], hi[first:last]
        )
        if row.read_only:
            slots.extend(array("q", [PAD_SLOT]) * row.query_len)
        else:
            _append_slots(slots, resolved, plan.block_size, row, index, ids, written)
        if ratio > 1:
            ids = array("i", (block * ratio + part for block in ids for part in range(ratio)))
        tables_of_rows.append(ids)
        cu_seqlens.append(last)
        first = last

    num_rows, num_tokens = len(rows), first
    width = max((len(ids) for ids in tables_of_rows), default=0)
    if bucket is None:
        padded_rows, padded_tokens, max_blocks = num_rows, num_tokens, width
    else:
        _check_bucket(bucket, num_tokens, num_rows, width, ratio)
        padded_rows, padded_tokens = bucket.rows, bucket.tokens
        max_blocks = bucket.blocks * ratio
    extra_rows, extra_tokens = padded_rows - num_rows, padded_tokens - num_tokens
    zeros = array("i", [0])
    block_table = array("i")
    for ids in tables_of_rows:
        block_table.extend(ids)
        block_table.extend(zeros * (max_blocks - len(ids)))
    block_table.extend(zeros * (max_blocks * extra_rows))
    cu_seqlens.extend(array("i", [num_tokens]) * extra_rows)
    lo.extend(zeros * extra_tokens)
    hi.extend(zeros * extra_tokens)
    slots.extend(array("q", [PAD_SLOT]) * extra_tokens)
    return StepPlan(
        resolved=resolved,
        group=group,
        visibility=visibility,
        rows=tuple(rows),
        spans=None if spans is None else tuple(None if s is None else tuple(s) for s in spans),
        bucket=bucket,
        version=version,
        block_size=view.block_size,
        num_tokens=padded_tokens,
        num_real_tokens=num_tokens,
        num_rows=padded_rows,
        max_blocks=max_blocks,
        query_lens=array("i", [row.query_len for row in rows]) + zeros * extra_rows,
        seq_lens=array("i", [row.seq_len for row in rows]) + zeros * extra_rows,
        kv_starts=array("i", [row.kv_start_pos for row in rows]) + zeros * extra_rows,
        cu_seqlens=cu_seqlens,
        lo=lo,
        hi=hi,
        slots=slots,
        block_table=block_table,
    )


def _where(row: PagedAttentionRow, index: int) -> str:
    return f"row {index} (request {row.request_id!r}, {row.identity[1]!r})"


def _check_writers(rows: Sequence[PagedAttentionRow]) -> None:
    seen: dict[tuple[str, int | str], int] = {}
    for index, row in enumerate(rows):
        if row.read_only:
            continue
        if row.identity in seen:
            raise RowError(
                f"{_where(row, index)}: the identity of a writing row must be unique in a batch; "
                f"row {seen[row.identity]} has the same"
            )
        seen[row.identity] = index


def _row_blocks(
    resolved: ResolvedLayout,
    block_size: int,
    row: PagedAttentionRow,
    index: int,
    ids: array[int],
) -> array[int]:
    """The blocks that hold the row's ``seq_len`` keys, checked to be there and in range."""
    needed = -(-row.seq_len // block_size)
    if len(ids) < needed:
        raise BlockTableError(
            f"{_where(row, index)}: position {len(ids) * block_size} is past the row's "
            f"{len(ids)} blocks of {block_size} tokens; seq_len {row.seq_len} needs {needed}"
        )
    used = ids[:needed]
    if used and not (min(used) >= 0 and max(used) < resolved.num_blocks):
        bad = next(b for b in used if not 0 <= b < resolved.num_blocks)
        raise BlockTableError(
            f"{_where(row, index)}: block id {bad} is outside [0, {resolved.num_blocks})"
        )
    return used


def _check_null_blocks(
    resolved: ResolvedLayout,
    block_size: int,
    row: PagedAttentionRow,
    index: int,
    ids: array[int],
    lo: array[int],
    hi: array[int],
) -> None:
    """Null blocks may stand only where no query sees: the union of intervals is one interval."""
    if not resolved.null_block or NULL_BLOCK_ID not in ids:
        return
    seen = [(a, b) for a, b in zip(lo, hi) if a < b]
    if not seen:
        return
    first, last = min(a for a, _ in seen), max(b for _, b in seen)
    for at in range(first // block_size, -(-last // block_size)):
        if ids[at] == NULL_BLOCK_ID:
            raise BlockTableError(
                f"{_where(row, index)}: entry {at} is the null block, and queries see keys "
                f"[{max(first, at * block_size)}, {min(last, (at + 1) * block_size)}) in it"
            )


def _append_slots(
    slots: array[int],
    resolved: ResolvedLayout,
    block_size: int,
    row: PagedAttentionRow,
    index: int,
    ids: array[int],
    written: dict[int, int],
) -> None:
    """Slots of the row's queries, a run for each block; a block has one writer and one place."""
    position, end = row.kv_start_pos, row.kv_start_pos + row.query_len
    while position < end:
        at, inside = divmod(position, block_size)
        block = ids[at]
        if resolved.null_block and block == NULL_BLOCK_ID:
            raise BlockTableError(
                f"{_where(row, index)}: position {position} lies on the null block, which is "
                "never written"
            )
        if block in written:
            raise BlockTableError(
                f"{_where(row, index)}: block {block} at entry {at} is written twice in this step, "
                f"first by row {written[block]}"
            )
        written[block] = index
        run = min(block_size - inside, end - position)
        start = block * block_size + inside
        slots.extend(range(start, start + run))
        position += run


def _check_bucket(bucket: Bucket, tokens: int, rows: int, blocks: int, ratio: int) -> None:
    for name, have, room in (
        ("tokens", tokens, bucket.tokens),
        ("rows", rows, bucket.rows),
        ("blocks", blocks // ratio, bucket.blocks),
    ):
        if have > room:
            raise RowError(f"bucket.{name}: the step has {have}, the bucket holds {room}")
