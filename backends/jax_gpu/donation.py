"""Donation: a program that changes a pool takes its memory over; and the check that it does.

Nothing of the pool's size is copied then. JAX gives up a donation in silence while a NumPy or
DLPack view of the array is alive, or where the program cannot work in place. The strict mode of
the engine makes both an error. For programs of your own, look at the compiled one with
:func:`backends.jax_gpu.compiled.check_donation`, and run it with :func:`run_donated`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from backends.jax_gpu.allocator import JaxPool, is_traced
from backends.jax_gpu.compiled import check_in_place
from layout_core.errors import PoolError


class Donation:
    """Runs programs that donate a pool's array; strict, it raises where the pool is copied.

    Args:
        strict: compile each program once more to look at it, and look whether the array given
            is gone after each call.
    """

    def __init__(self, strict: bool = False) -> None:
        self.strict = strict
        self._in_place: set[object] = set()  # signatures of programs found to work in place

    def run(
        self,
        by: str,
        program: Any,
        pool: JaxPool,
        words: jax.Array,
        arguments: tuple[Any, ...],
    ) -> tuple[Any, ...]:
        """The results of a program; the pool is marked as consumed ``by`` the call.

        Raises:
            PoolError: strict, and the pool was or would be copied; it is still usable.
        """
        if self.strict:
            self._check_program(by, program, words, arguments)
        result: tuple[Any, ...] = program(words, *arguments)
        if is_traced(*result):  # called with plain arrays while another program is being built
            return result
        if self.strict:
            _check_gone(by, words)
        pool.consume(by)
        return result

    def _check_program(
        self, by: str, program: Any, words: jax.Array, arguments: tuple[Any, ...]
    ) -> None:
        leaves, tree = jax.tree.flatten((words, arguments[1:]))
        shapes = tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)
        signature = (by, arguments[0], tree, shapes)
        if signature in self._in_place:
            return
        compiled = program.lower(words, *arguments).compile()
        check_in_place(compiled, (words.shape[0], words.shape[1]), words.nbytes)
        self._in_place.add(signature)


def run_donated(by: str, program: Callable[..., Any], pool: JaxPool, *arguments: Any) -> Any:
    """The result of ``program(pool, *arguments)``, which donates its first argument.

    Args:
        by: what the program is called in messages.
        program: compiled or jitted with ``donate_argnums=0``.

    Raises:
        PoolError: the pool was copied; it is unchanged and usable, and the result is dropped.
    """
    words = pool.words
    result = program(pool, *arguments)
    _check_gone(by, words)
    pool.consume(by)
    return result


def _check_gone(by: str, words: jax.Array) -> None:
    if not words.is_deleted():
        raise PoolError(
            f"pool: {by} copied it instead of changing it in place, because a NumPy or DLPack "
            "view of it is alive; drop the view. The pool given is unchanged and usable"
        )
