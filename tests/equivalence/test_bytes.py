"""Same writes, same bytes: both engines against NumPy's axis order, and against each other.

The numbers are random bits with NaN payloads, signalling NaNs, infinities and denormals among
them: no byte may change on its way, in any layout, dtype or pool shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from layout_core.rows import PagedAttentionRow
from tests.cases import (
    CAUSAL,
    LAYOUTS,
    NUMPY_DTYPES,
    PLAIN,
    Array,
    PoolShape,
    Tables,
    legal,
    nans,
    numbers,
    plan_of,
    random_bits,
    row,
    slots_of,
    special_bits,
)
from tests.engines.suite import ENGINE_KERNELS, shape_layer
from tests.equivalence.memory import Memory, memory_of
from tests.tolerances import assert_same_bytes

LoadEngine = Callable[[str], Any]

SHAPES_AND_LAYOUTS = [pytest.param(*p, id=f"{p[0].name}-{p[1]}") for p in legal()]
STORED = ("float32", "float16", "bfloat16", "float8_e4m3fn")
CALL_TOKENS = 24


def hostile(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Array:
    """Random bits, with every special pattern at least once."""
    bits = random_bits(rng, shape, dtype)
    flat = bits.reshape(-1)
    for at, pattern in enumerate(special_bits(dtype)):
        flat[3 * at : 3 * at + 1] = np.frombuffer(pattern, NUMPY_DTYPES[dtype])
    return bits


def random_slots(rng: np.random.Generator, num_blocks: int, block_size: int) -> list[int]:
    """Slots of rows in shuffled blocks, the last block partly filled, padding in between."""
    blocks = rng.permutation(np.arange(1, num_blocks))[:3].tolist()
    used = slots_of(blocks, range(min(2 * block_size + 1, CALL_TOKENS - 3)), block_size)
    order = rng.permutation(len(used))
    slots = [used[i] for i in order]  # tokens of a call come in any order
    for _ in range(CALL_TOKENS - len(slots)):
        slots.insert(int(rng.integers(0, len(slots) + 1)), -1)
    return slots


def write_everywhere(
    engines: Sequence[Any], shape: PoolShape, layout: str, dtype: str, seed: int
) -> tuple[list[Any], Memory]:
    """Two calls of ``write`` in every layer, on each engine, and the bytes that must result."""
    rng = np.random.default_rng(seed)
    plan = plan_of(shape, layout, dtype)
    start = rng.integers(0, 256, plan.size_bytes, dtype=np.uint8).tobytes()
    pools = [e.load_bytes(plan, start) for e in engines]
    memory = memory_of(shape, layout, NUMPY_DTYPES[dtype].itemsize)
    memory.data[:] = np.frombuffer(start, np.uint8)
    for layer in range(len(plan.layers)):
        group, place = shape_layer(shape, layer)
        n, cells = shape.groups[group].block_size, shape.groups[group].layers[place]
        for _ in range(2):
            slots = random_slots(rng, shape.num_blocks, n)
            key = hostile(rng, (CALL_TOKENS, cells.kv_heads, cells.head_size), dtype)
            value = hostile(rng, (CALL_TOKENS, cells.kv_heads, cells.value_size), dtype)
            for token, slot in enumerate(slots):
                if slot >= 0:
                    memory.put(layer, *divmod(slot, n), key[token], value[token])
            for at, e in enumerate(engines):
                pools[at] = e.write(
                    pools[at],
                    layer,
                    e.from_numpy(key),
                    e.from_numpy(value),
                    e.from_numpy(np.asarray(slots, np.int32)),
                )
    return pools, memory


def both(load_engine: LoadEngine) -> list[Any]:
    return [load_engine(name) for name, _ in ENGINE_KERNELS]


@pytest.mark.parametrize(("shape", "layout"), SHAPES_AND_LAYOUTS)
@pytest.mark.parametrize("dtype", STORED)
def test_same_writes_same_bytes(
    load_engine: LoadEngine, shape: PoolShape, layout: str, dtype: str
) -> None:
    engines = both(load_engine)
    pools, memory = write_everywhere(engines, shape, layout, dtype, seed=LAYOUTS.index(layout))
    got = [e.pool_bytes(p) for e, p in zip(engines, pools)]
    for engine, data in zip(engines, got):
        assert_same_bytes(data, memory.data.tobytes(), f"{engine.name} {shape.name} {layout}")
    assert_same_bytes(got[1], got[0], "one engine against the other")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", STORED[:3])
def test_the_writes_of_an_attention_step_keep_every_bit(
    load_engine: LoadEngine, layout: str, dtype: str
) -> None:
    """``forward_paged`` writes NaN payloads as they are, whatever it computes from them."""
    rng = np.random.default_rng(17)
    plan = plan_of(PLAIN, layout, dtype)
    rows = [row("a", 5, 9), row("b", 3, 3), row("c", 2, 6, read_only=True)]
    tables = Tables()
    for r, ids in zip(rows, ([7, 2, 19], [4], [11, 3])):
        tables.put(r, 0, ids)
    key, value = (hostile(rng, (10, 2, 32), dtype) for _ in "kv")
    query = numbers(rng, (10, 2, 32), dtype)
    memory = memory_of(PLAIN, layout, key.dtype.itemsize)
    token = 0
    for r in rows[:2]:
        ids = tables.blocks[r.identity, 0]
        for slot in slots_of(ids, range(r.kv_start_pos, r.seq_len), 4):
            memory.put(1, *divmod(slot, 4), key[token], value[token])
            token += 1
    for engine in both(load_engine):
        batch = engine.prepare(plan, rows, tables, visibility=CAUSAL, num_heads=2)
        arrays = (engine.from_numpy(a) for a in (query, key, value))
        _, pool = engine.forward_paged(engine.allocate(plan), 1, *arrays, batch)
        assert_same_bytes(engine.pool_bytes(pool), memory.data.tobytes(), f"{engine.name} {layout}")


@pytest.mark.parametrize(("shape", "layout"), SHAPES_AND_LAYOUTS)
def test_copied_blocks_are_equal_in_every_layer_of_the_group(
    load_engine: LoadEngine, shape: PoolShape, layout: str
) -> None:
    """The whole page of each layer moves; other blocks and groups keep every byte."""
    rng = np.random.default_rng(23)
    dtype = STORED[LAYOUTS.index(layout) % 3]
    plan = plan_of(shape, layout, dtype)
    start = rng.integers(0, 256, plan.size_bytes, dtype=np.uint8)
    for group in range(len(shape.groups)):
        pairs = [(3, 8), (3, 1), (5, 12)]
        memory = memory_of(shape, layout, NUMPY_DTYPES[dtype].itemsize)
        memory.data[:] = start
        for source, target in pairs:
            for layer in plan.group_layers(group):
                memory.copy_block(layer, source, target)
        got = []
        for engine in both(load_engine):
            pool = engine.copy_blocks(engine.load_bytes(plan, start.tobytes()), pairs, group=group)
            got.append(engine.pool_bytes(pool))
        for engine, data in zip(both(load_engine), got):
            # padding of a page is nobody's: engines may move it or not, alike
            index = np.concatenate([i.reshape(-1) for i in memory.index])
            cells, want = np.frombuffer(data, np.uint8)[index], memory.data[index]
            assert_same_bytes(cells.tobytes(), want.tobytes(), f"{engine.name} {layout}")
        assert_same_bytes(got[1], got[0], f"{shape.name} {layout}: one engine against the other")


@pytest.mark.parametrize(("shape", "layout"), SHAPES_AND_LAYOUTS)
def test_a_pool_goes_from_one_engine_to_the_other_and_back(
    load_engine: LoadEngine, shape: PoolShape, layout: str
) -> None:
    dtype = STORED[(LAYOUTS.index(layout) + 1) % 4]
    engines = both(load_engine)
    pools, memory = write_everywhere(engines[:1], shape, layout, dtype, seed=29)
    plan = plan_of(shape, layout, dtype)
    data = engines[0].pool_bytes(pools[0])
    for engine in (engines[1], engines[0], engines[1]):
        data = engine.pool_bytes(engine.load_bytes(plan, data))
        assert_same_bytes(data, memory.data.tobytes(), f"{engine.name} {shape.name} {layout}")


@pytest.mark.parametrize(("name", "kernel"), ENGINE_KERNELS)
@pytest.mark.parametrize("dtype", STORED)
def test_arrays_keep_their_bits_to_and_from_numpy(
    load_engine: LoadEngine, name: str, kernel: str, dtype: str
) -> None:
    engine = load_engine(name)
    bits = hostile(np.random.default_rng(1), (7, 3, 8), dtype)
    back = np.asarray(engine.to_numpy(engine.from_numpy(bits)))
    assert back.dtype == bits.dtype
    assert_same_bytes(back.tobytes(), bits.tobytes(), f"{name} {dtype}")


@pytest.mark.parametrize(("name", "kernel"), ENGINE_KERNELS)
def test_a_new_pool_is_zero_and_of_the_planned_size(
    load_engine: LoadEngine, name: str, kernel: str
) -> None:
    engine = load_engine(name)
    for shape, layout in legal():
        plan = plan_of(shape, layout, "float16")
        assert_same_bytes(
            engine.pool_bytes(engine.allocate(plan)), bytes(plan.size_bytes), f"{name} {layout}"
        )


@pytest.mark.parametrize(("name", "kernel"), ENGINE_KERNELS)
@pytest.mark.parametrize("change", [-1, 1])
def test_bytes_of_another_size_are_refused(
    load_engine: LoadEngine, name: str, kernel: str, change: int
) -> None:
    from layout_core.errors import PoolError

    plan = plan_of(PLAIN, "LBNHC", "float32")
    with pytest.raises(PoolError, match=str(plan.size_bytes)):
        load_engine(name).load_bytes(plan, bytes(plan.size_bytes + change))


@pytest.mark.parametrize(("name", "kernel"), ENGINE_KERNELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_null_block_and_rows_of_others_keep_their_bytes(
    load_engine: LoadEngine, name: str, kernel: str, layout: str
) -> None:
    """Field case 10, with a real row beside the padding: block 0 keeps its bytes."""
    engine = load_engine(name)
    plan = plan_of(PLAIN, layout, "bfloat16")
    r: PagedAttentionRow = row("a", 2, 2)
    tables = Tables()
    tables.put(r, 0, [1])
    from layout_core.rows import Bucket

    batch = engine.prepare(
        plan, [r], tables, visibility=CAUSAL, num_heads=2, kernel=kernel, bucket=Bucket(8, 2, 2)
    )
    key = nans((8, 2, 32), "bfloat16")
    start = np.full(plan.size_bytes, 0x11, np.uint8)
    memory = memory_of(PLAIN, layout, 2, fill=0x11)
    for token in range(2):
        memory.put(0, 1, token, key[token], key[token])
    query = engine.from_numpy(numbers(np.random.default_rng(0), (8, 2, 32), "bfloat16"))
    pool = engine.load_bytes(plan, start.tobytes())
    _, pool = engine.forward_paged(
        pool, 0, query, engine.from_numpy(key), engine.from_numpy(key), batch
    )
    assert_same_bytes(engine.pool_bytes(pool), memory.data.tobytes(), f"{name} {layout}")
