"""The pool: one zeroed flat byte tensor, and typed strided views of each layer on it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from backends.torch_cuda.dtypes import as_bits, torch_dtype
from backends.torch_cuda.paging import PageGeometry, page_geometry
from layout_core.errors import PoolError
from layout_core.serving import check_servable
from layout_core.views import LayerView, ResolvedLayout


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


@dataclass(frozen=True, slots=True, eq=False)
class TorchPool:
    """The allocation of a plan. It is written in place; nothing consumes it."""

    resolved: ResolvedLayout
    storage: torch.Tensor  #: uint8 [size_bytes]
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
    layers = tuple(
        _layer_tensors(view, geometry, storage)
        for view, geometry in zip(resolved.layers, geometries, strict=True)
    )
    return TorchPool(resolved, storage, layers)


def _layer_tensors(view: LayerView, geometry: PageGeometry, storage: torch.Tensor) -> LayerTensors:
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
    )
