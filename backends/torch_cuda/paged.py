"""Paged writes, copies and attention on a pool: plain functions, which the engine calls."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from backends.torch_cuda.allocator import LayerTensors, TorchPool
from backends.torch_cuda.dtypes import COMPUTE_DTYPES, as_bits, core_dtype, is_float8
from backends.torch_cuda.kernels.base import Kernel, KernelCase, Scalars, StepTensors
from backends.torch_cuda.kernels.select import select_kernel
from backends.torch_cuda.paging import PageGeometry, page_geometry, token_rows, written_tokens
from layout_core.errors import BlockTableError, RowError, TensorError
from layout_core.protocols import Layer
from layout_core.rows import PAD_SLOT, BlockTables, Bucket, PagedAttentionRow
from layout_core.serving import (
    check_array,
    check_batch_layer,
    check_copy_pairs,
    check_fresh,
    check_key_value,
    check_num_heads,
    check_same_plan,
    check_scalars,
    check_servable,
    find_layer,
)
from layout_core.step import StepPlan, plan_step
from layout_core.views import LayerView, ResolvedLayout
from layout_core.visibility import Spans, Visibility


@dataclass(slots=True, eq=False)
class TorchBatch:
    """A step on the device. :func:`update` refills it in place; nothing else changes it."""

    plan: StepPlan
    tables: BlockTables  #: asked for its version before every use
    num_heads: int
    kernel: str  #: name of the kernel that runs
    tensors: StepTensors
    geometries: dict[PageGeometry, int]  #: of the group's layers, numbered
    tokens: torch.Tensor | None  #: int64: the tokens that are written; ``None`` for all
    rows: tuple[torch.Tensor, ...]  #: for each geometry: their rows of the view of tokens
    work: Any  #: the kernel's own plan
    run: Kernel


def write(
    pool: TorchPool, layer: Layer, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
) -> TorchPool:
    """Store K and V at slots, in place and bit for bit.

    Slots are distinct but for −1, which is skipped. On a GPU, skipping waits for the device,
    as only the host knows a shape; a prepared batch does not.

    Args:
        pool: written in place.
        layer: index, name or view.
        key: ``[T, Hkv, D]`` of the pool's dtype, any strides.
        value: ``[T, Hkv, Dv]`` of the pool's dtype, any strides.
        slots: ``[T]``, an integer type; in ``[0, num_blocks * block_size)``, or −1.

    Raises:
        TensorError: shapes, dtypes or devices that do not fit.
        BlockTableError: a slot out of range (on the CPU; a GPU's own check traps).
    """
    tensors = pool.layers[find_layer(pool.resolved, layer)]
    view = tensors.view
    if slots.dim() != 1 or slots.dtype not in (torch.int64, torch.int32):
        raise TensorError(
            f"slots: layer {view.name!r} expects int64 or int32 [T], got {slots.dtype} "
            f"{list(slots.shape)}"
        )
    _check_key_value(pool, view, key, value, slots.shape[0])
    _check_device("slots", pool, slots)
    slots = slots.to(torch.int64)
    limit = view.shape[0] * view.block_size
    if slots.device.type == "cpu" and slots.numel():
        least, most = (int(bound) for bound in torch.aminmax(slots))
        if least < PAD_SLOT or most >= limit:
            raise BlockTableError(
                f"slots: layer {view.name!r} expects slots in [0, {limit}) or {PAD_SLOT}, got "
                f"{least if least < PAD_SLOT else most}"
            )
    tokens = written_tokens(slots)
    if tokens.numel() == slots.numel():
        _store(tensors, key, value, None, token_rows(tensors.geometry, slots))
    else:
        rows = token_rows(tensors.geometry, slots.index_select(0, tokens))
        _store(tensors, key, value, tokens, rows)
    return pool


def _check_device(name: str, pool: TorchPool, tensor: torch.Tensor) -> None:
    if tensor.device != pool.device:
        raise TensorError(
            f"{name}: expected on {pool.device}, where the pool is, got {tensor.device}"
        )


def _check_key_value(
    pool: TorchPool, view: LayerView, key: torch.Tensor, value: torch.Tensor, tokens: int
) -> None:
    check_key_value(
        view, tokens, key.shape, core_dtype(key.dtype), value.shape, core_dtype(value.dtype)
    )
    _check_device("key", pool, key)
    _check_device("value", pool, value)


def _store(
    layer: LayerTensors,
    key: torch.Tensor,
    value: torch.Tensor,
    tokens: torch.Tensor | None,
    rows: torch.Tensor,
) -> None:
    for target, source in ((layer.key_tokens, key), (layer.value_tokens, value)):
        bits = as_bits(source.detach())
        target.index_copy_(0, rows, bits if tokens is None else bits.index_select(0, tokens))


def copy_blocks(pool: TorchPool, pairs: Sequence[tuple[int, int]], *, group: int = 0) -> TorchPool:
    """Copy whole blocks ``(source, destination)`` in every layer of a group, bit for bit.

    Cells are copied; padding after a page is left as it is.

    Raises:
        BlockTableError: see :func:`layout_core.serving.check_copy_pairs`.
    """
    sources, destinations = check_copy_pairs(pool.resolved, pairs, group)
    if not sources:
        return pool
    for index in pool.resolved.group_layers(group):
        layer = pool.layers[index]
        ratio = layer.view.blocks_per_manager_block
        ids = [
            torch.tensor(
                [block * ratio + part for block in blocks for part in range(ratio)],
                dtype=torch.int64,
                device=pool.device,
            )
            for blocks in (sources, destinations)
        ]
        layer.content.index_copy_(0, ids[1], layer.content.index_select(0, ids[0]))
    return pool


def prepare(
    resolved: ResolvedLayout,
    rows: Sequence[PagedAttentionRow],
    tables: BlockTables,
    *,
    visibility: Visibility,
    num_heads: int,
    device: torch.device,
    group: int = 0,
    spans: Sequence[Spans | None] | None = None,
    kernel: str = "auto",
    bucket: Bucket | None = None,
) -> TorchBatch:
    """Everything a step needs on the device; see ``Engine.prepare``.

    Raises:
        UnsupportedError: a plan, or a kernel asked for by name, that cannot serve.
        TensorError: query heads that are no multiple of the KV heads.
        RowError, BlockTableError, VisibilityError: see :func:`layout_core.step.plan_step`.
    """
    check_servable(resolved)
    check_num_heads(resolved, group, num_heads)
    views = tuple(resolved.layers[index] for index in resolved.group_layers(group))
    run = select_kernel(kernel, KernelCase(device, num_heads, views))
    geometries: dict[PageGeometry, int] = {}
    for view in views:
        geometries.setdefault(page_geometry(view), len(geometries))
    plan = plan_step(
        resolved, rows, tables, visibility=visibility, group=group, spans=spans, bucket=bucket
    )
    tensors = StepTensors(
        query_lens=_to_device(plan.query_lens, torch.int32, device),
        seq_lens=_to_device(plan.seq_lens, torch.int32, device),
        kv_starts=_to_device(plan.kv_starts, torch.int32, device),
        cu_seqlens=_to_device(plan.cu_seqlens, torch.int32, device),
        lo=_to_device(plan.lo, torch.int32, device),
        hi=_to_device(plan.hi, torch.int32, device),
        block_table=_to_device(plan.block_table, torch.int32, device).view(
            plan.num_rows, plan.max_blocks
        ),
        slots=_to_device(plan.slots, torch.int64, device),
    )
    tokens, token_row = _write_plan(plan, tensors, geometries)
    return TorchBatch(
        plan=plan,
        tables=tables,
        num_heads=num_heads,
        kernel=run.name,
        tensors=tensors,
        geometries=geometries,
        tokens=tokens,
        rows=token_row,
        work=run.plan(plan, tensors, geometries),
        run=run,
    )


def update(batch: TorchBatch, rows: Sequence[PagedAttentionRow], tables: BlockTables) -> TorchBatch:
    """Refill a batch in place, with the same shapes, visibility and spans.

    Unchanged rows under an unchanged version cost one comparison. Without a bucket the rows
    and tokens must be as many as before, and no row may need more blocks than the widest did.

    Raises:
        RowError: more tokens, rows or blocks than the batch has room for.
        RowError, BlockTableError, VisibilityError: see :func:`layout_core.step.plan_step`. The
            batch is unchanged.
    """
    old = batch.plan
    if old.matches(rows, tables.version):
        batch.tables = tables
        return batch
    bucket = old.bucket
    if bucket is None:
        tokens = sum(row.query_len for row in rows)
        if (len(rows), tokens) != (old.num_rows, old.num_tokens):
            raise RowError(
                f"rows: update expects the {old.num_rows} rows and {old.num_tokens} tokens that "
                f"the batch was prepared with, got {len(rows)} and {tokens}; prepare with a "
                "bucket to leave room"
            )
    plan = plan_step(
        old.resolved,
        rows,
        tables,
        visibility=old.visibility,
        group=old.group,
        spans=old.spans,
        bucket=bucket,
    )
    if plan.max_blocks > old.max_blocks:
        raise RowError(
            f"rows: update has room for {old.max_blocks} blocks in each row, a row needs "
            f"{plan.max_blocks}; prepare with a bucket to leave room"
        )
    tensors = batch.tensors
    for name in ("query_lens", "seq_lens", "kv_starts", "cu_seqlens", "lo", "hi", "slots"):
        values: array[int] = getattr(plan, name)
        if len(values):
            target: torch.Tensor = getattr(tensors, name)
            target.copy_(torch.frombuffer(values, dtype=target.dtype))
    if plan.max_blocks:
        table = torch.frombuffer(plan.block_table, dtype=torch.int32)
        tensors.block_table[:, : plan.max_blocks].copy_(table.view(plan.num_rows, -1))
    batch.plan = plan
    batch.tables = tables
    batch.tokens, batch.rows = _write_plan(plan, tensors, batch.geometries)
    batch.work = batch.run.plan(plan, tensors, batch.geometries)
    return batch


def _to_device(values: array[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if not len(values):
        return torch.empty(0, dtype=dtype, device=device)
    host = torch.frombuffer(values, dtype=dtype)
    # the copy is the batch's own: an update must not write into the plan's array
    return host.clone() if device.type == "cpu" else host.to(device)


def _write_plan(
    plan: StepPlan, tensors: StepTensors, geometries: dict[PageGeometry, int]
) -> tuple[torch.Tensor | None, tuple[torch.Tensor, ...]]:
    """Which tokens are written, and where; the host knows, so no device is asked."""
    slots = tensors.slots
    tokens = None
    if plan.num_real_tokens < plan.num_tokens or any(row.read_only for row in plan.rows):
        kept = array("q", (i for i, slot in enumerate(plan.slots) if slot != PAD_SLOT))
        tokens = _to_device(kept, torch.int64, slots.device)
        slots = slots.index_select(0, tokens)
    return tokens, tuple(token_rows(geometry, slots) for geometry in geometries)


def forward_paged(
    pool: TorchPool,
    layer: Layer,
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    batch: TorchBatch,
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> tuple[torch.Tensor, TorchPool]:
    """Write K/V at the rows' positions, then attend; see ``Engine.forward_paged``.

    No result is read back to the host.

    Raises:
        StaleBatchError: the block tables changed since the batch was prepared.
        PoolError: a batch of another plan, or a layer of another group.
        TensorError: shapes, dtypes, devices or scalars that do not fit.
        Nothing was written where it raises.
    """
    output, _ = paged_attention(
        pool,
        layer,
        query,
        key,
        value,
        batch,
        softmax_scale=softmax_scale,
        softcap=softcap,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    return output, pool


def paged_attention(
    pool: TorchPool,
    layer: Layer,
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    batch: TorchBatch,
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    return_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """:func:`forward_paged` that can also return the LSE, for a caller that merges parts.

    Returns:
        ``(output [T, Hq, Dv], None)``, or with ``return_lse`` the LSE ``[T, Hq]``: see
        :class:`~backends.torch_cuda.kernels.base.Kernel`.
    """
    plan = batch.plan
    check_fresh(plan, batch.tables.version)
    check_same_plan(pool.resolved, plan.resolved)
    tensors = pool.layers[find_layer(pool.resolved, layer)]
    view = tensors.view
    check_batch_layer(view, plan.group)
    check_scalars(softmax_scale, softcap, k_scale, v_scale)
    _check_query(pool, view, query, batch)
    if (key is None) != (value is None):
        missing = "key" if key is None else "value"
        raise TensorError(
            f"{missing}: layer {view.name!r} expects key and value, or neither to only read; "
            f"got {missing}=None alone"
        )
    geometry = batch.geometries[tensors.geometry]
    if key is not None and value is not None:
        _check_key_value(pool, view, key, value, plan.num_tokens)
        _store(tensors, key, value, batch.tokens, batch.rows[geometry])
    scale = view.head_size**-0.5 if softmax_scale is None else softmax_scale
    return batch.run.run(
        tensors,
        query.detach(),
        batch.work,
        batch.tensors,
        geometry,
        Scalars(scale, softcap, k_scale, v_scale),
        return_lse=return_lse,
    )


def _check_query(pool: TorchPool, view: LayerView, query: torch.Tensor, batch: TorchBatch) -> None:
    dtype = core_dtype(query.dtype)
    quantised = is_float8(view.dtype)
    check_array(
        "query",
        view.name,
        query.shape,
        dtype,
        expected_shape=(batch.plan.num_tokens, batch.num_heads, view.head_size),
        expected_dtype=None if quantised else view.dtype,
    )
    if quantised and dtype.name not in COMPUTE_DTYPES:
        raise TensorError(
            f"query: layer {view.name!r} expects one of {', '.join(COMPUTE_DTYPES)}, got {dtype}"
        )
    _check_device("query", pool, query)
