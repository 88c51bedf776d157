"""What changes a pool beside a step: writes at given slots, and copies of whole blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from backends.jax_gpu.allocator import JaxPool, is_traced
from backends.jax_gpu.donation import Donation
from backends.jax_gpu.kernels.base import Kernel, Program
from backends.jax_gpu.layers import AnyLayer, check_slots, check_stored, place_of
from backends.jax_gpu.paging import as_address, block_copies
from layout_core.protocols import PrefixIndex


def write(
    pool: JaxPool,
    layer: AnyLayer,
    key: Any,
    value: Any,
    slots: Any,
    donation: Donation,
    moves: Kernel,
) -> JaxPool:
    """Store K and V at slots; see :meth:`JaxEngine.write`."""
    words = pool.words
    view, cell, address = place_of(pool, layer)
    slots = check_slots(view, slots)
    check_stored(view, slots.shape[0], key, value)
    arguments = (Program(cell, moves), address, key, value, slots)
    if is_traced(words, key, value, slots, *address):
        (new,) = _write(words, *arguments)
    else:
        (new,) = donation.run("write", _write_program, pool, words, arguments)
    return pool.with_words(new)


def copy_blocks(
    pool: JaxPool,
    pairs: Sequence[tuple[int, int]],
    group: int,
    donation: Donation,
    moves: Kernel,
) -> JaxPool:
    """Copy whole blocks in every layer of a group; see :meth:`JaxEngine.copy_blocks`."""
    words = pool.words
    copies = block_copies(pool.plan, pairs, group, room=len(pairs))
    if not pairs:
        return pool
    for cell, layers, source, target in copies:
        address = as_address(pool.addresses[np.array(layers)])
        arguments = (Program(cell, moves), address, source, target)
        if is_traced(words):
            (words,) = _copy(words, *arguments)
        else:
            (words,) = donation.run("copy_blocks", _copy_program, pool, words, arguments)
    return pool.with_words(words)


def clear(pool: JaxPool, prefix_index: PrefixIndex | None, donation: Donation) -> JaxPool:
    """Zero every byte in place; see :meth:`JaxEngine.clear`."""
    words = pool.words
    if prefix_index is not None:
        prefix_index.reset_prefix_cache()
    if is_traced(words):
        return pool.with_words(jnp.zeros_like(words))
    (new,) = donation.run("clear", _clear_program, pool, words, (None,))
    return pool.with_words(new)


def _write(words: jax.Array, program: Program, *arguments: Any) -> tuple[jax.Array]:
    return (program.kernel.write(words, program.cell, *arguments),)


def _copy(words: jax.Array, program: Program, *arguments: Any) -> tuple[jax.Array]:
    return (program.kernel.copy(words, program.cell, *arguments),)


def _clear(words: jax.Array, _: None) -> tuple[jax.Array]:
    return (jnp.zeros_like(words),)


_clear_program = jax.jit(_clear, static_argnums=1, donate_argnums=0, keep_unused=True)
_write_program = jax.jit(_write, static_argnums=1, donate_argnums=0)
_copy_program = jax.jit(_copy, static_argnums=1, donate_argnums=0)
