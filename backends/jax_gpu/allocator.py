"""The pool: one flat array of words, consumed by what changes it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from backends.jax_gpu.dtypes import WORD_DTYPES
from backends.jax_gpu.paging import PlanTemplate, PoolPlan
from layout_core.errors import PoolError
from layout_core.serving import check_servable
from layout_core.views import ResolvedLayout


class PoolWords:
    """An array laid out by a plan, and who consumed it: a pool, of one device or of many."""

    __slots__ = ("_consumed_by", "_plan", "_words")

    def __init__(self, words: Any, plan: PoolPlan) -> None:
        self._words = words
        self._plan = plan
        self._consumed_by: str | None = None

    @property
    def plan(self) -> PoolPlan:
        """The plan as this engine addresses it."""
        return self._plan

    @property
    def resolved(self) -> ResolvedLayout:
        """The plan as the core resolved it."""
        return self._plan.resolved

    @property
    def addresses(self) -> Any:
        """Where the layers lie, int32 ``[layers, 5]``."""
        return self._plan.addresses

    @property
    def words(self) -> jax.Array:
        """The array itself.

        Raises:
            PoolError: the pool was consumed.
        """
        if self._consumed_by is not None:
            raise PoolError(
                f"pool: it was consumed by {self._consumed_by}; use the pool that the call returned"
            )
        words = self._words
        if isinstance(words, jax.Array) and not is_traced(words) and words.is_deleted():
            raise PoolError(
                "pool: it was consumed by a program that it was donated to; use the pool that "
                "the program returned"
            )
        return words  # type: ignore[no-any-return]  # a leaf may be anything inside JAX

    def consume(self, by: str) -> None:
        """Mark the pool as gone; ``by`` is named to whoever uses it again."""
        self._consumed_by = by

    @property
    def _state(self) -> str:
        return "" if self._consumed_by is None else f", consumed by {self._consumed_by}"


@jax.tree_util.register_pytree_node_class
class JaxPool(PoolWords):
    """A paged K/V pool: ``words [num_rows, words_per_row]`` and the plan they are laid out by.

    A pytree with one leaf, so it goes through ``jit``, ``scan`` and ``shard_map`` and can be
    donated there. Outside of them every call that changes the pool returns a new one and
    consumes the old, which then cannot be used again.

    The plan is static: a program that takes a pool is compiled for its plan. A *portable* pool
    carries the places of its layers as a second leaf instead, so that one program serves all
    plans that differ only in these, another layout for one; see :meth:`portable`.
    """

    __slots__ = ("_addresses",)

    def __init__(self, words: Any, plan: PoolPlan, addresses: Any = None) -> None:
        super().__init__(words, plan)
        self._addresses = addresses

    @property
    def resolved(self) -> ResolvedLayout:
        """The plan as the core resolved it.

        Raises:
            PoolError: a portable pool knows its layers' places, and not the plan they are of.
        """
        if self.is_portable:
            raise PoolError(
                "pool: a portable pool has no plan of its own; give it one with placed_as(plan)"
            )
        return self._plan.resolved

    @property
    def is_portable(self) -> bool:
        """Whether the layers' places are data."""
        return isinstance(self._plan, PlanTemplate)

    @property
    def addresses(self) -> Any:
        """Where the layers lie, int32 ``[layers, 5]``: numbers of the plan, or data."""
        return self._addresses if self.is_portable else self._plan.addresses

    def portable(self) -> JaxPool:
        """The same words with the layers' places as data, for programs that serve many plans.

        Donating it to a program consumes this pool as well. :meth:`placed_as` turns what the
        program returns back into a pool of the plan.
        """
        addresses = jax.device_put(np.array(self.addresses), self.words.sharding.device_set.pop())
        return JaxPool(self.words, self._plan.template(), addresses)

    def placed_as(self, plan: PoolPlan) -> JaxPool:
        """The words of a portable pool as a pool of ``plan``, from which it was made.

        Raises:
            PoolError: ``plan`` has other layers or another size.
        """
        if plan.template() != self._plan.template():
            raise PoolError("plan: it has other layers, or a pool of another size, than this pool")
        return JaxPool(self.words, plan)

    def with_words(self, words: Any) -> JaxPool:
        """A pool of the same plan with other words."""
        return JaxPool(words, self._plan, self._addresses)

    def tree_flatten(self) -> tuple[tuple[Any, ...], PoolPlan]:
        if self.is_portable:
            return (self.words, self._addresses), self._plan
        return (self.words,), self._plan

    @classmethod
    def tree_unflatten(cls, plan: PoolPlan, leaves: tuple[Any, ...]) -> JaxPool:
        return cls(leaves[0], plan, *leaves[1:])

    def __repr__(self) -> str:
        rows, width = self._plan.shape
        return (
            f"JaxPool({'portable' if self.is_portable else self.resolved.layout.name}, "
            f"{rows} rows of {width} uint"
            f"{self._plan.geometry.word_bits}{self._state})"
        )


def is_traced(*arrays: object) -> bool:
    """Whether any of these stands for a value inside a program that is being built."""
    return any(isinstance(array, jax.core.Tracer) for array in arrays)


def allocate(resolved: ResolvedLayout, device: jax.Device, plan: PoolPlan | None = None) -> JaxPool:
    """A zeroed pool of ``resolved.size_bytes`` bytes.

    Args:
        plan: of ``resolved``, where it is at hand.

    Raises:
        UnsupportedError: a layer that no engine serves, or an element type that this one
            does not store.
        IndexLimitError: the rows of the pool do not fit int32; nothing is allocated.
    """
    check_servable(resolved)
    plan = PoolPlan(resolved) if plan is None else plan
    words = jnp.zeros(plan.shape, WORD_DTYPES[plan.geometry.word_bits], device=device)
    return JaxPool(words, plan)


def load_bytes(
    resolved: ResolvedLayout, data: bytes, device: jax.Device, plan: PoolPlan | None = None
) -> JaxPool:
    """A pool that holds a copy of ``data``.

    Args:
        plan: of ``resolved``, where it is at hand.

    Raises:
        PoolError: ``data`` is not ``resolved.size_bytes`` long.
        UnsupportedError, IndexLimitError: as :func:`allocate`.
    """
    check_servable(resolved)
    plan = PoolPlan(resolved) if plan is None else plan
    if len(data) != resolved.size_bytes:
        raise PoolError(
            f"data: expected {resolved.size_bytes} bytes, as many as the plan has, got {len(data)}"
        )
    host = np.frombuffer(data, dtype=WORD_DTYPES[plan.geometry.word_bits]).reshape(plan.shape)
    # a real copy: an array that shares the caller's memory could not be donated
    return JaxPool(jnp.array(host, copy=True, device=device), plan)


def pool_bytes(pool: JaxPool) -> bytes:
    """The whole allocation, in address order."""
    return host_view(pool.words).tobytes()


def host_view(array: jax.Array) -> np.ndarray[Any, np.dtype[Any]]:
    """The array's contents as NumPy, short-lived: keep no reference to the result.

    ``np.asarray(array)`` would leave a view cached in ``array`` itself, and a pool with a
    live view is copied where it should be donated. The shard's own array takes the view here.
    """
    if len(array.sharding.device_set) == 1:
        return np.asarray(array.addressable_data(0))
    return np.asarray(jnp.copy(array))
