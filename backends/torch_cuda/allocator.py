"""The pool: one zeroed flat byte tensor, and typed strided views of each layer on it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Final

import torch

from backends.torch_cuda.dtypes import as_bits, torch_dtype
from backends.torch_cuda.paging import PageGeometry, page_geometry
from backends.torch_cuda.staging import integers
from backends.triton_kernels.configs import alignment_unit
from layout_core.dtypes import DType
from layout_core.errors import PoolError
from layout_core.serving import check_servable
from layout_core.views import LayerView, ResolvedLayout

PLACE_WIDTH: Final = 4

BASE_ALIGNMENT: Final = 16
"""Bytes that a pool's address is a multiple of, so that kernels may load vectors."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerTensors:
    """Views of one layer; all share the pool's memory."""

    view: LayerView
    geometry: PageGeometry
    key: torch.Tensor  #: [B, H, N, D]
    value: torch.Tensor  #: [B, H, N, Dv]
    content: torch.Tensor  #: [B, H, N, D + Dv] integers: whole cells, to be moved
    cells: torch.Tensor  #: [rows, D + Dv] integers; see ``PageGeometry.cell_steps``
    key_tokens: torch.Tensor  #: [rows, H, D] integers; see ``PageGeometry.token_steps``
    value_tokens: torch.Tensor  #: [rows, H, Dv] integers
    storage: torch.Tensor  #: uint8 [size_bytes]: the pool
    place: torch.Tensor  #: int64 [4]: offset and strides of B, H, N in units of ``unit``
    unit: int  #: elements; equal in all layers of a dtype


@dataclass(frozen=True, slots=True, eq=False)
class TorchPool:
    """The allocation of a plan. It is written in place; nothing consumes it."""

    resolved: ResolvedLayout
    storage: torch.Tensor  #: uint8 [size_bytes]
    places: torch.Tensor  #: int64 [layers, 4]: see ``LayerTensors.place``
    layers: tuple[LayerTensors, ...]  #: in the order of ``resolved.layers``

    @property
    def device(self) -> torch.device:
        return self.storage.device

    @property
    def nbytes(self) -> int:
        """Bytes of the whole allocation."""
        return self.resolved.size_bytes


def allocate(resolved: ResolvedLayout, device: torch.device) -> TorchPool:
    """One zeroed allocation of exactly ``resolved.size_bytes`` bytes.

    Raises:
        UnsupportedError: a layer that no engine, or no typed tensor, can serve; nothing was
            allocated.
    """
    geometries = _geometries(resolved)
    storage = torch.zeros(resolved.size_bytes, dtype=torch.uint8, device=device)
    return _pool(resolved, geometries, storage)


def pool_on(resolved: ResolvedLayout, storage: torch.Tensor) -> TorchPool:
    """A pool on memory that somebody else allocated; it lives as long as ``storage`` does.

    Args:
        resolved: the plan.
        storage: uint8 ``[size_bytes]``, contiguous, at an address that is a multiple of 16.

    Raises:
        PoolError: memory that is not that.
        UnsupportedError: as :func:`allocate`.
    """
    aligned = storage.data_ptr() % BASE_ALIGNMENT == 0
    if (
        storage.dtype != torch.uint8
        or tuple(storage.shape) != (resolved.size_bytes,)
        or not storage.is_contiguous()
        or not aligned
    ):
        raise PoolError(
            f"storage: expected contiguous uint8 [{resolved.size_bytes}] at a multiple of "
            f"{BASE_ALIGNMENT}, got {storage.dtype} {list(storage.shape)}"
            f"{'' if aligned else ' at another address'}"
        )
    return _pool(resolved, _geometries(resolved), storage)


def load_bytes(resolved: ResolvedLayout, data: bytes, device: torch.device) -> TorchPool:
    """A pool holding a copy of ``data``, the whole allocation in address order.

    Raises:
        PoolError: ``data`` is not ``resolved.size_bytes`` long.
        UnsupportedError: as :func:`allocate`.
    """
    if len(data) != resolved.size_bytes:
        raise PoolError(
            f"data: expected the {resolved.size_bytes} bytes of the plan, got {len(data)}"
        )
    geometries = _geometries(resolved)
    # bytearray: torch wants a writable buffer, and the pool must own its memory
    storage = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0)
    storage = storage.to(device=device, dtype=torch.uint8, copy=device.type == "cpu")
    return _pool(resolved, geometries, storage)


def pool_bytes(pool: TorchPool) -> bytes:
    """The whole allocation, in address order."""
    return bytes(pool.storage.cpu().numpy())


def _geometries(resolved: ResolvedLayout) -> tuple[PageGeometry, ...]:
    check_servable(resolved)
    for view in resolved.layers:
        torch_dtype(view.dtype)
    return tuple(page_geometry(view) for view in resolved.layers)


def _pool(
    resolved: ResolvedLayout, geometries: tuple[PageGeometry, ...], storage: torch.Tensor
) -> TorchPool:
    units = place_units(resolved)
    rows = array("q")
    for view in resolved.layers:
        rows.extend(place_of(view, units[view.dtype]))
    places = integers(rows, storage.device).view(-1, PLACE_WIDTH)
    layers = tuple(
        layer_tensors(view, geometry, storage, places[index], units[view.dtype])
        for index, (view, geometry) in enumerate(zip(resolved.layers, geometries, strict=True))
    )
    return TorchPool(resolved, storage, places, layers)


def place_units(resolved: ResolvedLayout) -> dict[DType, int]:
    """For each dtype the elements that divide all places of its layers: what a load may take."""
    numbers: dict[DType, list[int]] = {}
    for view in resolved.layers:
        size = view.dtype.itemsize
        numbers.setdefault(view.dtype, []).extend(n // size for n in _place_bytes(view))
    return {d: alignment_unit(d.itemsize, *values) for d, values in numbers.items()}


def place_of(view: LayerView, unit: int) -> tuple[int, ...]:
    """Offset and strides of B, H, N in units; a stride along an axis of size 1 is 0."""
    return tuple(number // (view.dtype.itemsize * unit) for number in _place_bytes(view))


def _place_bytes(view: LayerView) -> tuple[int, int, int, int]:
    b, h, n = (s if size > 1 else 0 for size, s in zip(view.shape[:3], view.strides[:3]))
    return view.offset, b, h, n


def layer_tensors(
    view: LayerView,
    geometry: PageGeometry,
    storage: torch.Tensor,
    place: torch.Tensor,
    unit: int,
) -> LayerTensors:
    """The views of one layer on a pool's memory."""
    size = view.dtype.itemsize
    whole = storage.numel() // size * size  # a pool of mixed dtypes may end in a part of one
    flat = storage[:whole].view(torch_dtype(view.dtype))
    start = view.offset // size
    blocks, heads, tokens, _ = view.shape
    key_size, value_size = view.head_size, view.head_size_v
    content_size = key_size + value_size
    page = (*(stride // size for stride in view.strides[:3]), 1)
    bits = as_bits(flat)
    rows, row = geometry.token_rows, (geometry.token_pitch, geometry.head_stride, 1)
    return LayerTensors(
        view=view,
        geometry=geometry,
        key=flat.as_strided((blocks, heads, tokens, key_size), page, start),
        value=flat.as_strided((blocks, heads, tokens, value_size), page, start + key_size),
        content=bits.as_strided((blocks, heads, tokens, content_size), page, start),
        cells=bits.as_strided((geometry.cell_rows, content_size), (geometry.cell_pitch, 1), start),
        key_tokens=bits.as_strided((rows, heads, key_size), row, start),
        value_tokens=bits.as_strided((rows, heads, value_size), row, start + key_size),
        storage=storage,
        place=place,
        unit=unit,
    )
