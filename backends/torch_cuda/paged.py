"""Paged writes, copies and attention on a pool: plain functions, which the engine calls."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from backends.torch_cuda import ops
from backends.torch_cuda.allocator import LayerTensors, TorchPool
from backends.torch_cuda.dtypes import COMPUTE_DTYPES, core_dtype, is_float8
from backends.torch_cuda.kernels.base import Kernel, KernelCase, Scalars, StepTensors
from backends.torch_cuda.kernels.select import Toolkit, select_kernel
from backends.torch_cuda.moves import Moves
from backends.torch_cuda.paging import PageGeometry, page_geometry
from backends.torch_cuda.staging import Staging, capturing
from layout_core.errors import BlockTableError, DeviceError, RowError, TensorError
from layout_core.protocols import Layer, PrefixIndex
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


@dataclass(slots=True, eq=False, weakref_slot=True)
class TorchBatch:
    """A step on the device. :func:`update` refills it in place; nothing else changes it."""

    plan: StepPlan
    tables: BlockTables  #: asked for its version before every use
    case: KernelCase  #: what the kernel was chosen for
    kernel: str  #: name of the kernel that runs
    notes: tuple[str, ...]  #: what this layout or dtype costs the kernel, in sentences
    tensors: StepTensors
    staging: Staging  #: where ``tensors`` lie
    geometries: dict[PageGeometry, int]  #: of the group's layers, numbered
    moves: Moves
    written: Any  #: what ``moves`` planned
    work: Any  #: what the kernel planned
    run: Kernel
    number: int = 0  #: by which operators find it; see :mod:`.ops`

    @property
    def resolved(self) -> ResolvedLayout:
        """The plan of the pools that it fits."""
        return self.case.resolved

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self.case.num_heads

    @property
    def capturable(self) -> bool:
        """Whether a step may be captured in a CUDA graph, to be replayed after updates."""
        return self.run.capturable


def write(
    moves: Moves,
    pool: TorchPool,
    layer: Layer,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
) -> TorchPool:
    """Store K and V at slots, in place and bit for bit.

    Slots are distinct but for −1, which is skipped; on a GPU the kernel skips it, and nothing
    waits for the device.

    Args:
        moves: how bytes are moved on the pool's device.
        pool: written in place.
        layer: index, name or view.
        key: ``[T, Hkv, D]`` of the pool's dtype, any strides.
        value: ``[T, Hkv, Dv]`` of the pool's dtype, any strides.
        slots: ``[T]``, int32 or int64; in ``[0, num_blocks * block_size)``, or −1.

    Raises:
        TensorError: shapes, dtypes or devices that do not fit.
        BlockTableError: a slot out of range. On the CPU; a GPU's kernel skips it, as the host
            cannot look without waiting.
    """
    tensors = pool.layers[find_layer(pool.resolved, layer)]
    view = tensors.view
    if slots.dim() != 1 or slots.dtype not in (torch.int64, torch.int32):
        raise TensorError(
            f"slots: layer {view.name!r} expects int64 or int32 [T], got {slots.dtype} "
            f"{list(slots.shape)}"
        )
    _check_key_value(tensors, key, value, slots.shape[0])
    _check_device("slots", pool.device, slots)
    if slots.device.type == "cpu" and slots.numel():
        limit = view.shape[0] * view.block_size
        least, most = (int(bound) for bound in torch.aminmax(slots))
        if least < PAD_SLOT or most >= limit:
            raise BlockTableError(
                f"slots: layer {view.name!r} expects slots in [0, {limit}) or {PAD_SLOT}, got "
                f"{least if least < PAD_SLOT else most}"
            )
    moves.write(tensors, key, value, slots)
    return pool


def _check_device(name: str, device: torch.device, tensor: torch.Tensor) -> None:
    if tensor.device != device:
        raise TensorError(f"{name}: expected on {device}, where the pool is, got {tensor.device}")


def _check_key_value(
    layer: LayerTensors, key: torch.Tensor, value: torch.Tensor, tokens: int
) -> None:
    check_key_value(
        layer.view, tokens, key.shape, core_dtype(key.dtype), value.shape, core_dtype(value.dtype)
    )
    _check_device("key", layer.storage.device, key)
    _check_device("value", layer.storage.device, value)


def copy_blocks(
    moves: Moves, pool: TorchPool, pairs: Sequence[tuple[int, int]], *, group: int = 0
) -> TorchPool:
    """Copy whole blocks ``(source, destination)`` in every layer of a group, bit for bit.

    Cells are copied; padding after a page is left as it is.

    Raises:
        BlockTableError: see :func:`layout_core.serving.check_copy_pairs`.
    """
    sources, destinations = check_copy_pairs(pool.resolved, pairs, group)
    if sources:
        layers = [pool.layers[index] for index in pool.resolved.group_layers(group)]
        moves.copy_blocks(layers, sources, destinations)
    return pool


def clear(pool: TorchPool, prefix_index: PrefixIndex | None = None) -> TorchPool:
    """Zero a pool where it lies; see ``Engine.clear``."""
    if prefix_index is not None:
        prefix_index.reset_prefix_cache()
    pool.storage.zero_()
    return pool


def prepare(
    toolkit: Toolkit,
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
        DeviceError: a CUDA graph is being captured.
    """
    case = kernel_case(
        resolved,
        rows,
        tables,
        visibility=visibility,
        num_heads=num_heads,
        device=device,
        group=group,
        spans=spans,
        bucket=bucket,
    )
    run = select_kernel(kernel, case, toolkit)
    geometries: dict[PageGeometry, int] = {}
    for view in case.layers:
        geometries.setdefault(page_geometry(view), len(geometries))
    values = step_values(case.step)
    staging = Staging(
        {name: (numbers.typecode, shape) for name, (numbers, shape) in values.items()}, device
    )
    staging.fill(values)
    tensors = StepTensors(**staging.tables)
    batch = TorchBatch(
        plan=case.step,
        tables=tables,
        case=case,
        kernel=run.name,
        notes=run.notes(case),
        tensors=tensors,
        staging=staging,
        geometries=geometries,
        moves=toolkit.moves,
        written=toolkit.moves.plan(case.step, tensors, geometries),
        work=run.plan(case, tensors, geometries),
        run=run,
    )
    batch.number = ops.register(batch)
    return batch


def kernel_case(
    resolved: ResolvedLayout,
    rows: Sequence[PagedAttentionRow],
    tables: BlockTables,
    *,
    visibility: Visibility,
    num_heads: int,
    device: torch.device,
    group: int = 0,
    spans: Sequence[Spans | None] | None = None,
    bucket: Bucket | None = None,
) -> KernelCase:
    """A step as a kernel is asked to serve it; raises as :func:`prepare` does."""
    check_servable(resolved)
    check_num_heads(resolved, group, num_heads)
    views = tuple(resolved.layers[index] for index in resolved.group_layers(group))
    plan = plan_step(
        resolved, rows, tables, visibility=visibility, group=group, spans=spans, bucket=bucket
    )
    return KernelCase(device, num_heads, views, plan)


def step_values(plan: StepPlan) -> dict[str, tuple[array[int], tuple[int, ...]]]:
    """The plan's arrays and their shapes, by the names of :class:`StepTensors`."""
    values: dict[str, tuple[array[int], tuple[int, ...]]] = {}
    for name in ("query_lens", "seq_lens", "kv_starts", "cu_seqlens", "lo", "hi", "slots"):
        numbers: array[int] = getattr(plan, name)
        values[name] = (numbers, (len(numbers),))
    values["block_table"] = (plan.block_table, (plan.num_rows, plan.max_blocks))
    return values


def update(batch: TorchBatch, rows: Sequence[PagedAttentionRow], tables: BlockTables) -> TorchBatch:
    """Refill a batch in place, with the same shapes, visibility and spans.

    Unchanged rows under an unchanged version cost one comparison. Without a bucket the rows
    and tokens must be as many as before, and no row may need more blocks than the widest did.
    Where :attr:`TorchBatch.capturable`, everything that the kernel reads keeps its address.

    Raises:
        RowError: more tokens, rows or blocks than the batch has room for.
        RowError, BlockTableError, VisibilityError: see :func:`layout_core.step.plan_step`.
        UnsupportedError: the kernel cannot serve the new rows.
        DeviceError: a CUDA graph is being captured.
        The batch is unchanged where it raises.
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
    room = batch.tensors.block_table.shape[1]
    if plan.max_blocks > room:
        raise RowError(
            f"rows: update has room for {room} blocks in each row, a row needs "
            f"{plan.max_blocks}; prepare with a bucket to leave room"
        )
    case = replace(batch.case, step=plan)
    batch.staging.fill(step_values(plan))
    batch.plan, batch.case, batch.tables = plan, case, tables
    batch.written = batch.moves.update(batch.written, plan, batch.tensors, batch.geometries)
    batch.work = batch.run.update(batch.work, case, batch.tensors, batch.geometries)
    return batch


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
        Nothing was written where it raises; but in a model that ``torch.compile`` made, a wrong
        query is found after K and V were stored, as the two are operators of their own there.
    """
    if torch.compiler.is_compiling():
        return _compiled(
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
        ), pool
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
    check_same_plan(pool.resolved, batch.resolved)
    tensors = pool.layers[find_layer(pool.resolved, layer)]
    _check_read(tensors, query, batch, softmax_scale, softcap, k_scale, v_scale)
    _check_pair(tensors.view, key, value)
    if key is not None and value is not None:
        _store(tensors, key, value, batch)
    return _attend(
        tensors,
        query,
        batch,
        softmax_scale,
        softcap,
        k_scale,
        v_scale,
        return_lse=return_lse,
    )


def _compiled(
    pool: TorchPool,
    layer: Layer,
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    batch: TorchBatch,
    *,
    softmax_scale: float | None,
    softcap: float,
    k_scale: float,
    v_scale: float,
) -> torch.Tensor:
    """The same as operators; what depends on the step is checked when they run."""
    check_same_plan(pool.resolved, batch.resolved)
    index = find_layer(pool.resolved, layer)
    view = pool.resolved.layers[index]
    _check_pair(view, key, value)
    storage, places, number = pool.storage, pool.places, batch.number
    if key is not None and value is not None:
        ops.write_kv_(storage, places, key, value, number, index)
    output: torch.Tensor = ops.paged_attention(
        storage,
        places,
        query,
        number,
        index,
        view.head_size_v,
        softmax_scale,
        softcap,
        k_scale,
        v_scale,
    )
    return output


def _check_pair(view: LayerView, key: torch.Tensor | None, value: torch.Tensor | None) -> None:
    if (key is None) != (value is None):
        missing = "key" if key is None else "value"
        raise TensorError(
            f"{missing}: layer {view.name!r} expects key and value, or neither to only read; "
            f"got {missing}=None alone"
        )


def store_in(
    layer: LayerTensors, key: torch.Tensor, value: torch.Tensor, batch: TorchBatch
) -> None:
    """The writing half of :func:`forward_paged`, with its checks."""
    _check_step(layer, batch)
    _store(layer, key, value, batch)


def attend_in(
    layer: LayerTensors,
    query: torch.Tensor,
    batch: TorchBatch,
    softmax_scale: float | None,
    softcap: float,
    k_scale: float,
    v_scale: float,
) -> torch.Tensor:
    """The reading half of :func:`forward_paged`, with its checks."""
    _check_read(layer, query, batch, softmax_scale, softcap, k_scale, v_scale)
    return _attend(layer, query, batch, softmax_scale, softcap, k_scale, v_scale)[0]


def _check_step(layer: LayerTensors, batch: TorchBatch) -> None:
    check_fresh(batch.plan, batch.tables.version)
    check_batch_layer(layer.view, batch.plan.group)
    device = layer.storage.device
    if not batch.capturable and capturing(device):
        raise DeviceError(
            f"forward_paged: a CUDA graph is being captured, and kernel {batch.kernel!r} follows "
            "the rows of one step; kernel='triton' can be captured"
        )


def _check_read(
    layer: LayerTensors,
    query: torch.Tensor,
    batch: TorchBatch,
    softmax_scale: float | None,
    softcap: float,
    k_scale: float,
    v_scale: float,
) -> None:
    _check_step(layer, batch)
    check_scalars(softmax_scale, softcap, k_scale, v_scale)
    view, dtype = layer.view, core_dtype(query.dtype)
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
    _check_device("query", layer.storage.device, query)


def _store(layer: LayerTensors, key: torch.Tensor, value: torch.Tensor, batch: TorchBatch) -> None:
    _check_key_value(layer, key, value, batch.plan.num_tokens)
    geometry = batch.geometries[layer.geometry]
    batch.moves.store(layer, key, value, batch.written, geometry)


def _attend(
    layer: LayerTensors,
    query: torch.Tensor,
    batch: TorchBatch,
    softmax_scale: float | None,
    softcap: float,
    k_scale: float,
    v_scale: float,
    *,
    return_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    scale = layer.view.head_size**-0.5 if softmax_scale is None else softmax_scale
    return batch.run.run(
        layer,
        query.detach(),
        batch.work,
        batch.tensors,
        batch.geometries[layer.geometry],
        Scalars(scale, softcap, k_scale, v_scale),
        return_lse=return_lse,
    )
