"""One block size that every backend accepts, chosen before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import lcm
from typing import Any, Final

from layout_core.errors import BlockSizeError
from layout_core.specs import MultipleOf

DEFAULT_BLOCK_SIZE: Final = 16
"""Taken where nothing is requested and every backend accepts it (vLLM's default)."""


@dataclass(frozen=True, slots=True)
class _Accepted:
    """The sizes that a backend accepts: some numbers, and all multiples of some."""

    name: str
    sizes: frozenset[int]
    bases: frozenset[int]

    def accepts(self, size: int) -> bool:
        return size in self.sizes or any(size % base == 0 for base in self.bases)

    def __str__(self) -> str:
        parts = [str(size) for size in sorted(self.sizes)]
        parts += [f"multiple of {base}" for base in sorted(self.bases)]
        return f"{self.name}: {', '.join(parts)}"

    def nearest(self, size: int) -> int:
        near = list(self.sizes)
        for base in self.bases:
            below = size // base * base
            near += [below + base, *([below] if below else [])]
        return min(near, key=lambda candidate: (abs(candidate - size), candidate))


def _accepted(backend: Any, index: int) -> _Accepted:
    name = f"backend {index}"
    declared: Any = backend
    if hasattr(backend, "get_name"):
        name = str(backend.get_name())
    elif isinstance(backend, type):
        name = backend.__name__
    if not isinstance(backend, int | list | tuple | set | frozenset | MultipleOf):
        getter = getattr(backend, "get_supported_kernel_block_sizes", None)
        # a backend that declares no sizes takes any, as in vLLM
        declared = (getter() if getter is not None else None) or [MultipleOf(1)]
    if isinstance(declared, int | MultipleOf):
        declared = [declared]
    sizes: set[int] = set()
    bases: set[int] = set()
    for option in declared:
        base = getattr(option, "base", None)
        value = option if base is None else base
        if type(value) is not int or value < 1:
            raise BlockSizeError(
                f"backends[{index}]: {name}: expected ints >= 1 or MultipleOf, got {option!r}"
            )
        (sizes if base is None else bases).add(value)
    if not sizes and not bases:
        raise BlockSizeError(f"backends[{index}]: {name}: accepts no block size at all")
    return _Accepted(name, frozenset(sizes), frozenset(bases))


def resolve_block_size(backends: Iterable[object], requested: int | None = None) -> int:
    """A block size, in tokens, that every backend accepts.

    Args:
        backends: each a class with ``get_supported_kernel_block_sizes()`` (ints and
            ``MultipleOf``, as vLLM's backends), or such a collection itself. A class that
            declares nothing accepts any.
        requested: the size to use; ``None`` is 16 where all accept it, else the smallest that
            all accept.

    Raises:
        BlockSizeError: no size is accepted by all (it shows what each accepts); or the
            requested one is not (it names value, backend and the nearest legal size).
    """
    accepted = [_accepted(backend, index) for index, backend in enumerate(backends)]
    common = _Accepted("all", frozenset(), frozenset({1}))
    for one in accepted:
        numbers = {s for s in common.sizes if one.accepts(s)}
        numbers |= {s for s in one.sizes if common.accepts(s)}
        bases = {lcm(a, b) for a in common.bases for b in one.bases}
        common = _Accepted("all", frozenset(numbers), frozenset(bases))
    if not common.sizes and not common.bases:
        raise BlockSizeError(
            f"backends: no block size is accepted by all of them; {'; '.join(map(str, accepted))}"
        )
    if requested is None:
        if common.accepts(DEFAULT_BLOCK_SIZE):
            return DEFAULT_BLOCK_SIZE
        return min(common.sizes | common.bases)
    if type(requested) is not int or requested < 1:
        raise BlockSizeError(f"requested: expected an int >= 1, got {requested!r}")
    for one in accepted:
        if not one.accepts(requested):
            raise BlockSizeError(
                f"requested: a block size of {requested} is not accepted by {one}; the nearest "
                f"that every backend accepts is {common.nearest(requested)}"
            )
    return requested
