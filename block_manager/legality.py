"""When prefix K/V may be reused: across denoise steps, and across requests.

Both questions are answered from the visibility rules of :mod:`layout_core.visibility`; no rule
is restated here.
"""

from __future__ import annotations

from dataclasses import dataclass

from layout_core.errors import PrefixCacheError
from layout_core.rows import PagedAttentionRow
from layout_core.visibility import Spans, Visibility, row_intervals


@dataclass(frozen=True, slots=True)
class PrefixLegality:
    """Whether a prefix's K/V can be computed once and read at every step without loss.

    ``edge`` is the first ``(query, key)`` with a query in the prefix that sees a key of the
    target, ``reason`` says so in words; both ``None`` where reuse is lossless.
    """

    lossless: bool
    edge: tuple[int, int] | None = None
    reason: str | None = None

    def require(self) -> None:
        """Raise ``PrefixCacheError`` with the reason unless reuse is lossless."""
        if not self.lossless:
            raise PrefixCacheError(str(self.reason))


def prefix_cache_legality(
    spans: Spans | None,
    prefix_len: int,
    *,
    seq_len: int | None = None,
    visibility: Visibility | None = None,
    where: str = "row",
) -> PrefixLegality:
    """Decide from what queries of the prefix see.

    The target's K/V changes at every step. If a query of the prefix sees one of its keys, the
    prefix's hidden states, and from the second layer on its K/V, change as well.

    Args:
        spans: full spans, or ``None`` for the visibility rule alone.
        prefix_len: tokens of the prefix; the target starts there.
        seq_len: keys of the row; by default just past the prefix and every span.
        visibility: the layers' rule; causal by default. Call once for each rule of a model.
        where: how to name the row in the reason.
    """
    if type(prefix_len) is not int or prefix_len < 0:
        raise PrefixCacheError(f"{where}: prefix_len: expected an int >= 0, got {prefix_len!r}")
    if seq_len is None:
        seq_len = max([prefix_len + 1, *(end for _, end in spans or ())])
    if seq_len < prefix_len:
        raise PrefixCacheError(
            f"{where}: seq_len: expected at least prefix_len {prefix_len}, got {seq_len}"
        )
    rule = Visibility(causal=True) if visibility is None else visibility
    row = PagedAttentionRow("prefix", prefix_len, seq_len, sequence_id=0)
    lo, hi = row_intervals(row, rule, spans)
    for query, (low, high) in enumerate(zip(lo, hi)):
        if low < high and high > prefix_len:
            key = max(low, prefix_len)
            span = next(((a, b) for a, b in spans or () if a <= query < b), None)
            cause = f"under {rule}" if span is None else f"in the full span [{span[0]}, {span[1]})"
            reason = (
                f"{where}: prefix K/V cannot be reused without loss: query {query} of the prefix "
                f"[0, {prefix_len}) sees key {key} of the target, {cause}"
            )
            return PrefixLegality(False, (query, key), reason)
    return PrefixLegality(True)


def usable_hit_len(hit_len: int, alignment: int, spans: Spans | None = None) -> int:
    """The longest prefix of a hit that can be reused: aligned, and ending inside no span.

    Tokens of a full span see the whole span, so their K/V is right only if all of it matched.

    Args:
        hit_len: tokens that matched; >= 0.
        alignment: a hit is a multiple of it; >= 1.
        spans: full spans, sorted and disjoint, or ``None``.
    """
    if alignment < 1:
        raise PrefixCacheError(f"alignment: expected >= 1, got {alignment}")
    usable = hit_len // alignment * alignment
    # from the last span backwards: rounding down may fall into an earlier one
    for start, end in reversed(spans or ()):
        if start < usable < end:
            usable = start // alignment * alignment
    return usable
