"""A pool's memory and other frameworks, by DLPack; nothing here knows which framework.

JAX owns the memory, and lends it: :func:`lend` consumes a pool and gives a :class:`Loan` that
another framework views without a copy; :meth:`Loan.take_back` gives the pool again, in the same
memory. Between the two nobody holds a JAX array of it, so a write through a view alters none.

The other direction copies: JAX cannot change memory in place that it does not own, it would copy
the pool at the first write, in silence. :func:`import_pool` says so unless a copy is asked for.

    loan = lend(pool)
    storage = torch.from_dlpack(loan).view(torch.uint8).reshape(-1)
    ...                     # the same bytes, in the same memory
    del storage
    pool = loan.take_back()

On a GPU JAX takes three quarters of the memory when it starts, unless its own setting
``XLA_PYTHON_CLIENT_PREALLOCATE=false`` leaves room for the other framework.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from backends.jax_gpu.allocator import JaxPool, is_traced
from backends.jax_gpu.dtypes import WORD_DTYPES
from backends.jax_gpu.paging import PoolPlan
from layout_core.errors import PoolError
from layout_core.serving import check_servable
from layout_core.views import ResolvedLayout


class Loan:
    """A pool's memory while another framework may hold views of it.

    An exporter of DLPack: ``words [num_rows, words_per_row]`` of unsigned integers, contiguous,
    the whole allocation in address order. A context manager too: leaving it takes the memory
    back, and :attr:`pool` is the pool then.
    """

    def __init__(self, pool: JaxPool, words: jax.Array) -> None:
        self._consumed = pool  # knows the plan
        self._words: jax.Array | None = words
        self._pool: JaxPool | None = None

    @property
    def pool(self) -> JaxPool:
        """The pool that was taken back.

        Raises:
            PoolError: it was not yet.
        """
        if self._pool is None:
            raise PoolError("loan: its memory is still lent; call take_back() first")
        return self._pool

    def take_back(self) -> JaxPool:
        """End the loan: a pool in the same memory, with what was written there.

        Wait for the other framework's work on the device, and drop its views, before.

        Raises:
            PoolError: a view is alive, and JAX would copy the pool; the loan goes on, so drop the
                view and call this again. Or the loan has ended.
        """
        words = self._lent_words()
        new = _renewed(words)
        if not words.is_deleted():
            raise PoolError(
                "loan: a view of the pool's memory is alive, so it cannot be taken back without a "
                "copy; drop the view and call take_back() again"
            )
        self._words = None
        self._pool = self._consumed.with_words(new)
        return self._pool

    def __dlpack__(self, **options: Any) -> Any:
        """A capsule on the memory; see the DLPack protocol.

        Raises:
            PoolError: the loan has ended.
        """
        return self._lent_words().__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        """The device as DLPack numbers it."""
        words: Any = self._lent_words()
        return words.__dlpack_device__()

    def __enter__(self) -> Loan:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # frames of an error may hold views: the loan stays open then, and the error is what counts
        if kind is None and self._words is not None:
            self.take_back()

    def _lent_words(self) -> jax.Array:
        if self._words is None:
            raise PoolError("loan: it has ended; lend the pool again")
        return self._words

    def __repr__(self) -> str:
        return f"Loan({'ended' if self._words is None else 'open'}, of {self._consumed!r})"


def lend(pool: JaxPool) -> Loan:
    """Lend a pool's memory; consumes the pool, without a copy.

    Raises:
        PoolError: a consumed pool; one inside a program, which has no memory yet; or one of which
            a NumPy or DLPack view is alive. It is still usable then.
    """
    words = pool.words
    if is_traced(words):
        raise PoolError("pool: inside a program it has no memory that could be lent")
    words.block_until_ready()
    new = _renewed(words)  # so that no array that the caller may hold is altered through a view
    if not words.is_deleted():
        raise PoolError(
            "pool: a NumPy or DLPack view of it is alive, so it cannot be lent without a copy; "
            "drop the view. The pool is unchanged and usable"
        )
    pool.consume("lend")
    return Loan(pool, new)


def import_pool(
    resolved: ResolvedLayout, exporter: Any, device: jax.Device, *, copy: bool = False
) -> JaxPool:
    """A pool with the bytes of another framework's memory.

    Args:
        resolved: the plan that the memory is laid out by.
        exporter: an object with ``__dlpack__``, compact: bytes ``[size_bytes]``, or words of the
            pool's shape. Strided views of layers do not cross: the plan has their strides.
        device: where the pool goes.
        copy: must be true: see the module.

    Raises:
        PoolError: ``copy`` is false; the memory has another shape or type, or DLPack refuses it.
        UnsupportedError, IndexLimitError: as ``allocate``.
    """
    check_servable(resolved)
    plan = PoolPlan(resolved)
    if not copy:
        raise PoolError(
            "copy: the memory belongs to its exporter. JAX would copy it at the first write, and "
            "until then see what others write to it; pass copy=True, or let JAX own the memory and "
            "lend it"
        )
    word = jnp.dtype(WORD_DTYPES[plan.geometry.word_bits])
    try:
        array = jax.dlpack.from_dlpack(exporter)
    except (TypeError, RuntimeError) as error:  # a strided view, a device that JAX does not know
        raise PoolError(
            f"exporter: expected compact uint8 [{resolved.size_bytes}] or {word} "
            f"{list(plan.shape)} by DLPack ({error})"
        ) from error
    whole = array.dtype == jnp.uint8 and array.shape == (resolved.size_bytes,)
    if not whole and (array.dtype != word or array.shape != plan.shape):
        raise PoolError(
            f"exporter: expected uint8 [{resolved.size_bytes}] or {word} {list(plan.shape)}, got "
            f"{array.dtype} {list(array.shape)}"
        )
    if whole:
        array = _as_words(array, plan)
    words = jnp.array(jax.device_put(array, device), copy=True)
    words.block_until_ready()  # before the exporter's memory may change
    return JaxPool(words, plan)


def _as_words(data: jax.Array, plan: PoolPlan) -> jax.Array:
    bits = plan.geometry.word_bits
    if bits > 8:
        data = lax.bitcast_convert_type(data.reshape(-1, bits // 8), WORD_DTYPES[bits])
    return data.reshape(plan.shape)


# The same memory under a new array: the old one is deleted, unless a view keeps it alive.
_renewed = jax.jit(lambda words: words, donate_argnums=0)
