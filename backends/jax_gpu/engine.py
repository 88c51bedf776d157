"""The engine: the functions that users call, outside of JAX programs and inside.

Outside, each call runs a compiled program of its own, and what changes the pool consumes it.
Inside ``jit``, ``scan`` or ``shard_map`` the same functions are plain and pure: the user's
program decides about donation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from backends.jax_gpu import allocator, dtypes, paged, sharing, writing
from backends.jax_gpu.allocator import JaxPool, host_view
from backends.jax_gpu.batch import JaxBatch, make_batch, update_batch
from backends.jax_gpu.dense import JaxAttentionBackend
from backends.jax_gpu.device import find_device
from backends.jax_gpu.donation import Donation
from backends.jax_gpu.kernels.select import Toolkit, kernel_names, toolkit_for
from backends.jax_gpu.layers import AnyLayer
from backends.jax_gpu.paging import PoolPlan
from backends.jax_gpu.sharing import Loan
from layout_core.attention import AttentionBackend
from layout_core.errors import TensorError
from layout_core.protocols import PrefixIndex
from layout_core.rows import BlockTables, Bucket, PagedAttentionRow
from layout_core.serving import check_servable
from layout_core.views import ResolvedLayout
from layout_core.visibility import Spans, Visibility

NAME = "jax_gpu"


def create_engine(device: str | None = None, *, strict_donation: bool = False) -> JaxEngine:
    """The JAX engine on a device.

    Args:
        device: ``cpu``, ``cuda`` or ``cuda:N``; ``None`` is ``cpu``.
        strict_donation: raise where a call would copy the pool instead of changing it in
            place. Costs one more compilation for each program.

    Raises:
        DeviceError: the device is not there.
        MissingPackageError: a GPU, and what its kernels need is not installed.
    """
    name, found = find_device(device)
    return JaxEngine(name, found, strict_donation)


class JaxEngine:
    """``Engine`` of :mod:`layout_core.protocols` in JAX.

    ``layer`` may also be a traced integer, for a ``scan`` over layers, where all layers that it
    can mean have equal shapes.
    """

    def __init__(
        self,
        name: str,
        device: jax.Device,
        strict_donation: bool = False,
        toolkit: Toolkit | None = None,
    ) -> None:
        self._device_name = name
        self._device = device
        self._toolkit = toolkit_for(device) if toolkit is None else toolkit
        self._donation = Donation(strict_donation)
        self._plan: PoolPlan | None = None

    @property
    def name(self) -> str:
        """``jax_gpu``."""
        return NAME

    @property
    def device(self) -> str:
        """``cpu`` or ``cuda``, with an index where one was asked for."""
        return self._device_name

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names that ``prepare(kernel=...)`` accepts beside ``auto``."""
        return kernel_names(self._toolkit)

    def __repr__(self) -> str:
        return f"JaxEngine(device={self._device_name!r}, strict_donation={self._donation.strict})"

    def _plan_of(self, resolved: ResolvedLayout) -> PoolPlan:
        """The plan as it was addressed last, or anew: a pool and its batches share one, which is
        compared by identity at every call of a program.
        """
        plan = self._plan
        if plan is None or plan.resolved is not resolved:
            check_servable(resolved)
            plan = self._plan = PoolPlan(resolved)
        return plan

    # The allocation.

    def allocate(self, resolved: ResolvedLayout) -> JaxPool:
        """One zeroed allocation of ``resolved.size_bytes``; see :func:`allocator.allocate`."""
        return allocator.allocate(resolved, self._device, self._plan_of(resolved))

    def load_bytes(self, resolved: ResolvedLayout, data: bytes) -> JaxPool:
        """A pool that holds ``data``; see :func:`allocator.load_bytes`."""
        return allocator.load_bytes(resolved, data, self._device, self._plan_of(resolved))

    def pool_bytes(self, pool: JaxPool) -> bytes:
        """The whole allocation, in address order."""
        return allocator.pool_bytes(pool)

    def lend(self, pool: JaxPool) -> Loan:
        """Lend the pool's memory to another framework by DLPack; consumes the pool.

        Raises:
            PoolError: see :func:`sharing.lend`.
        """
        return sharing.lend(pool)

    def import_pool(
        self, resolved: ResolvedLayout, exporter: Any, *, copy: bool = False
    ) -> JaxPool:
        """A pool with the bytes of another framework's memory; see :func:`sharing.import_pool`.

        Raises:
            PoolError: ``copy`` is false, or the memory is not of the plan's size and type.
        """
        return sharing.import_pool(resolved, exporter, self._device, copy=copy)

    def clear(self, pool: JaxPool, *, prefix_index: PrefixIndex | None = None) -> JaxPool:
        """A pool of zeros in the memory of this one, which is consumed; see ``Engine.clear``.

        Raises:
            PoolError: as :meth:`write`.
        """
        return writing.clear(pool, prefix_index, self._donation)

    def synchronize(self, pool: JaxPool) -> None:
        """Wait until the program that returned ``pool`` is done."""
        pool.words.block_until_ready()

    def from_numpy(self, array: Any) -> jax.Array:
        """A device array with a copy of a NumPy array, ml_dtypes' types bit for bit.

        JAX holds no 64-bit types by default: integers that fit come as 32 bits.

        Raises:
            TensorError: float64, or integers that do not fit 32 bits.
        """
        host = np.asarray(array)
        if host.dtype == np.float64 or host.dtype.kind == "c":
            raise TensorError(
                f"array: expected at most 32-bit elements, got {host.dtype}; cast it first"
            )
        if host.dtype.kind in "iu" and host.dtype.itemsize == 8:
            narrow = np.int32 if host.dtype.kind == "i" else np.uint32
            limits = np.iinfo(narrow)
            if host.size and not (limits.min <= host.min() and host.max() <= limits.max):
                raise TensorError(f"array: {host.dtype} values do not fit {np.dtype(narrow)}")
            host = host.astype(narrow)
        # the copy is ours alone, so JAX may keep it instead of making another
        array_on_device: jax.Array = jax.device_put(host.copy(), self._device)
        return array_on_device

    def to_numpy(self, array: jax.Array) -> Any:
        """A NumPy array with a copy of a device array; ml_dtypes' types for the narrow ones."""
        return host_view(array).copy()

    def quantize(self, x: jax.Array, scale: Any, dtype: Any) -> jax.Array:
        """``x / scale`` as an 8-bit float; see :func:`backends.jax_gpu.dtypes.quantize`."""
        return dtypes.quantize(x, scale, dtype)

    # Writing and copying.

    def write(self, pool: JaxPool, layer: AnyLayer, key: Any, value: Any, slots: Any) -> JaxPool:
        """Store ``key [T, Hkv, D]`` and ``value [T, Hkv, Dv]`` at ``slots [T]``.

        The pool is consumed, except inside a program. Slots are distinct integers; −1 is
        skipped. A slot past the layer's blocks raises where ``slots`` is a NumPy array or a
        sequence; in a device array, which is not read back, it is skipped too.

        Raises:
            TensorError: wrong shapes or dtypes; nothing is cast.
            BlockTableError: a slot out of range.
            PoolError: a pool that was consumed; in strict mode one that would be copied.
        """
        return writing.write(pool, layer, key, value, slots, self._donation, self._toolkit.moves)

    def copy_blocks(
        self, pool: JaxPool, pairs: Sequence[tuple[int, int]], *, group: int = 0
    ) -> JaxPool:
        """Copy whole blocks ``(src, dst)`` in every layer of a group; consumes the pool.

        Raises:
            BlockTableError: an id out of range, a destination that repeats, is also a source,
                or is the null block.
            PoolError: as :meth:`write`.
        """
        return writing.copy_blocks(pool, pairs, group, self._donation, self._toolkit.moves)

    # Attention.

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
    ) -> JaxBatch:
        """Everything a step needs on the device, for one group's layers with one visibility.

        A pytree: pass it to your programs. With a ``bucket``, other lengths in it compile no
        new program. ``kernel`` is ``auto`` or one of :attr:`kernels`.

        Raises:
            RowError, BlockTableError, VisibilityError: see :func:`layout_core.step.plan_step`.
            TensorError: ``num_heads`` is no multiple of a layer's KV heads.
            UnsupportedError: the kernel does not serve this.
        """
        return make_batch(
            resolved,
            rows,
            tables,
            self._device,
            self._toolkit,
            visibility=visibility,
            num_heads=num_heads,
            group=group,
            spans=spans,
            kernel=kernel,
            bucket=bucket,
            plan=self._plan_of(resolved),
        )

    def update(
        self, batch: JaxBatch, rows: Sequence[PagedAttentionRow], tables: BlockTables
    ) -> JaxBatch:
        """A batch of the same shapes with new data; the same batch where nothing changed."""
        return update_batch(batch, rows, tables, self._device)

    def forward_paged(
        self,
        pool: JaxPool,
        layer: AnyLayer,
        query: Any,
        key: Any,
        value: Any,
        batch: JaxBatch,
        *,
        softmax_scale: float | None = None,
        softcap: float = 0.0,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> tuple[jax.Array, JaxPool]:
        """Write K/V at the rows' positions, then attend over each row's pages.

        Args:
            query: ``[T, Hq, D]`` in float32, float16 or bfloat16; rows packed one after another.
            key, value: ``[T, Hkv, D]`` and ``[T, Hkv, Dv]`` in the pool's dtype, or both
                ``None``: nothing is written, and the pool is not consumed.

        Returns:
            ``(output [T, Hq, Dv]`` in the query's dtype, ``pool)``.

        Raises:
            StaleBatchError: the block tables changed since the batch was prepared.
            TensorError: wrong shapes, dtypes or scalars.
            PoolError: a consumed pool, another plan's, another group's.
        """
        return paged.forward_paged(
            pool,
            layer,
            query,
            key,
            value,
            batch,
            self._donation,
            softmax_scale=softmax_scale,
            softcap=softcap,
            k_scale=k_scale,
            v_scale=v_scale,
        )

    def attention_backend(self) -> type[AttentionBackend]:
        """The class that states what the engine can do."""
        return JaxAttentionBackend
