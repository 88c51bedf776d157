"""What changes a pool beside a step: writes at given slots, and copies of whole blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from backends.jax_gpu.allocator import JaxPool, is_traced
from backends.jax_gpu.donation import Donation
from backends.jax_gpu.layers import AnyLayer, check_slots, check_stored, place_of
from backends.jax_gpu.paging import CellShape, as_address, copy_cells, write_cells
from layout_core.rows import PAD_SLOT
from layout_core.serving import check_copy_pairs


def write(
    pool: JaxPool, layer: AnyLayer, key: Any, value: Any, slots: Any, donation: Donation
) -> JaxPool:
    """Store K and V at slots; see :meth:`JaxEngine.write`."""
    words = pool.words
    view, cell, address = place_of(pool, layer)
    slots = check_slots(view, slots)
    check_stored(view, slots.shape[0], key, value)
    arguments = (cell, address, key, value, slots)
    if is_traced(words, key, value, slots, *address):
        (new,) = _write(words, *arguments)
    else:
        (new,) = donation.run("write", _write_program, pool, words, arguments)
    return pool.with_words(new)


def copy_blocks(
    pool: JaxPool, pairs: Sequence[tuple[int, int]], group: int, donation: Donation
) -> JaxPool:
    """Copy whole blocks in every layer of a group; see :meth:`JaxEngine.copy_blocks`."""
    words, plan = pool.words, pool.plan
    sources, targets = check_copy_pairs(plan.resolved, pairs, group)
    if not pairs:
        return pool
    layers = plan.resolved.group_layers(group)
    ratio = plan.resolved.layers[layers[0]].blocks_per_manager_block
    # a power of two of pairs, so that other numbers of pairs run the same program
    count = 1 << (len(pairs) - 1).bit_length()
    source = _kernel_blocks(sources, ratio, count, 0)
    target = _kernel_blocks(targets, ratio, count, PAD_SLOT)
    alike: dict[CellShape, list[int]] = {}
    for index in layers:
        alike.setdefault(plan.cells[index], []).append(index)
    for cell, indices in alike.items():
        arguments = (cell, as_address(pool.addresses[np.array(indices)]), source, target)
        if is_traced(words):
            (words,) = _copy(words, *arguments)
        else:
            (words,) = donation.run("copy_blocks", _copy_program, pool, words, arguments)
    return pool.with_words(words)


def _kernel_blocks(blocks: Sequence[int], ratio: int, count: int, padding: int) -> Any:
    """Manager blocks as the kernel blocks that they are split into, padded."""
    ids = [block * ratio + part for block in blocks for part in range(ratio)]
    return np.array(ids + [padding] * (count * ratio - len(ids)), dtype=np.int32)


def _write(words: jax.Array, *arguments: Any) -> tuple[jax.Array]:
    return (write_cells(words, *arguments),)


def _copy(words: jax.Array, *arguments: Any) -> tuple[jax.Array]:
    return (copy_cells(words, *arguments),)


_write_program = jax.jit(_write, static_argnums=1, donate_argnums=0)
_copy_program = jax.jit(_copy, static_argnums=1, donate_argnums=0)
