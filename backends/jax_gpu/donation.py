"""Donation: a program that changes a pool takes its memory over; and the check that it does.

Nothing of the pool's size is copied then. JAX gives up a donation in silence while a NumPy or
DLPack view of the array is alive; the strict mode of the engine, and :func:`check_donation` for
programs of your own, make that an error.
"""

from __future__ import annotations

import re
from typing import Any

import jax

from backends.jax_gpu.allocator import JaxPool, is_traced
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
        if self.strict and not words.is_deleted():
            raise PoolError(
                f"pool: {by} copied it instead of changing it in place, because a NumPy or DLPack "
                "view of it is alive; drop the view. The pool given is unchanged and usable"
            )
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


def check_donation(compiled: Any, pool: JaxPool) -> None:
    """Raise unless a compiled program changes the pool in place.

    Args:
        compiled: of a program of your own that takes and returns the pool:
            ``jax.jit(f, donate_argnames="pool").lower(...).compile()``.
        pool: the pool, for its shape and size; it is not touched.

    Raises:
        PoolError: the program does not alias the pool's memory, or it holds a copy or a
            conversion of an array of the pool's shape.
    """
    check_in_place(compiled, pool.plan.shape, pool.plan.resolved.size_bytes)


def check_in_place(compiled: Any, shape: tuple[int, int], size_bytes: int) -> None:
    """:func:`check_donation` on a pool's shape and size."""
    aliased = compiled.memory_analysis().alias_size_in_bytes
    if aliased < size_bytes:
        raise PoolError(
            f"pool: the compiled program aliases {aliased} bytes, the pool has {size_bytes}; was "
            "it donated?"
        )
    copies = pool_sized_copies(compiled.as_text(), shape)
    if copies:
        raise PoolError(
            f"pool: the compiled program has {len(copies)} copies of the pool's shape, the first "
            f"is {copies[0]!r}"
        )


def pool_sized_copies(hlo: str, shape: tuple[int, int]) -> list[str]:
    """The lines of an optimised HLO text that copy or convert an array of this shape."""
    dims = ",".join(str(size) for size in shape)
    pattern = re.compile(rf"= \w+\[{dims}\]\S* (copy|copy-start|convert|transpose)\(")
    return [line.strip() for line in hlo.splitlines() if pattern.search(line)]
