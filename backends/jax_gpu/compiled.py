"""What a compiled program says about itself: its memory, and whether it works in place.

For programs of your own as well as the engine's: ``jax.jit(f, ...).lower(...).compile()``. Nothing
runs here; XLA's own figures and the text of the optimised program are read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from typing import Any

from backends.jax_gpu.allocator import PoolWords
from layout_core.errors import PoolError

# what makes a second array out of one, in the words of an optimised program
_COPIES = re.compile(r"= \(?\w+\[([\d,]+)\][^=]*? (?:copy|copy-start|convert|transpose)\(")


@dataclass(frozen=True, slots=True)
class ProgramMemory:
    """Bytes of a compiled program on one device."""

    arguments: int
    outputs: int
    aliased: int  #: of the outputs, what lies in the memory of donated arguments
    temporaries: int

    @property
    def peak(self) -> int:
        """All that the program holds at once at most, its arguments and results included."""
        return self.arguments + self.outputs - self.aliased + self.temporaries


def program_memory(compiled: Any) -> ProgramMemory:
    """What XLA reserved for a compiled program."""
    analysis = compiled.memory_analysis()
    return ProgramMemory(
        arguments=analysis.argument_size_in_bytes,
        outputs=analysis.output_size_in_bytes,
        aliased=analysis.alias_size_in_bytes,
        temporaries=analysis.temp_size_in_bytes,
    )


def check_donation(compiled: Any, pool: PoolWords) -> None:
    """Raise unless a compiled program changes the pool in place.

    Args:
        compiled: of a program of your own that takes and returns the pool:
            ``jax.jit(f, donate_argnames="pool").lower(...).compile()``.
        pool: the pool, for its shape and size, a sharded one for those of each rank; it is not
            touched.

    Raises:
        PoolError: the program does not alias the pool's memory, or it holds a copy or a
            conversion of as many elements as the pool has words.
    """
    check_in_place(compiled, pool.plan.shape, pool.plan.resolved.size_bytes)


def check_in_place(compiled: Any, shape: tuple[int, ...], size_bytes: int) -> None:
    """:func:`check_donation` on a pool's shape and size."""
    aliased = program_memory(compiled).aliased
    if aliased < size_bytes:
        raise PoolError(
            f"pool: the compiled program aliases {aliased} bytes, the pool has {size_bytes}; was "
            "it donated?"
        )
    copies = pool_sized_copies(compiled.as_text(), shape)
    if copies:
        raise PoolError(
            f"pool: the compiled program has {len(copies)} copies of the pool's size, the first "
            f"is {copies[0]!r}"
        )


def pool_sized_copies(hlo: str, shape: tuple[int, ...]) -> list[str]:
    """The lines of an optimised program's text that copy or convert all words of a pool.

    Also in another shape: a program may flatten the pool before it copies it.
    """
    words = prod(shape)
    lines = []
    for line in hlo.splitlines():
        found = _COPIES.search(line)
        if found and prod(int(size) for size in found[1].split(",")) == words:
            lines.append(line.strip())
    return lines
