"""Writes, copies and gathers in the Triton interpreter: exact bytes, in every legal pool.

Run by :mod:`tests.kernels.test_interpreter` in a process of its own. Contents are random bits:
NaN payloads, signalling NaNs and denormal numbers among them.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests import cases
from tests.cases import LAYOUTS, NUMPY_DTYPES, POISON, Group, PoolShape, plan_of
from tests.engines.suite import shape_layer
from tests.equivalence.memory import Memory, memory_of
from tests.kernels import host
from tests.tolerances import assert_same_bytes

LEGAL = [pytest.param(s, x, id=f"{s.name}-{x}") for s, x in cases.legal()]


def filled(shape: PoolShape, layout: str, dtype: str, seed: int = 0) -> Memory:
    """A pool of random bits, padding included."""
    memory = memory_of(shape, layout, NUMPY_DTYPES[dtype].itemsize, fill=POISON)
    memory.data[:] = np.random.default_rng(seed).integers(0, 256, memory.data.size, np.uint8)
    return memory


@pytest.mark.parametrize(("shape", "layout"), LEGAL)
def test_write_puts_each_byte_where_it_belongs(shape: PoolShape, layout: str) -> None:
    """Slots in any order, some −1, one on the last slot; every layer; all other bytes stay."""
    dtype = ("float32", "float16", "bfloat16", "float8_e4m3fn")[len(shape.name) % 4]
    rng = np.random.default_rng(3)
    memory = filled(shape, layout, dtype)
    pool = torch.from_numpy(memory.data.copy())
    for layer, view in enumerate(plan_of(shape, layout, dtype).layers):
        group, place = shape_layer(shape, layer)
        cells, n = shape.groups[group].layers[place], shape.groups[group].block_size
        slots = rng.permutation(shape.num_blocks * n)[:9].tolist()
        slots[0] = shape.num_blocks * n - 1
        slots = [*dict.fromkeys(slots), -1, -1]
        key = cases.random_bits(rng, (len(slots), cells.kv_heads, cells.head_size), dtype)
        value = cases.random_bits(rng, (len(slots), cells.kv_heads, cells.value_size), dtype)
        host.write(
            pool,
            view,
            host.tensor(key, dtype),
            host.tensor(value, dtype),
            host.integers(slots, (torch.int64, torch.int32)[layer % 2]),
        )
        for at, slot in enumerate(slots):
            if slot >= 0:
                memory.put(layer, slot // n, slot % n, key[at], value[at])
    assert_same_bytes(pool.numpy().tobytes(), memory.data.tobytes(), f"{shape.name}, {layout}")


@pytest.mark.parametrize("number", range(len(cases.GEOMETRIES)))
def test_write_of_any_head_and_block_size(number: int) -> None:
    cells, _, n = cases.GEOMETRIES[number]
    shape = PoolShape("one", (Group((cells,) * 2, n),), 6)
    layout, rng = LAYOUTS[number % len(LAYOUTS)], np.random.default_rng(number)
    memory = filled(shape, layout, "bfloat16")
    pool = torch.from_numpy(memory.data.copy())
    slots = rng.permutation(6 * n)[:5].tolist()
    key = cases.random_bits(rng, (len(slots), cells.kv_heads, cells.head_size), "bfloat16")
    value = cases.random_bits(rng, (len(slots), cells.kv_heads, cells.value_size), "bfloat16")
    view = plan_of(shape, layout, "bfloat16").layers[1]
    host.write(
        pool, view, host.tensor(key, "bfloat16"), host.tensor(value, "bfloat16"),
        host.integers(slots, torch.int64),
    )  # fmt: skip
    for at, slot in enumerate(slots):
        memory.put(1, slot // n, slot % n, key[at], value[at])
    assert_same_bytes(pool.numpy().tobytes(), memory.data.tobytes())


@pytest.mark.parametrize("columns", ["contiguous", "every second"])
def test_write_takes_views_of_a_packed_projection(columns: str) -> None:
    """Q, K and V of a token in one row; or numbers that are not even neighbours."""
    shape, layout, dtype = cases.PLAIN, "LBNHC", "float32"
    memory = filled(shape, layout, dtype)
    pool = torch.from_numpy(memory.data.copy())
    step = 1 if columns == "contiguous" else 2
    packed = torch.randn(5, 8, 32 * step, generator=torch.Generator().manual_seed(1))
    key, value = packed[:, 4:6, ::step], packed[:, 6:8, ::step]
    assert not key.is_contiguous()
    slots = [7, -1, 90, 12, 13]
    host.write(pool, plan_of(shape, layout, dtype).layers[0], key, value, host.integers(slots))
    for at, slot in enumerate(slots):
        if slot >= 0:
            memory.put(0, slot // 4, slot % 4, key[at].numpy(), value[at].numpy())
    assert_same_bytes(pool.numpy().tobytes(), memory.data.tobytes())


@pytest.mark.parametrize(("shape", "layout"), LEGAL)
def test_copy_blocks_moves_cells_and_leaves_padding(shape: PoolShape, layout: str) -> None:
    """All layers of a group that are of one shape in one launch."""
    dtype = ("float16", "float32", "float8_e4m3fn")[len(shape.name) % 3]
    memory = filled(shape, layout, dtype)
    pool = torch.from_numpy(memory.data.copy())
    resolved = plan_of(shape, layout, dtype)
    pairs = [(3, 9), (3, 4), (shape.num_blocks - 1, 1)]
    layer = 0
    for group in shape.groups:
        kinds = dict.fromkeys(group.layers)
        for kind in kinds:
            same = [layer + i for i, cells in enumerate(group.layers) if cells == kind]
            host.copy_blocks(pool, [resolved.layers[i] for i in same], pairs)
            for i in same:
                for source, target in pairs:
                    memory.copy_block(i, source, target)
        layer += len(group.layers)
    assert_same_bytes(pool.numpy().tobytes(), memory.data.tobytes(), f"{shape.name}, {layout}")


@pytest.mark.parametrize(("shape", "layout"), LEGAL)
def test_gather_reads_rows_from_their_pages(shape: PoolShape, layout: str) -> None:
    """Rows of unlike lengths, one empty, one that starts behind evicted tokens."""
    dtype = ("float32", "bfloat16", "float8_e4m3fn")[len(shape.name) % 3]
    size = NUMPY_DTYPES[dtype].itemsize
    memory = filled(shape, layout, dtype)
    layer = len(memory.index) - 1
    group, place = shape_layer(shape, layer)
    cells, n = shape.groups[group].layers[place], shape.groups[group].block_size
    table, first, counts = [[3, 9, 1], [4], [7, 2]], [1, 0, n], [2 * n + 1, 0, n]
    k, v = host.gather(
        torch.from_numpy(memory.data.copy()),
        plan_of(shape, layout, dtype).layers[layer],
        table,
        first,
        counts,
        head_major=layout[0] == "L",
    )
    if layout[0] == "L":
        k, v = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
    got = np.concatenate(
        [x.view(torch.uint8).reshape(*x.shape[:2], -1).numpy() for x in (k, v)], axis=-1
    )
    assert got.shape[-1] == (cells.head_size + cells.value_size) * size
    expected = [
        memory.data[memory.index[layer][ids[p // n], :, p % n, :]]
        for ids, start, count in zip(table, first, counts)
        for p in range(start, start + count)
    ]
    assert_same_bytes(got.tobytes(), np.stack(expected).tobytes(), f"{shape.name}, {layout}")


def test_a_wrong_stride_is_found() -> None:
    """The comparison itself: a place with two strides exchanged fails."""
    shape, layout = cases.PLAIN, "LBNHC"
    view = plan_of(shape, layout, "float32").layers[1]
    place = host.place_of(view)
    place.numbers[2], place.numbers[3] = int(place.numbers[3]), int(place.numbers[2])
    memory = filled(shape, layout, "float32")
    pool = torch.from_numpy(memory.data.copy())
    key = torch.randn(3, 2, 32)
    launch = host.plan_write(num_tokens=3, unit=place.unit, **host.layer_arguments(view))
    host.run(
        launch,
        {
            "pool": pool, "place": place.numbers, "key": key, "value": key,
            "slots": host.integers([5, 6, 7]),
        },
    )  # fmt: skip
    for at, slot in enumerate((5, 6, 7)):
        memory.put(1, slot // 4, slot % 4, key[at].numpy(), key[at].numpy())
    with pytest.raises(AssertionError):
        assert_same_bytes(pool.numpy().tobytes(), memory.data.tobytes())
