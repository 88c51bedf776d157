"""Kernel ``sdpa``: select the keys a row sees, then torch's scaled dot product attention.

Serves any device. An ``index_select`` gathers exactly the cells ``[min lo, max hi)`` of a row, so
that bytes no valid token wrote are never multiplied by anything; K and V are views of the gathered
cells. A row of adjacent blocks, in a layout that keeps its tokens at even distances, is a view of
the pool itself where that is faster, and nothing is gathered.

The attention calls of a row follow :mod:`.segments`: one where all queries see the same keys, more
in a piecewise row. Short rows of equal shape share their calls. It is therefore not one kernel
launch for a layer, but at least one for each shape of row.

torch accumulates in float32 for float16 and bfloat16, in its fused kernels and in its
composed path alike. Soft-capped scores, and calls that ask for the LSE, are computed by plain
matrix products in float32 (float64 for float64) in chunks of queries.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from backends.torch_cuda.allocator import LayerTensors
from backends.torch_cuda.dtypes import COMPUTE_DTYPES, is_float8
from backends.torch_cuda.kernels.base import KernelCase, Scalars, StepTensors
from backends.torch_cuda.kernels.segments import Mode, Segment, segment_row
from backends.torch_cuda.paging import PageGeometry, cell_rows

SCORES_LIMIT = 1 << 24
"""Elements of the score matrix that the explicit path holds at a time."""

STACKED_CELLS = 1 << 13
"""Cells that rows of equal shape are stacked up to: 1,024 keys of 8 heads. Longer rows gain
nothing, and would only be gathered further ahead of their use."""

FEW_QUERIES = 16
"""Up to here the query heads of a group become more queries of one head, so that their keys are
read once: on the CPU a quarter of the time of grouped heads for one bfloat16 query, and no more
for one float32 query; from 32 on there is nothing to gain."""


DENSE_QUERIES = 64
"""From here on, on the CPU, queries are copied to heads before tokens ahead of the call: 4 to 8 %
less time for 1,024 queries over 2,048 keys, as each head's queries are read once for each block of
keys; nothing to gain for 32."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Keys that lie at even distances, in a row of adjacent blocks: they need no gathering.

    Numbers count elements from the layer's first cell.
    """

    start: int
    head_stride: int
    token_stride: int


@dataclass(frozen=True, slots=True, eq=False)
class RowWork:
    """Rows of one shape, stacked: as many queries, as many keys, the same calls. Mostly one row."""

    indices: tuple[int, ...]  #: the rows, numbered as in the step
    starts: tuple[int, ...]  #: each row's first query in the batch
    firsts: tuple[int, ...]  #: the position of each row's first gathered key
    keys: int  #: gathered keys of a row
    segments: tuple[Segment, ...]  #: their keys count from the first gathered one
    tokens: tuple[torch.Tensor | None, ...]  #: for each segment, of several rows: its queries
    cells: tuple[torch.Tensor | Extent, ...]  #: for each geometry: int64 [rows * H * keys]


@dataclass(frozen=True, slots=True, eq=False)
class SdpaWork:
    """The plan of a step."""

    rows: tuple[RowWork, ...]
    blind: bool  #: whether some query, a padded one perhaps, is in no segment
    tables: Any = None  #: what another way of gathering reads; see :mod:`.gather`

    @property
    def single(self) -> bool:
        """Whether one call gives the whole output, which then need not be put together."""
        if self.blind or len(self.rows) != 1:
            return False
        return len(self.rows[0].segments) == 1 and len(self.rows[0].starts) == 1


Gatherer = Callable[[RowWork], tuple[torch.Tensor, torch.Tensor]]


class SdpaKernel:
    """See the module."""

    name = "sdpa"
    capturable = False  # the calls, and the index tables they read, follow the rows

    def refuse(self, case: KernelCase) -> str | None:
        for view in case.layers:
            if view.dtype.name not in COMPUTE_DTYPES and not is_float8(view.dtype):
                return (
                    f"layer {view.name!r} stores {view.dtype}; it attends over "
                    f"{', '.join(COMPUTE_DTYPES)} and 8-bit floats"
                )
        return None

    def notes(self, case: KernelCase) -> tuple[str, ...]:
        return ()

    def update(
        self,
        work: SdpaWork,
        case: KernelCase,
        tensors: StepTensors,
        geometries: Mapping[PageGeometry, int],
    ) -> SdpaWork:
        return self.plan(case, tensors, geometries)

    def plan(
        self, case: KernelCase, tensors: StepTensors, geometries: Mapping[PageGeometry, int]
    ) -> SdpaWork:
        step = case.step
        kv_heads = next(iter(geometries)).num_kv_heads
        stacks: list[tuple[int, tuple[Segment, ...], list[tuple[int, int, int]]]] = []
        growing: dict[tuple[int, tuple[Segment, ...]], list[tuple[int, int, int]]] = {}
        covered = 0
        for index in range(len(step.rows)):
            start, end = step.cu_seqlens[index], step.cu_seqlens[index + 1]
            segments = segment_row(step.lo[start:end], step.hi[start:end])
            if not segments:
                continue
            covered += sum(s.end - s.start for s in segments)
            first, last = min(s.first for s in segments), max(s.last for s in segments)
            keys = last - first
            shape = tuple(
                Segment(s.start, s.end, s.first - first, s.last - first, s.mode) for s in segments
            )
            rows = growing.get((keys, shape))
            if rows is None or (len(rows) + 1) * keys * kv_heads > STACKED_CELLS:
                rows = []
                stacks.append((keys, shape, rows))
                if all(s.mode is not Mode.MASKED for s in segments):
                    growing[keys, shape] = rows  # a mask is made from one row's own intervals
            rows.append((index, start, first))
        work = tuple(
            stack_rows(rows, keys, shape, case, tensors, self._selected(geometries))
            for keys, shape, rows in stacks
        )
        return SdpaWork(work, blind=covered < step.num_tokens, tables=self._tables(case, work))

    def _selected(self, geometries: Mapping[PageGeometry, int]) -> Mapping[PageGeometry, int]:
        """The geometries whose cells are selected by index tables."""
        return geometries

    def _tables(self, case: KernelCase, rows: Sequence[RowWork]) -> Any:
        return None

    def _gatherer(
        self,
        layer: LayerTensors,
        work: SdpaWork,
        geometry: int,
        dtype: torch.dtype,
    ) -> Gatherer:
        """What gives K ``[rows, Hkv, keys, D]`` and V ``[rows, Hkv, keys, Dv]`` of stacked rows."""
        return lambda row: _gather(layer, row, geometry, dtype)

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
        single = work.single
        out = lse = None
        if not single:
            make = torch.zeros if work.blind else torch.empty
            size = (*query.shape[:2], layer.view.head_size_v)
            out = make(size, dtype=query.dtype, device=query.device)
            if return_lse:
                wide = accumulator(query.dtype)
                lse = torch.full(size[:2], -torch.inf, dtype=wide, device=query.device)
        gather = self._gatherer(layer, work, geometry, query.dtype)
        for row in work.rows:
            key, value = gather(row)
            for segment, tokens in zip(row.segments, row.tokens, strict=True):
                at = slice(row.starts[0] + segment.start, row.starts[0] + segment.end)
                if tokens is None:
                    part_query = query[at][None]
                else:
                    selected = query.index_select(0, tokens)
                    part_query = selected.view(len(row.starts), -1, *query.shape[1:])
                part, part_lse = attend(
                    part_query,
                    key[:, :, segment.first : segment.last],
                    value[:, :, segment.first : segment.last],
                    segment.mode,
                    _mask(tensors, row, segment),
                    scale=scalars.softmax_scale * scalars.k_scale,
                    softcap=scalars.softcap,
                    return_lse=return_lse,
                )
                if out is None:
                    # torch's composed path, for one, returns a transposed view
                    out, lse = part[0].contiguous(), None if part_lse is None else part_lse[0]
                    continue
                for whole, piece in ((out, part), (lse, part_lse)):
                    if whole is None or piece is None:
                        continue
                    if tokens is None:
                        whole[at] = piece[0]
                    else:
                        whole.index_copy_(0, tokens, piece.flatten(0, 1))
        assert out is not None  # a single call was made, or the rows were put in place
        if scalars.v_scale != 1.0:
            out *= scalars.v_scale
        return out, lse


def stack_rows(
    rows: list[tuple[int, int, int]],
    keys: int,
    segments: tuple[Segment, ...],
    case: KernelCase,
    tensors: StepTensors,
    geometries: Mapping[PageGeometry, int],
) -> RowWork:
    """The work of rows ``(index, first query, first key)`` of one shape."""
    starts = tuple(start for _, start, _ in rows)
    tokens: list[torch.Tensor | None] = [None] * len(segments)
    if len(rows) > 1:
        device = tensors.lo.device
        offsets = torch.tensor(starts, dtype=torch.int64, device=device)[:, None]
        for at, s in enumerate(segments):
            queries = torch.arange(s.start, s.end, dtype=torch.int64, device=device)
            tokens[at] = (offsets + queries).reshape(-1)
    step = case.step
    reach = widest_token_stride(case)
    cells: list[torch.Tensor | Extent] = []
    for g in geometries:
        extent = None
        if len(rows) == 1:
            index, _, first = rows[0]
            ids = step.block_table[index * step.max_blocks : (index + 1) * step.max_blocks]
            extent = extent_of(g, ids, first, first + keys)
        if extent is None or extent.token_stride > reach:
            parts = [cell_rows(g, tensors.block_table[i], k, k + keys) for i, _, k in rows]
            cells.append(torch.cat(parts))
        else:
            cells.append(extent)
    return RowWork(
        tuple(index for index, _, _ in rows),
        starts,
        tuple(first for _, _, first in rows),
        keys,
        segments,
        tuple(tokens),
        tuple(cells),
    )


def widest_token_stride(case: KernelCase) -> int:
    """How far apart tokens may lie, in elements, for keys to be read in the pool.

    Any distance in 32 bits and more: on the CPU 1.04 of dense attention's time for 32 queries,
    where gathering takes 1.3. In 16 bits torch's kernel takes 1.9 over tokens that are not side by
    side, so those are gathered; 1.15 where they are.
    """
    if all(view.dtype.itemsize >= 4 for view in case.layers):
        return sys.maxsize
    return min(view.head_size + view.head_size_v for view in case.layers)


def extent_of(
    geometry: PageGeometry, block_ids: Sequence[int], first: int, last: int
) -> Extent | None:
    """Where the keys ``[first, last)`` of a row lie, if at even distances; else ``None``.

    Args:
        geometry: the layer's.
        block_ids: the row's, in position order, as the view counts blocks.
        first, last: positions; half-open, not empty.
    """
    size = geometry.block_size
    block_step, head_step, token_step = geometry.cell_steps
    start, end = first // size, -(-last // size)
    used = block_ids[start:end]
    if len(used) > 1 and (
        block_step != size * token_step
        or any(after != before + 1 for before, after in pairwise(used))
    ):
        return None
    row = used[0] * block_step + (first - start * size) * token_step
    pitch = geometry.cell_pitch
    return Extent(row * pitch, head_step * pitch, token_step * pitch)


def _gather(
    layer: LayerTensors, row: RowWork, geometry: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """K ``[rows, Hkv, keys, D]`` and V ``[rows, Hkv, keys, Dv]`` of stacked rows."""
    view = layer.view
    shape = (len(row.starts), view.num_kv_heads, row.keys, view.head_size + view.head_size_v)
    at = row.cells[geometry]
    if isinstance(at, Extent):
        strides = (0, at.head_stride, at.token_stride, 1)
        cells = layer.key.as_strided(shape, strides, layer.key.storage_offset() + at.start)
    else:
        cells = layer.cells.index_select(0, at).view(layer.key.dtype).view(shape)
    if cells.dtype != dtype:  # 8-bit floats, which every dtype of a query holds exactly
        cells = cells.to(dtype)
    return cells[..., : view.head_size], cells[..., view.head_size :]


def _mask(step: StepTensors, row: RowWork, segment: Segment) -> torch.Tensor | None:
    """The mask of a segment, where it needs one.

    Made anew in each layer: kept for a whole step, masks would take a byte for each query and key.
    """
    if segment.mode is not Mode.MASKED:
        return None
    start = row.starts[0]
    at = slice(start + segment.start, start + segment.end)
    first, last = row.firsts[0] + segment.first, row.firsts[0] + segment.last
    return interval_mask(step.lo[at], step.hi[at], first, last)


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
    """Attention of stacked rows over their keys; every query sees at least one.

    Args:
        query: ``[R, Q, Hq, D]``.
        key, value: ``[R, Hkv, K, D]`` and ``[R, Hkv, K, Dv]``; any strides, the last axis dense.
        mode: what the call needs; CAUSAL has ``Q == K``.
        mask: bool ``[Q, K]`` for MASKED, else ``None``.
        scale: multiplies the scores.
        softcap: 0 is off.
        return_lse: also return the LSE, by the explicit path.

    Returns:
        ``[R, Q, Hq, Dv]``, and the LSE ``[R, Q, Hq]`` where it was asked for.
    """
    if softcap or return_lse:
        return _attend_explicit(query, key, value, mode, mask, scale, softcap)
    rows, queries, heads, size = query.shape
    kv_heads = key.shape[1]
    if mode is Mode.FULL and queries <= FEW_QUERIES and heads != kv_heads:
        group = heads // kv_heads
        folded = query.reshape(rows, queries, kv_heads, group, size).transpose(1, 2)
        folded = folded.reshape(rows, kv_heads, queries * group, size)
        out = fused_attention(folded, key, value, mode, mask, scale)
        out = out.reshape(rows, kv_heads, queries, group, -1).transpose(1, 2)
        return out.reshape(rows, queries, heads, -1), None
    query = query.transpose(1, 2)
    if queries >= DENSE_QUERIES and query.device.type == "cpu":
        query = query.contiguous()
    out = fused_attention(query, key, value, mode, mask, scale)
    return out.transpose(1, 2), None


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
    if mode is Mode.CAUSAL and scale <= 0:
        # torch puts −inf over hidden scores before it scales them: 0 or below gives NaN or +inf
        query, scale = (-query, -scale) if scale < 0 else (torch.zeros_like(query), 1.0)
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
    rows, queries, heads, size = query.shape
    _, kv_heads, keys, value_size = value.shape
    group = heads // kv_heads
    wide = accumulator(query.dtype)
    key_t = key.to(wide).transpose(2, 3)
    values = value.to(wide)
    out = torch.empty(rows, queries, heads, value_size, dtype=query.dtype, device=query.device)
    lse = torch.empty(rows, queries, heads, dtype=wide, device=query.device)
    chunk = max(1, SCORES_LIMIT // (rows * heads * keys))
    for start in range(0, queries, chunk):
        q = query[:, start : start + chunk].to(wide)
        count = q.shape[1]
        # [R, Q, Hkv, G, D] -> [R, Hkv, G * Q, D]: the heads of a group share their keys
        q = q.reshape(rows, count, kv_heads, group, size).permute(0, 2, 3, 1, 4)
        scores = torch.matmul(q.reshape(rows, kv_heads, group * count, size), key_t) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.view(rows, kv_heads, group, count, keys)
        visible = mask[start : start + count] if mask is not None else None
        if mode is Mode.CAUSAL:
            ends = torch.arange(start, start + count, device=query.device)
            visible = torch.arange(keys, device=query.device) <= ends[:, None]
        if visible is not None:
            scores = scores.masked_fill(~visible, -torch.inf)
        part = torch.logsumexp(scores, dim=-1)  # [R, Hkv, G, Q]
        weights = torch.exp(scores - part[..., None])
        product = torch.matmul(weights.view(rows, kv_heads, group * count, keys), values)
        product = product.view(rows, kv_heads, group, count, value_size).permute(0, 3, 1, 2, 4)
        stop = start + count
        out[:, start:stop] = product.reshape(rows, count, heads, value_size)
        lse[:, start:stop] = part.permute(0, 3, 1, 2).reshape(rows, count, heads)
    return out, lse
