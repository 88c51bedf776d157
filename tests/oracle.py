"""The oracle: dense attention in NumPy float64, with no knowledge of paging or layouts.

It imports nothing of pagestride. What a query sees is decided here key by key, by a boolean
predicate written from the table of rules, not by intervals: an error in the interval
arithmetic of the library cannot be repeated here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Float64 = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


def sees(
    p: int,
    k: int,
    *,
    seq_len: int,
    first_key: int = 0,
    causal: bool = False,
    window_left: int | None = None,
    window_right: int | None = None,
    chunk: int | None = None,
    spans: Sequence[tuple[int, int]] | None = None,
) -> bool:
    """Whether the query at position ``p`` sees the key at position ``k``.

    Args:
        p: position of the query; may be negative.
        k: position of the key.
        seq_len: keys of the row.
        first_key: the first key that was not evicted.
        causal: the rule of the layer.
        window_left: keys seen to the left; ``None`` is open.
        window_right: keys seen to the right; ``None`` is open.
        chunk: tokens of a chunk; causal inside it.
        spans: full spans ``[a, b)``; an empty list means causal, ``None`` means no spans at all.
    """
    if k < first_key or k >= seq_len:
        return False
    if spans is not None:
        for a, b in spans:
            if a <= p < b:
                return k < b
        return k <= p
    if chunk is not None:
        return k <= p and k // chunk == p // chunk
    if causal and k > p:
        return False
    if window_left is not None and k < p - window_left:
        return False
    return not (window_right is not None and k > p + window_right)


def visible(
    query_len: int,
    seq_len: int,
    *,
    kv_start_pos: int = 0,
    first_key: int = 0,
    causal: bool = False,
    window_left: int | None = None,
    window_right: int | None = None,
    chunk: int | None = None,
    spans: Sequence[tuple[int, int]] | None = None,
) -> Mask:
    """The predicate of :func:`sees` for all queries and keys of one row: ``[query_len, seq_len]``.

    The queries stand at ``kv_start_pos + i``. Written over whole grids of positions, because
    rows of thousands of tokens would take minutes key by key; a test compares the two.
    """
    p = (kv_start_pos + np.arange(query_len, dtype=np.int64))[:, None]
    k = np.arange(seq_len, dtype=np.int64)[None, :]
    mask = np.broadcast_to(k >= first_key, (query_len, seq_len)).copy()
    if spans is not None:
        reach = np.broadcast_to(p, (query_len, 1)).copy()
        for a, b in spans:
            reach = np.where((a <= p) & (p < b), b - 1, reach)
        return mask & (k <= reach)
    if chunk is not None:
        return mask & (k <= p) & (np.floor_divide(k, chunk) == np.floor_divide(p, chunk))
    if causal:
        mask &= k <= p
    if window_left is not None:
        mask &= k >= p - window_left
    if window_right is not None:
        mask &= k <= p + window_right
    return mask


def mask_from_intervals(lo: Sequence[int], hi: Sequence[int], num_keys: int) -> Mask:
    """``[T, num_keys]``: key ``k`` is seen by query ``i`` where ``lo[i] <= k < hi[i]``."""
    k = np.arange(num_keys)[None, :]
    return (np.asarray(lo)[:, None] <= k) & (k < np.asarray(hi)[:, None])


def dense_attention(
    query: Array,
    key: Array,
    value: Array,
    mask: Mask,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    bias: Array | None = None,
) -> tuple[Float64, Float64]:
    """Attention of one row in float64.

    Args:
        query: ``[T, Hq, D]``.
        key: ``[S, Hkv, D]`` by position; ``Hkv`` divides ``Hq``.
        value: ``[S, Hkv, Dv]`` by position.
        mask: ``[T, S]``, true where a query sees a key. Keys that nobody sees may hold NaN.
        scale: of the scores; ``None`` is ``D ** -0.5``.
        softcap: above 0, a score ``s`` becomes ``softcap * tanh(s / softcap)``.
        bias: ``[T, S]``, added to the scores; finite where the mask shows a key.

    Returns:
        Output ``[T, Hq, Dv]`` and log-sum-exp of the visible scores ``[T, Hq]``. A query that
        sees nothing gives zeros and −inf.
    """
    t, hq, d = query.shape
    s, hkv, dv = value.shape
    if key.shape != (s, hkv, d) or mask.shape != (t, s) or hq % hkv:
        raise ValueError(
            f"shapes do not fit: query {query.shape}, key {key.shape}, value {value.shape}, "
            f"mask {mask.shape}"
        )
    factor = d**-0.5 if scale is None else scale
    seen = mask.any(axis=0)  # NaN of a key that nobody sees must not enter a product
    q64 = query.astype(np.float64)
    k64 = np.where(seen[:, None, None], key.astype(np.float64), 0.0)
    v64 = np.where(seen[:, None, None], value.astype(np.float64), 0.0)
    output = np.zeros((t, hq, dv))
    lse = np.full((t, hq), -np.inf)
    if s == 0:
        return output, lse
    some = mask.any(axis=1)
    for head in range(hq):
        kv_head = head // (hq // hkv)
        scores = (q64[:, head] @ k64[:, kv_head].T) * factor
        if softcap > 0.0:
            scores = softcap * np.tanh(scores / softcap)
        if bias is not None:
            scores = scores + bias
        scores = np.where(mask, scores, -np.inf)
        top = np.where(some, scores.max(axis=1), 0.0)
        weights = np.where(mask, np.exp(scores - top[:, None]), 0.0)
        total = weights.sum(axis=1)
        output[some, head] = (weights @ v64[:, kv_head])[some] / total[some, None]
        lse[some, head] = np.log(total[some]) + top[some]
    return output, lse
