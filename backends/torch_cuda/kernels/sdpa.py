"""Kernel ``sdpa``: select the keys a row sees, then torch's scaled dot product attention.

Serves any device. One ``index_select`` for each row gathers exactly the cells ``[min lo, max
hi)`` of the row, so that bytes no valid token wrote are never multiplied by anything; K and V
are views of the gathered cells. The attention calls of a row follow :mod:`.segments`: one where
all queries see the same keys, more in a piecewise row. It is therefore not one kernel launch for
a layer but at least one for each row.

torch accumulates in float32 for float16 and bfloat16, in its fused kernels and in its
composed path alike. Soft-capped scores, and calls that ask for the LSE, are computed by plain
matrix products in float32 (float64 for float64) in chunks of queries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from backends.torch_cuda.allocator import LayerTensors
from backends.torch_cuda.dtypes import COMPUTE_DTYPES, is_float8
from backends.torch_cuda.kernels.base import KernelCase, Scalars, StepTensors
from backends.torch_cuda.kernels.segments import Mode, Segment, segment_row
from backends.torch_cuda.paging import PageGeometry, cell_rows
from layout_core.step import StepPlan

SCORES_LIMIT = 1 << 24
"""Elements of the score matrix that the explicit path holds at a time."""


FEW_QUERIES = 16
"""Up to here the query heads of a group become more queries of one head, so that their keys are
read once: on the CPU a quarter of the time of grouped heads for one bfloat16 query, and no more
for one float32 query; from 32 on there is nothing to gain."""


@dataclass(frozen=True, slots=True, eq=False)
class RowWork:
    """One row that sees at least one key."""

    start: int  #: its first query in the batch
    first: int  #: its first gathered key; segments count keys of the row, not of the gather
    last: int
    segments: tuple[Segment, ...]
    cells: tuple[torch.Tensor, ...]  #: for each geometry: int64 [H * (last - first)]


@dataclass(frozen=True, slots=True, eq=False)
class SdpaWork:
    """The plan of a step."""

    rows: tuple[RowWork, ...]
    blind: bool  #: whether some query, a padded one perhaps, is in no segment

    @property
    def single(self) -> bool:
        """Whether one call gives the whole output, which then need not be put together."""
        return not self.blind and len(self.rows) == 1 and len(self.rows[0].segments) == 1


class SdpaKernel:
    """See the module."""

    name = "sdpa"

    def refuse(self, case: KernelCase) -> str | None:
        for view in case.layers:
            if view.dtype.name not in COMPUTE_DTYPES and not is_float8(view.dtype):
                return (
                    f"layer {view.name!r} stores {view.dtype}; it attends over "
                    f"{', '.join(COMPUTE_DTYPES)} and 8-bit floats"
                )
        return None

    def plan(
        self, step: StepPlan, tensors: StepTensors, geometries: Mapping[PageGeometry, int]
    ) -> SdpaWork:
        rows: list[RowWork] = []
        covered = 0
        for index in range(len(step.rows)):
            start, end = step.cu_seqlens[index], step.cu_seqlens[index + 1]
            lo, hi = step.lo[start:end], step.hi[start:end]
            segments = segment_row(lo, hi)
            if not segments:
                continue
            covered += sum(s.end - s.start for s in segments)
            first, last = min(s.first for s in segments), max(s.last for s in segments)
            block_ids = tensors.block_table[index]
            rows.append(
                RowWork(
                    start=start,
                    first=first,
                    last=last,
                    segments=tuple(segments),
                    cells=tuple(cell_rows(g, block_ids, first, last) for g in geometries),
                )
            )
        return SdpaWork(tuple(rows), blind=covered < step.num_tokens)

    def run(
        self,
        layer: LayerTensors,
        query: torch.Tensor,
        work: SdpaWork,
        tensors: StepTensors,
        geometry: int,
        scalars: Scalars,
        *,
        return_lse: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        tokens, heads, _ = query.shape
        single = work.single
        out = lse = None
        if not single:
            make = torch.zeros if work.blind else torch.empty
            size = (tokens, heads, layer.view.head_size_v)
            out = make(size, dtype=query.dtype, device=query.device)
            if return_lse:
                wide = accumulator(query.dtype)
                lse = torch.full(size[:2], -torch.inf, dtype=wide, device=query.device)
        for row in work.rows:
            key, value = _gather(layer, row, geometry, query.dtype)
            for segment in row.segments:
                at = slice(row.start + segment.start, row.start + segment.end)
                seen = slice(segment.first - row.first, segment.last - row.first)
                part, part_lse = attend(
                    query[at],
                    key[:, seen],
                    value[:, seen],
                    segment.mode,
                    _mask(tensors, row.start, segment),
                    scale=scalars.softmax_scale * scalars.k_scale,
                    softcap=scalars.softcap,
                    return_lse=return_lse,
                )
                if out is None:
                    # torch's composed path, for one, returns a transposed view
                    out, lse = part.contiguous(), part_lse
                else:
                    out[at] = part
                    if lse is not None and part_lse is not None:
                        lse[at] = part_lse
        assert out is not None  # a single call was made, or the rows were put in place
        if scalars.v_scale != 1.0:
            out *= scalars.v_scale
        return out, lse


def _gather(
    layer: LayerTensors, row: RowWork, geometry: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """K ``[Hkv, keys, D]`` and V ``[Hkv, keys, Dv]`` of a row, from ``row.first`` on."""
    view = layer.view
    cells = layer.cells.index_select(0, row.cells[geometry]).view(layer.key.dtype)
    if cells.dtype != dtype:  # 8-bit floats, which every dtype of a query holds exactly
        cells = cells.to(dtype)
    cells = cells.view(view.num_kv_heads, row.last - row.first, -1)
    return cells[..., : view.head_size], cells[..., view.head_size :]


def _mask(tensors: StepTensors, start: int, segment: Segment) -> torch.Tensor | None:
    """The mask of a segment of the row whose first query is ``start``, where it needs one.

    Made anew in each layer: kept for a whole step, masks would take a byte for each query and key.
    """
    if segment.mode is not Mode.MASKED:
        return None
    at = slice(start + segment.start, start + segment.end)
    return interval_mask(tensors.lo[at], tensors.hi[at], segment.first, segment.last)


def interval_mask(lo: torch.Tensor, hi: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Which query sees which of the keys ``[first, last)``: bool ``[Q, last - first]``.

    Args:
        lo, hi: ``[Q]`` integers; query ``i`` sees the keys ``[lo[i], hi[i])``.
        first, last: half-open.
    """
    keys = torch.arange(first, last, dtype=lo.dtype, device=lo.device)
    return (keys >= lo[:, None]) & (keys < hi[:, None])


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The type that scores and sums are kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mode: Mode,
    mask: torch.Tensor | None,
    *,
    scale: float,
    softcap: float = 0.0,
    return_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of one row's queries over its keys; every query sees at least one.

    Args:
        query: ``[Q, Hq, D]``.
        key, value: ``[Hkv, K, D]`` and ``[Hkv, K, Dv]``; any strides with the last axis dense.
        mode: what the call needs; CAUSAL has ``Q == K``.
        mask: bool ``[Q, K]`` for MASKED, else ``None``.
        scale: multiplies the scores.
        softcap: 0 is off.
        return_lse: also return the LSE, by the explicit path.

    Returns:
        ``[Q, Hq, Dv]``, and the LSE ``[Q, Hq]`` where it was asked for.
    """
    if softcap or return_lse:
        return _attend_explicit(query, key, value, mode, mask, scale, softcap)
    queries, heads, size = query.shape
    kv_heads = key.shape[0]
    if mode is Mode.FULL and queries <= FEW_QUERIES and heads != kv_heads:
        group = heads // kv_heads
        folded = query.reshape(queries, kv_heads, group, size).permute(1, 0, 2, 3)
        folded = folded.reshape(1, kv_heads, queries * group, size)
        out = fused_attention(folded, key[None], value[None], mode, mask, scale)
        out = out.view(kv_heads, queries, group, -1).permute(1, 0, 2, 3)
        return out.reshape(queries, heads, -1), None
    out = fused_attention(query.transpose(0, 1)[None], key[None], value[None], mode, mask, scale)
    return out[0].transpose(0, 1), None


def fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mode: Mode,
    mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """torch's own attention, grouped heads included.

    Args:
        query: ``[B, Hq, Q, D]``.
        key, value: ``[B, Hkv, K, D]`` and ``[B, Hkv, K, Dv]``.
        mode: CAUSAL is aligned top-left, which is exact where ``Q == K``.
        mask: for MASKED: bool, or an additive bias, that broadcasts to ``[B, Hq, Q, K]``.
        scale: multiplies the scores.

    Returns:
        ``[B, Hq, Q, Dv]``.
    """
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mode is Mode.CAUSAL,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _attend_explicit(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mode: Mode,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    queries, heads, _ = query.shape
    kv_heads, keys, value_size = value.shape
    wide = accumulator(query.dtype)
    key_t = key.to(wide).transpose(1, 2)
    values = value.to(wide)
    out = torch.empty(queries, heads, value_size, dtype=query.dtype, device=query.device)
    lse = torch.empty(queries, heads, dtype=wide, device=query.device)
    chunk = max(1, SCORES_LIMIT // (heads * keys))
    for start in range(0, queries, chunk):
        q = query[start : start + chunk].to(wide)
        count = q.shape[0]
        # [Q, Hkv, G, D] -> [Hkv, G * Q, D]: the heads of a group share their keys
        q = q.reshape(count, kv_heads, -1, q.shape[-1]).permute(1, 2, 0, 3)
        group = q.shape[1]
        scores = torch.matmul(q.reshape(kv_heads, group * count, -1), key_t) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.view(kv_heads, group, count, keys)
        visible = mask[start : start + count] if mask is not None else None
        if mode is Mode.CAUSAL:
            ends = torch.arange(start, start + count, device=query.device)
            visible = torch.arange(keys, device=query.device) <= ends[:, None]
        if visible is not None:
            scores = scores.masked_fill(~visible, -torch.inf)
        part = torch.logsumexp(scores, dim=-1)  # [Hkv, G, Q]
        weights = torch.exp(scores - part[..., None]).view(kv_heads, group * count, keys)
        product = torch.matmul(weights, values).view(kv_heads, group, count, value_size)
        stop = start + count
        out[start:stop] = product.permute(2, 0, 1, 3).reshape(count, heads, value_size)
        lse[start:stop] = part.permute(2, 0, 1).reshape(count, heads)
    return out, lse
