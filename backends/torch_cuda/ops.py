"""The engine as torch operators, for ``torch.compile``: two nodes of a graph, and no break.

``pagestride::write_kv_`` changes the pool's memory, which its schema says; ``paged_attention``
reads it. Inside a compiled function the engine calls these; elsewhere it calls what they call,
which saves the dispatcher's time.

A batch is no tensor. It travels as a number, by which :data:`_BATCHES` finds it for as long as
somebody holds it. So a compiled program never depends on what a batch holds: rows, tables and
versions may change under it, and are checked when the operator runs.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch

from backends.torch_cuda.allocator import LayerTensors, layer_tensors, place_units
from backends.torch_cuda.paging import page_geometry
from layout_core.errors import PoolError, StaleBatchError

if TYPE_CHECKING:
    from backends.torch_cuda.paged import TorchBatch

_BATCHES: WeakValueDictionary[int, TorchBatch] = WeakValueDictionary()
"""Batches that are alive, by number. Nothing is decided here, and nothing is kept alive."""

_numbers = count(1)


def register(batch: TorchBatch) -> int:
    """A number for a batch; it is never given again."""
    number = next(_numbers)
    _BATCHES[number] = batch
    return number


def find(number: int) -> TorchBatch:
    """The batch of a number.

    Raises:
        StaleBatchError: nobody holds it any more.
    """
    batch = _BATCHES.get(number)
    if batch is None:
        raise StaleBatchError(
            f"batch: number {number} is gone; keep a batch for as long as a compiled function "
            "may be called with it"
        )
    return batch


def _layer(
    storage: torch.Tensor, places: torch.Tensor, batch: TorchBatch, index: int
) -> LayerTensors:
    """The layer on the memory that came: a compiler may have put a copy in the pool's place."""
    resolved = batch.resolved
    if storage.numel() != resolved.size_bytes:
        raise PoolError(
            f"storage: the batch was prepared for a pool of {resolved.size_bytes} bytes, got "
            f"{storage.numel()}"
        )
    view = resolved.layers[index]
    unit = place_units(resolved)[view.dtype]
    return layer_tensors(view, page_geometry(view), storage, places[index], unit)


@torch.library.custom_op("pagestride::write_kv_", mutates_args=("storage",))
def write_kv_(
    storage: torch.Tensor,
    places: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    batch: int,
    layer: int,
) -> None:
    """Store a step's K and V in the pool that ``storage`` is the memory of."""
    from backends.torch_cuda import paged

    step = find(batch)
    paged.store_in(_layer(storage, places, step, layer), key, value, step)


@torch.library.custom_op("pagestride::paged_attention", mutates_args=())
def paged_attention(
    storage: torch.Tensor,
    places: torch.Tensor,
    query: torch.Tensor,
    batch: int,
    layer: int,
    value_size: int,
    softmax_scale: float | None,
    softcap: float,
    k_scale: float,
    v_scale: float,
) -> torch.Tensor:
    """Attend over a step's pages; ``[T, Hq, value_size]``."""
    from backends.torch_cuda import paged

    step = find(batch)
    tensors = _layer(storage, places, step, layer)
    return paged.attend_in(tensors, query, step, softmax_scale, softcap, k_scale, v_scale)


@write_kv_.register_fake
def _write_kv_shape(
    storage: torch.Tensor,
    places: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    batch: int,
    layer: int,
) -> None:
    return None


@paged_attention.register_fake
def _paged_attention_shape(
    storage: torch.Tensor,
    places: torch.Tensor,
    query: torch.Tensor,
    batch: int,
    layer: int,
    value_size: int,
    softmax_scale: float | None,
    softcap: float,
    k_scale: float,
    v_scale: float,
) -> torch.Tensor:
    return query.new_empty((query.shape[0], query.shape[1], value_size))
