"""What a pool and a batch are on several devices: the same plan on each rank, stacked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from backends.jax_gpu.allocator import PoolWords, is_traced
from backends.jax_gpu.batch import BatchHost, BatchShape
from backends.jax_gpu.kernels.base import BatchArrays
from backends.jax_gpu.paging import PoolPlan
from layout_core.serving import check_fresh
from layout_core.views import ResolvedLayout

_spec: Any = PartitionSpec  # untyped in JAX


@dataclass(frozen=True, slots=True)
class Ranks:
    """The axes of a mesh that a pool is divided over; static in a program.

    Rank ``d * tensor + t`` has the rows of data rank ``d`` and the heads of tensor rank ``t``.
    """

    mesh: Mesh
    data_axis: str | None  #: ``None``: all ranks have the same rows
    tensor_axis: str | None  #: ``None``: all ranks have all heads

    @property
    def data(self) -> int:
        """Ranks that rows are divided over."""
        return 1 if self.data_axis is None else int(self.mesh.shape[self.data_axis])

    @property
    def tensor(self) -> int:
        """Ranks that heads are divided over."""
        return 1 if self.tensor_axis is None else int(self.mesh.shape[self.tensor_axis])

    @property
    def pool(self) -> Any:
        """Of ``[devices, rows, words]``."""
        return _spec(tuple(a for a in (self.data_axis, self.tensor_axis) if a))

    @property
    def rows(self) -> Any:
        """Of what has an entry for each token or row, and no heads."""
        return _spec(self.data_axis)

    @property
    def heads(self) -> Any:
        """Of ``[T, H, D]``."""
        return _spec(self.data_axis, self.tensor_axis)

    def sharding(self, spec: Any) -> NamedSharding:
        """Where an array of this division lies."""
        return NamedSharding(self.mesh, spec)


@jax.tree_util.register_pytree_node_class
class ShardedPool(PoolWords):
    """A pool on each rank: ``words [devices, num_rows, words_per_row]`` and the plan of a rank.

    A pytree with one leaf. As with one device, a call outside of programs that changes it returns
    a new one and consumes the old.
    """

    __slots__ = ("_ranks",)

    def __init__(self, words: Any, plan: PoolPlan, ranks: Ranks) -> None:
        super().__init__(words, plan)
        self._ranks = ranks

    @property
    def ranks(self) -> Ranks:
        """What it is divided over."""
        return self._ranks

    def with_words(self, words: Any) -> ShardedPool:
        """A pool of the same plan with other words."""
        return ShardedPool(words, self._plan, self._ranks)

    def tree_flatten(self) -> tuple[tuple[Any], tuple[PoolPlan, Ranks]]:
        return (self.words,), (self._plan, self._ranks)

    @classmethod
    def tree_unflatten(cls, aux: tuple[PoolPlan, Ranks], leaves: tuple[Any]) -> ShardedPool:
        return cls(leaves[0], *aux)

    def __repr__(self) -> str:
        rows, width = self._plan.shape
        return (
            f"ShardedPool({self.resolved.layout.name}, {self._ranks.data} x {self._ranks.tensor} "
            f"ranks of {rows} rows of {width} uint{self._plan.geometry.word_bits}{self._state})"
        )


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True, slots=True, eq=False)
class ShardedBatch:
    """One step on all ranks: the arrays of the data ranks one after another."""

    shape: BatchShape  #: of one rank
    ranks: Ranks
    arrays: BatchArrays
    hosts: tuple[BatchHost, ...] | None = None  #: one for each data rank; see ``JaxBatch.host``

    @property
    def kernel(self) -> str:
        """The kernel that runs."""
        return self.shape.bound.kernel.name

    @property
    def resolved(self) -> ResolvedLayout:
        """The plan of each rank."""
        return self.shape.plan.resolved

    @property
    def num_tokens(self) -> int:
        """Queries of all data ranks, padding included."""
        return self.arrays.lo.shape[0]

    def check_fresh(self) -> None:
        """Raise if the tables of a data rank have changed since.

        Raises:
            StaleBatchError: names both versions.
        """
        if self.hosts is not None and not is_traced(self.arrays.lo):
            for host in self.hosts:
                check_fresh(host.step, host.tables.version)

    def tree_flatten(self) -> tuple[tuple[BatchArrays], tuple[BatchShape, Ranks]]:
        return (self.arrays,), (self.shape, self.ranks)

    @classmethod
    def tree_unflatten(cls, aux: tuple[BatchShape, Ranks], leaves: tuple[Any]) -> ShardedBatch:
        return cls(*aux, leaves[0])
