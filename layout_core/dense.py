"""A dense attention call as intervals: the host half of ``AttentionImpl.forward``.

Spans, documents, shards, padding and causality become, for each query, one interval of keys, by
the same rule that paged calls use (:mod:`layout_core.visibility`). Both engines execute this
plan, so they cannot disagree about who sees whom. Masks stay arrays, and only remove keys.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from layout_core.attention import AttentionMetadata, QueryRange
from layout_core.errors import TensorError, VisibilityError
from layout_core.rows import PagedAttentionRow
from layout_core.visibility import Spans, Visibility, row_intervals


@dataclass(frozen=True, slots=True, eq=False)
class DenseRow:
    """Queries ``[start, start + len(lo))`` of one sample, or of every sample alike."""

    sample: int | None  #: ``None``: every sample
    start: int
    lo: array[int]  #: "i": first visible key of each query
    hi: array[int]  #: "i": end of its visible keys; ``lo == hi`` where it sees none

    def key_range(self) -> tuple[int, int]:
        """The half-open union of the intervals; ``(0, 0)`` where no query sees a key."""
        seen = [(lo, hi) for lo, hi in zip(self.lo, self.hi, strict=True) if lo < hi]
        if not seen:
            return 0, 0
        return min(lo for lo, _ in seen), max(hi for _, hi in seen)


@dataclass(frozen=True, slots=True, eq=False)
class DensePlan:
    """What a dense call does. Queries in no row see nothing: their output is zero."""

    flatten: bool  #: samples lie one after another: the call is one sample of ``B * S`` tokens
    rows: tuple[DenseRow, ...]


def uses_video_layout(metadata: AttentionMetadata[Any]) -> bool:
    """Whether the video layout says what is padding, and so replaces the mask.

    It counts the rows of one sequence, which joint tokens would shift: with them it is ignored.
    """
    return metadata.video_layout is not None and metadata.joint_key is None


def plan_dense(
    batch: int,
    num_queries: int,
    num_keys: int,
    *,
    causal: bool,
    metadata: AttentionMetadata[Any] | None = None,
    cu_seqlens_q: Sequence[int] | None = None,
    cu_seqlens_k: Sequence[int] | None = None,
) -> DensePlan:
    """The intervals of a dense call.

    Args:
        batch: samples.
        num_queries, num_keys: tokens of a sample, joint ones included.
        causal: the layer's rule; spans override it.
        metadata: its ints are read, its arrays are not.
        cu_seqlens_q, cu_seqlens_k: starts of the packed documents and their end, as ints that
            count the tokens of all samples one after another; keys default to the queries'.

    Raises:
        VisibilityError: spans, ranges or lengths that are malformed or contradict the shapes,
            or spans together with documents.
        TensorError: ``cu_seqlens`` that do not fit the shapes.
    """
    rule = Visibility(causal=causal)
    extra = {} if metadata is None else metadata.extra
    spans = None if metadata is None else metadata.full_attn_spans
    if cu_seqlens_q is not None or cu_seqlens_k is not None:
        if spans is not None:
            raise VisibilityError(
                "full_attn_spans: cannot be combined with documents packed by cu_seqlens"
            )
        queries, keys = batch * num_queries, batch * num_keys
        used = _used_lengths(metadata, extra, queries, keys)
        rows = _document_rows(rule, cu_seqlens_q, cu_seqlens_k, queries, keys, *used)
        return DensePlan(flatten=True, rows=rows)
    used_queries, used_keys = _used_lengths(metadata, extra, num_queries, num_keys)
    ranges = None if metadata is None else metadata.query_ranges
    placed = _placed_queries(ranges, num_queries, num_keys)
    if spans is None:
        samples: list[tuple[int | None, Spans | None]] = [(None, None)]
    elif len(spans) != batch:
        raise VisibilityError(
            f"full_attn_spans: expected a list for each of {batch} samples, got {len(spans)}"
        )
    elif batch and all(list(map(tuple, s)) == list(map(tuple, spans[0])) for s in spans):
        samples = [(None, spans[0])]
    else:
        samples = list(enumerate(spans))
    rows_out: list[DenseRow] = []
    for sample, sample_spans in samples:
        lo, hi = array("i"), array("i")
        for local_start, local_end, position in placed:
            row = _row(f"sample {sample or 0}", local_end - local_start, num_keys, position)
            part_lo, part_hi = row_intervals(row, rule, sample_spans)
            lo.extend(part_lo)
            hi.extend(part_hi)
        rows_out.append(_clipped(sample, 0, lo, hi, used_queries, used_keys))
    return DensePlan(flatten=False, rows=tuple(rows_out))


def _row(name: str, queries: int, keys: int, position: int) -> PagedAttentionRow:
    return PagedAttentionRow(
        request_id=name,
        query_len=queries,
        seq_len=keys,
        kv_start_pos=position,
        sequence_id=0,
        read_only=True,
    )


def _clipped(
    sample: int | None, start: int, lo: array[int], hi: array[int], queries: int, keys: int
) -> DenseRow:
    """A row without the queries and the keys that are padding; both count whole samples."""
    count = max(0, min(len(lo), queries - start))
    lo, hi = lo[:count], hi[:count]
    if any(end > keys for end in hi):
        hi = array("i", [min(end, keys) for end in hi])
        lo = array("i", [min(first, end) for first, end in zip(lo, hi, strict=True)])
    return DenseRow(sample, start, lo, hi)


def _document_rows(
    rule: Visibility,
    cu_seqlens_q: Sequence[int] | None,
    cu_seqlens_k: Sequence[int] | None,
    queries: int,
    keys: int,
    used_queries: int,
    used_keys: int,
) -> tuple[DenseRow, ...]:
    if cu_seqlens_q is None:
        raise TensorError("extra['cu_seqlens_q']: expected it beside cu_seqlens_k, got None")
    if cu_seqlens_k is None:
        cu_seqlens_k = cu_seqlens_q
    for name, bounds, end in (
        ("cu_seqlens_q", cu_seqlens_q, queries),
        ("cu_seqlens_k", cu_seqlens_k, keys),
    ):
        if not len(bounds) or bounds[0] != 0 or bounds[-1] > end:
            raise TensorError(
                f"extra[{name!r}]: expected bounds from 0 to at most {end} tokens, got "
                f"{list(bounds)}"
            )
        if any(a > b for a, b in pairwise(bounds)):
            raise TensorError(f"extra[{name!r}]: expected ascending bounds, got {list(bounds)}")
    if len(cu_seqlens_q) != len(cu_seqlens_k):
        raise TensorError(
            f"extra['cu_seqlens_k']: expected bounds of {len(cu_seqlens_q) - 1} documents, got "
            f"{len(cu_seqlens_k) - 1}"
        )
    rows: list[DenseRow] = []
    for index in range(len(cu_seqlens_q) - 1):
        start, end = cu_seqlens_q[index], cu_seqlens_q[index + 1]
        first, last = cu_seqlens_k[index], cu_seqlens_k[index + 1]
        row = _row(f"document {index}", end - start, last - first, last - first - (end - start))
        lo, hi = row_intervals(row, rule)
        lo = array("i", [first + k for k in lo])
        hi = array("i", [first + k for k in hi])
        rows.append(_clipped(0, start, lo, hi, used_queries, used_keys))
    return tuple(rows)


def _placed_queries(
    ranges: tuple[QueryRange, ...] | None, num_queries: int, num_keys: int
) -> list[tuple[int, int, int]]:
    """``(local_start, local_end, position)``; the local ranges cover all queries in order."""
    if ranges is None:
        return [(0, num_queries, num_keys - num_queries)]
    covered = 0
    for index, item in enumerate(ranges):
        if item.local_start != covered or item.local_end < item.local_start:
            raise VisibilityError(
                f"query_ranges[{index}]: expected local queries from {covered} on, got "
                f"[{item.local_start}, {item.local_end})"
            )
        covered = item.local_end
    if covered != num_queries:
        raise VisibilityError(
            f"query_ranges: expected to cover all {num_queries} local queries, got {covered}"
        )
    return [(item.local_start, item.local_end, item.global_start) for item in ranges]


def _used_lengths(
    metadata: AttentionMetadata[Any] | None,
    extra: dict[str, Any],
    num_queries: int,
    num_keys: int,
) -> tuple[int, int]:
    """How many leading queries and keys are real, by every field that says so."""
    queries, keys = num_queries, num_keys
    if metadata is None:
        return queries, keys
    valid = extra.get("valid_kv_length")
    if valid is not None:
        keys = min(keys, _length("extra['valid_kv_length']", valid, num_keys))
    packed = metadata.packed_padding
    if packed is not None:
        queries = min(queries, _length("packed_padding.q_length", packed.q_length, num_queries))
        keys = min(keys, _length("packed_padding.kv_length", packed.kv_length, num_keys))
    if uses_video_layout(metadata) and metadata.video_layout is not None:
        used = _length("video_layout: used rows", metadata.video_layout.used_length(), num_keys)
        keys = min(keys, used)
        if num_queries == num_keys:  # a shard's queries are not the layout's rows
            queries = min(queries, used)
    return queries, keys


def _length(name: str, value: object, most: int) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise VisibilityError(f"{name}: expected an int in [0, {most}], got {value!r}")
    return value
