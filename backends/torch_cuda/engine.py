"""The engine: the functions of this package behind the ``Engine`` protocol, on one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from backends.torch_cuda import allocator, dtypes, paged
from backends.torch_cuda.allocator import TorchPool
from backends.torch_cuda.dense import TorchAttentionBackend
from backends.torch_cuda.device import DEFAULT_DEVICE, resolve_device
from backends.torch_cuda.kernels.select import Toolkit, kernel_names, toolkit_for
from backends.torch_cuda.paged import TorchBatch
from layout_core.attention import AttentionBackend
from layout_core.dtypes import DType
from layout_core.protocols import Layer, PrefixIndex
from layout_core.rows import BlockTables, Bucket, PagedAttentionRow
from layout_core.views import ResolvedLayout
from layout_core.visibility import Spans, Visibility


def create_engine(device: str | None = None) -> TorchEngine:
    """The torch engine on ``cpu`` (the default), ``cuda`` or ``cuda:N``.

    Raises:
        DeviceError: the device is not there.
        MissingPackageError: a CUDA device, and Triton is not installed.
    """
    return TorchEngine(device)


class TorchEngine:
    """Implements :class:`layout_core.protocols.Engine`; holds its device and its kernels.

    Args:
        device: ``cpu`` (the default), ``cuda`` or ``cuda:N``.
        toolkit: kernels to work with instead of the device's own.

    Raises:
        DeviceError: the device is not there.
        MissingPackageError: a CUDA device, and Triton is not installed.
    """

    def __init__(self, device: str | None = None, *, toolkit: Toolkit | None = None) -> None:
        self._device = resolve_device(device)
        self._asked = DEFAULT_DEVICE if device is None else device
        self._toolkit = toolkit_for(self._device) if toolkit is None else toolkit

    @property
    def name(self) -> str:
        """The backend flag."""
        return "torch_cuda"

    @property
    def device(self) -> str:
        """``cpu``, ``cuda`` or ``cuda:N``: as it was asked for."""
        return self._asked

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names that ``prepare(kernel=...)`` accepts beside ``auto``."""
        return kernel_names(self._toolkit)

    @property
    def toolkit(self) -> Toolkit:
        """What the engine works with; see :mod:`backends.torch_cuda.kernels.select`."""
        return self._toolkit

    def allocate(self, resolved: ResolvedLayout) -> TorchPool:
        """One zeroed allocation; see :func:`backends.torch_cuda.allocator.allocate`."""
        return allocator.allocate(resolved, self._device)

    def write(
        self,
        pool: TorchPool,
        layer: Layer,
        key: torch.Tensor,
        value: torch.Tensor,
        slots: torch.Tensor,
    ) -> TorchPool:
        """Store K and V at slots; see :func:`backends.torch_cuda.paged.write`."""
        return paged.write(self._toolkit.moves, pool, layer, key, value, slots)

    def prepare(
        self,
        resolved: ResolvedLayout,
        rows: Sequence[PagedAttentionRow],
        tables: BlockTables,
        *,
        visibility: Visibility,
        num_heads: int,
        group: int = 0,
        spans: Sequence[Spans | None] | None = None,
        kernel: str = "auto",
        bucket: Bucket | None = None,
    ) -> TorchBatch:
        """A step on the device; see :func:`backends.torch_cuda.paged.prepare`."""
        return paged.prepare(
            self._toolkit,
            resolved,
            rows,
            tables,
            visibility=visibility,
            num_heads=num_heads,
            device=self._device,
            group=group,
            spans=spans,
            kernel=kernel,
            bucket=bucket,
        )

    def update(
        self, batch: TorchBatch, rows: Sequence[PagedAttentionRow], tables: BlockTables
    ) -> TorchBatch:
        """Refill a batch in place; see :func:`backends.torch_cuda.paged.update`."""
        return paged.update(batch, rows, tables)

    def forward_paged(
        self,
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
        """Write, then attend; see :func:`backends.torch_cuda.paged.forward_paged`."""
        return paged.forward_paged(
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

    def copy_blocks(
        self, pool: TorchPool, pairs: Sequence[tuple[int, int]], *, group: int = 0
    ) -> TorchPool:
        """Copy whole blocks; see :func:`backends.torch_cuda.paged.copy_blocks`."""
        return paged.copy_blocks(self._toolkit.moves, pool, pairs, group=group)

    def clear(self, pool: TorchPool, *, prefix_index: PrefixIndex | None = None) -> TorchPool:
        """Zero a pool where it lies; see :func:`backends.torch_cuda.paged.clear`."""
        return paged.clear(pool, prefix_index)

    def pool_bytes(self, pool: TorchPool) -> bytes:
        """The whole allocation, in address order."""
        return allocator.pool_bytes(pool)

    def load_bytes(self, resolved: ResolvedLayout, data: bytes) -> TorchPool:
        """A pool holding ``data``; see :func:`backends.torch_cuda.allocator.load_bytes`."""
        return allocator.load_bytes(resolved, data, self._device)

    def from_numpy(self, array: Any) -> torch.Tensor:
        """A tensor with a copy of a NumPy array, bit for bit."""
        return dtypes.from_numpy(array, self._device)

    def to_numpy(self, array: torch.Tensor) -> Any:
        """A NumPy array with a copy of a tensor, bit for bit."""
        return dtypes.to_numpy(array)

    def quantize(
        self, x: torch.Tensor, scale: float, dtype: torch.dtype | DType | str
    ) -> torch.Tensor:
        """``x / scale`` as an 8-bit float; see :func:`backends.torch_cuda.dtypes.quantize`."""
        return dtypes.quantize(x, scale, dtype)

    def synchronize(self, pool: TorchPool) -> None:
        """Wait until everything that was issued on the pool is done."""
        if pool.device.type == "cuda":
            torch.cuda.synchronize(pool.device)

    def attention_backend(self) -> type[AttentionBackend]:
        """The class that states what the engine can do."""
        return TorchAttentionBackend
