"""Which keys a query sees: one half-open interval ``[lo, hi)`` for each query.

This is the only place where causality, windows, chunks and full spans are decided. Kernels
and fallbacks take the intervals, and the tile classes that follow from their minima and
maxima; they never see a rule.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from layout_core.errors import VisibilityError
from layout_core.rows import PagedAttentionRow

Spans = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Visibility:
    """The rule of a layer. For a query at position ``p`` and a row of ``seq_len`` keys:

    ============  ==================================================================
    non-causal    ``[0, seq_len)``
    causal        ``[0, p + 1)``
    window        also ``p - window_left <= k <= p + window_right``; ``None`` is open
    chunk ``c``   ``[p // c * c, p + 1)``; causal by nature
    ============  ==================================================================

    All are intersected with ``[first_key, seq_len)`` of the row.

    Args:
        causal: a query sees no key past its own position.
        window_left: keys to the left that are seen beside the query's own; >= 0 or ``None``.
        window_right: keys to the right that are seen; >= 0 or ``None``.
        chunk: tokens of a chunk of chunked local attention; >= 1 or ``None``.

    Raises:
        VisibilityError: a field out of range, or a chunk combined with a window or with
            ``causal=False``.
    """

    causal: bool
    window_left: int | None = None
    window_right: int | None = None
    chunk: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("window_left", 0), ("window_right", 0), ("chunk", 1)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                raise VisibilityError(
                    f"visibility.{name}: expected None or an int >= {least}, got {value!r}"
                )
        if self.chunk is not None:
            if not self.causal:
                raise VisibilityError(
                    "visibility.chunk: chunked attention is causal; got causal=False"
                )
            if self.has_window:
                raise VisibilityError(
                    "visibility.chunk: cannot be combined with window_left or window_right"
                )

    @property
    def has_window(self) -> bool:
        """Whether either side of a window is closed."""
        return self.window_left is not None or self.window_right is not None

    @classmethod
    def from_sliding_window(cls, sliding_window: int | None, *, causal: bool) -> Visibility:
        """vLLM's ``sliding_window=W``: left ``W - 1``; right 0 if causal, else ``W - 1``."""
        if sliding_window is None:
            return cls(causal=causal)
        if type(sliding_window) is not int or sliding_window < 1:
            raise VisibilityError(
                f"sliding_window: expected None or an int >= 1, got {sliding_window!r}"
            )
        side = sliding_window - 1
        return cls(causal=causal, window_left=side, window_right=0 if causal else side)


def check_spans(spans: Spans, seq_len: int, *, where: str = "spans") -> None:
    """Raise unless spans are half-open, sorted, disjoint and within ``[0, seq_len]``."""
    previous = 0
    for index, span in enumerate(spans):
        if len(span) != 2:
            raise VisibilityError(f"{where}[{index}]: expected a pair (start, end), got {span!r}")
        start, end = span
        if not 0 <= start < end:
            raise VisibilityError(
                f"{where}[{index}]: expected 0 <= start < end, got [{start}, {end})"
            )
        if end > seq_len:
            raise VisibilityError(f"{where}[{index}]: [{start}, {end}) ends past seq_len {seq_len}")
        if start < previous:
            raise VisibilityError(
                f"{where}[{index}]: [{start}, {end}) overlaps or precedes a span that ends at "
                f"{previous}; spans must be sorted and disjoint"
            )
        previous = end


def _ramp(start: int, step: int, count: int, least: int, most: int) -> Iterable[int]:
    """``start + step*i`` for i in [0, count), clamped to ``[least, most]``; step is 0 or 1."""
    if step == 0:
        return [min(max(start, least), most)] * count
    # positions below `least`, then the slope, then those above `most`
    flat_low = min(max(least - start, 0), count)
    flat_high = min(max(start + count - 1 - most, 0), count)
    if flat_low + flat_high >= count:  # the slope is cut to at most one clamped value each
        return [min(max(start + i, least), most) for i in range(count)]
    out = [least] * flat_low
    out.extend(range(start + flat_low, start + count - flat_high))
    out.extend([most] * flat_high)
    return out


def row_intervals(
    row: PagedAttentionRow, visibility: Visibility, spans: Spans | None = None
) -> tuple[array[int], array[int]]:
    """Visible keys of each query of one row.

    Args:
        row: gives the queries' positions, ``seq_len`` and ``first_key``.
        visibility: the layer's rule.
        spans: full spans in absolute positions. ``None``: the rule alone. A list, even an
            empty one: causal outside the spans, and inside ``[a, b)`` a query sees ``[0, b)``.

    Returns:
        ``(lo, hi)``, each ``array("i")`` of ``query_len`` entries with
        ``first_key <= lo <= hi <= seq_len``; ``lo == hi`` where a query sees nothing.

    Raises:
        VisibilityError: malformed spans, or spans with a window or a chunk.
    """
    count, start = row.query_len, row.kv_start_pos
    first, last = row.first_key, row.seq_len
    if spans is not None:
        where = f"spans of request {row.request_id!r}"
        if visibility.has_window or visibility.chunk is not None:
            raise VisibilityError(
                f"{where}: full spans cannot be combined with a window or a chunk, got {visibility}"
            )
        check_spans(spans, last, where=where)
        lo = array("i", [first]) * count
        hi = array("i", _ramp(start + 1, 1, count, first, last))
        for a, b in spans:
            begin, end = max(a - start, 0), min(b - start, count)
            if begin < end:
                hi[begin:end] = array("i", [max(b, first)]) * (end - begin)
        return lo, hi
    if visibility.chunk is not None:
        c = visibility.chunk
        lo = array("i", (min(max(p // c * c, first), last) for p in range(start, start + count)))
        hi = array("i", _ramp(start + 1, 1, count, first, last))
    else:
        left, right = visibility.window_left, visibility.window_right
        if left is None:
            lo = array("i", [first]) * count
        else:
            lo = array("i", _ramp(start - left, 1, count, first, last))
        if visibility.causal:
            right = 0 if right is None else min(right, 0)
        if right is None:
            hi = array("i", [last]) * count
        else:
            hi = array("i", _ramp(start + right + 1, 1, count, first, last))
    # both ends are clamped to [first, last] and ordered before it, so lo <= hi holds
    return lo, hi


def visible_intervals(
    rows: Sequence[PagedAttentionRow],
    visibility: Visibility,
    spans: Sequence[Spans | None] | None = None,
) -> tuple[array[int], array[int]]:
    """Intervals of all queries of a batch, rows packed one after another.

    Args:
        rows: the batch's rows.
        visibility: the layer's rule.
        spans: ``None``, or for each row a span list or ``None`` (see :func:`row_intervals`).

    Returns:
        ``(lo, hi)``, ``array("i")`` of ``sum(query_len)`` entries each.
    """
    if spans is not None and len(spans) != len(rows):
        raise VisibilityError(
            f"spans: expected one entry for each of {len(rows)} rows, got {len(spans)}"
        )
    lo, hi = array("i"), array("i")
    for index, row in enumerate(rows):
        row_lo, row_hi = row_intervals(row, visibility, None if spans is None else spans[index])
        lo.extend(row_lo)
        hi.extend(row_hi)
    return lo, hi


class TileClass(IntEnum):
    """What a tile of queries by keys needs."""

    SKIP = 0  #: no query sees any key of the tile
    PARTIAL = 1  #: must be masked
    FULL = 2  #: every query sees every key: no mask


def classify_tile(
    lo_min: int, lo_max: int, hi_min: int, hi_max: int, key_start: int, key_end: int
) -> TileClass:
    """Class of the keys ``[key_start, key_end)`` from the extremes of a query tile's intervals.

    Safe both ways: FULL only if all see all; SKIP only if none sees any.
    """
    if key_start >= hi_max or key_end <= lo_min or key_start >= key_end:
        return TileClass.SKIP
    if lo_max <= key_start and hi_min >= key_end:
        return TileClass.FULL
    return TileClass.PARTIAL
