"""What an engine is: the interface that runners call and that both engines implement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from layout_core.rows import BlockTables, Bucket, PagedAttentionRow
from layout_core.views import LayerView, ResolvedLayout
from layout_core.visibility import Spans, Visibility

if TYPE_CHECKING:
    from layout_core.attention import AttentionBackend

ArrayT = TypeVar("ArrayT")
PoolT = TypeVar("PoolT")
BatchT = TypeVar("BatchT")

Layer = int | str | LayerView
"""A layer of a plan: its index in ``resolved.layers``, its name, or its view."""


@runtime_checkable
class PrefixIndex(Protocol):
    """Who knows which blocks hold published prefixes: a block manager."""

    def reset_prefix_cache(self) -> int:
        """Forget every published prefix. Returns how many blocks that were."""
        ...


@runtime_checkable
class Engine(Protocol[ArrayT, PoolT, BatchT]):
    """Executes a :class:`~layout_core.views.ResolvedLayout`: allocator and paged attention.

    ``ArrayT`` is the framework's array (``torch.Tensor``, ``jax.Array``). ``T`` counts the
    tokens of a batch, rows packed one after another.
    """

    @property
    def name(self) -> str:
        """The backend flag, ``torch_cuda`` or ``jax_gpu``."""
        ...

    @property
    def device(self) -> str:
        """``cpu`` or ``cuda`` (with an index where one was asked for)."""
        ...

    @property
    def kernels(self) -> tuple[str, ...]:
        """Kernels that ``prepare`` accepts by name beside ``auto``."""
        ...

    def allocate(self, resolved: ResolvedLayout) -> PoolT:
        """One zeroed allocation of exactly ``resolved.size_bytes`` bytes."""
        ...

    def write(self, pool: PoolT, layer: Layer, key: ArrayT, value: ArrayT, slots: ArrayT) -> PoolT:
        """Store ``key [T, Hkv, D]`` and ``value [T, Hkv, Dv]`` at ``slots [T]``.

        Both are of the pool's dtype, else it raises. Slot −1 is skipped. torch writes in
        place and returns the same pool; JAX returns a new one and has consumed the old.
        """
        ...

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
    ) -> BatchT:
        """Everything a step needs on the device, for one group's layers with one visibility."""
        ...

    def update(
        self, batch: BatchT, rows: Sequence[PagedAttentionRow], tables: BlockTables
    ) -> BatchT:
        """The same shapes with new data; unchanged rows and version cost one comparison."""
        ...

    def forward_paged(
        self,
        pool: PoolT,
        layer: Layer,
        query: ArrayT,
        key: ArrayT | None,
        value: ArrayT | None,
        batch: BatchT,
        *,
        softmax_scale: float | None = None,
        softcap: float = 0.0,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> tuple[ArrayT, PoolT]:
        """Write K/V at the rows' positions, then attend over each row's pages.

        ``query [T, Hq, D]``; the output is ``[T, Hq, Dv]``. ``key = value = None`` only reads.
        ``softmax_scale=None`` is ``head_size ** -0.5``. ``softcap`` > 0 replaces a score ``s``
        by ``softcap * tanh(s / softcap)``. ``k_scale``, ``v_scale`` are those of quantised
        storage: the stored value times the scale is the value.
        """
        ...

    def copy_blocks(
        self, pool: PoolT, pairs: Sequence[tuple[int, int]], *, group: int = 0
    ) -> PoolT:
        """Copy whole blocks ``(src, dst)`` in every layer of a group.

        Destinations are distinct and no sources, else it raises.
        """
        ...

    def clear(self, pool: PoolT, *, prefix_index: PrefixIndex | None = None) -> PoolT:
        """Zero every byte of a pool.

        torch zeroes it where it lies and returns it, so that a captured CUDA graph stays valid;
        JAX returns a new pool and has consumed the old. The index, where one is given, forgets
        its prefixes first: one that is gone is never found. A request that is admitted keeps
        its blocks, and has to run its first step again.
        """
        ...

    def pool_bytes(self, pool: PoolT) -> bytes:
        """The whole allocation, in address order."""
        ...

    def load_bytes(self, resolved: ResolvedLayout, data: bytes) -> PoolT:
        """A pool holding ``data``, which must be ``resolved.size_bytes`` long."""
        ...

    def quantize(self, x: ArrayT, scale: float, dtype: Any) -> ArrayT:
        """``x / scale`` as an 8-bit float, saturated; both engines give the same bytes."""
        ...

    def from_numpy(self, array: Any) -> ArrayT:
        """A device array from a NumPy array; ml_dtypes' types come over bit for bit."""
        ...

    def to_numpy(self, array: ArrayT) -> Any:
        """A NumPy array (ml_dtypes for the narrow types) from a device array."""
        ...

    def synchronize(self, pool: PoolT) -> None:
        """Wait until everything that was issued on the pool is done (for timing)."""
        ...

    def attention_backend(self) -> type[AttentionBackend]:
        """The class that states what the engine can do (``layout_core.attention``)."""
        ...
