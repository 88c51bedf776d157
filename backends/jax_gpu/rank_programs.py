"""Programs on all ranks of a mesh: each runs the one-device function under ``shard_map``.

``static`` is ``(ranks, program)``: what they are compiled for.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from backends.jax_gpu import paged
from backends.jax_gpu.kernels.base import BatchArrays
from backends.jax_gpu.paging import read_slots
from backends.jax_gpu.ranks import Ranks

_spec: Any = PartitionSpec  # untyped in JAX


def _on_ranks(ranks: Ranks, function: Any, specs: tuple[Any, ...], out: Any) -> Any:
    return jax.shard_map(
        function,
        mesh=ranks.mesh,
        in_specs=(ranks.pool, _spec(), *specs),
        out_specs=out,
        check_vma=False,  # XLA's loops start from constants, which the check takes for shared
    )


def attend(
    words: jax.Array,
    static: Any,
    address: Any,
    query: jax.Array,
    arrays: BatchArrays,
    scalars: Any,
) -> jax.Array:
    ranks, program = static

    def local(words: jax.Array, address: Any, query: jax.Array, arrays: BatchArrays) -> jax.Array:
        return paged.attend(words[0], program, address, query, arrays, scalars)

    run = _on_ranks(ranks, local, (ranks.heads, ranks.rows), ranks.heads)
    output: jax.Array = run(words, address, query, arrays)
    return output


def step(
    words: jax.Array,
    static: Any,
    address: Any,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    arrays: BatchArrays,
    scalars: Any,
) -> tuple[jax.Array, jax.Array]:
    ranks, program = static

    def local(words: jax.Array, address: Any, *rest: Any) -> tuple[jax.Array, jax.Array]:
        query, key, value, arrays = rest
        output, new = paged.step(words[0], program, address, query, key, value, arrays, scalars)
        return output, new[None]

    specs = (ranks.heads, ranks.heads, ranks.heads, ranks.rows)
    run = _on_ranks(ranks, local, specs, (ranks.heads, ranks.pool))
    result: tuple[jax.Array, jax.Array] = run(words, address, query, key, value, arrays)
    return result


def clear(words: jax.Array, ranks: Ranks) -> jax.Array:
    # on each rank, or the zeros would be whole on all of them
    run = jax.shard_map(jnp.zeros_like, mesh=ranks.mesh, in_specs=ranks.pool, out_specs=ranks.pool)
    new: jax.Array = run(words)
    return new


def write(words: jax.Array, static: Any, address: Any, *arrays: Any) -> jax.Array:
    ranks, program = static

    def local(words: jax.Array, address: Any, *arrays: Any) -> Any:
        return program.kernel.write(words[0], program.cell, address, *arrays)[None]

    specs = (ranks.heads, ranks.heads, ranks.rows)
    new: jax.Array = _on_ranks(ranks, local, specs, ranks.pool)(words, address, *arrays)
    return new


def copy(words: jax.Array, static: Any, address: Any, *blocks: Any) -> jax.Array:
    ranks, program = static

    def local(words: jax.Array, address: Any, *blocks: Any) -> Any:
        return program.kernel.copy(words[0], program.cell, address, *blocks)[None]

    specs = (ranks.rows, ranks.rows)
    new: jax.Array = _on_ranks(ranks, local, specs, ranks.pool)(words, address, *blocks)
    return new


def read(words: jax.Array, static: Any, address: Any, slots: Any) -> tuple[jax.Array, jax.Array]:
    ranks, program = static

    def local(words: jax.Array, address: Any, slots: Any) -> tuple[jax.Array, jax.Array]:
        return read_slots(words[0], program.cell, address, slots)

    run = _on_ranks(ranks, local, (ranks.rows,), (ranks.heads, ranks.heads))
    result: tuple[jax.Array, jax.Array] = run(words, address, slots)
    return result


attend_program = jax.jit(attend, static_argnums=1)
read_program = jax.jit(read, static_argnums=1)
step_program = jax.jit(step, static_argnums=1, donate_argnums=0)


class Pair(NamedTuple):
    """What changes a pool: as a function inside a program, and as one of its own."""

    function: Any
    program: Any  #: donates the words


def _pair(function: Any) -> Pair:
    return Pair(function, jax.jit(function, static_argnums=1, donate_argnums=0, keep_unused=True))


CLEAR, WRITE, COPY = _pair(clear), _pair(write), _pair(copy)
