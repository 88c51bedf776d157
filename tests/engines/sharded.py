"""Steps on many forced host devices, run in a process of its own: ``python -m``.

JAX fixes its number of devices once, so ``test_jax_sharding`` starts this with 8 of them. Each
division of heads and rows is compared with the float64 oracle first, then with one device.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from backends.jax_gpu import check_donation, create_engine
from backends.jax_gpu.sharding import ShardedEngine, sharded_engine
from backends.jax_gpu.spreading import gather_queries, spread_keys, spread_queries
from layout_core.errors import PoolError, StaleBatchError
from layout_core.heads import HeadPlan, pad_heads
from layout_core.rows import Bucket, PagedAttentionRow
from tests.cases import (
    CAUSAL,
    FULL,
    LAYOUTS,
    POISON,
    Array,
    Cells,
    Group,
    PoolShape,
    Step,
    Tables,
    assign_blocks,
    numbers,
    plan_of,
    random_bits,
    room_for,
    row,
    slots_of,
    steps,
)
from tests.engines.suite import (
    Dense,
    draw,
    draw_queries,
    expected_memory,
    expected_outputs,
    padded,
    run_step,
    step_tokens,
)
from tests.tolerances import Mismatch, assert_close, assert_same_bytes

BLOCK = 4
BLOCKS = 24
LAYERS = 2


@dataclass(frozen=True, slots=True)
class Division:
    """Heads of a model over ranks, and rows over data ranks."""

    data: int
    tensor: int
    num_heads: int
    kv_heads: int
    head_size: int = 32

    @property
    def heads(self) -> HeadPlan:
        return pad_heads(self.num_heads, self.kv_heads, self.tensor)

    def model(self) -> PoolShape:
        """The pool of one device, which has all heads."""
        return _shape(self.kv_heads, self.head_size)

    def rank(self) -> PoolShape:
        """The pool of one rank."""
        return _shape(self.heads.kv_heads_per_rank, self.head_size)

    def engine(self) -> ShardedEngine:
        devices = np.array(jax.devices()[: self.data * self.tensor])
        return sharded_engine(Mesh(devices.reshape(self.data, self.tensor), ("data", "tensor")))


def _shape(kv_heads: int, head_size: int) -> PoolShape:
    return PoolShape("sharded", (Group((Cells(kv_heads, head_size),) * LAYERS, BLOCK),), BLOCKS)


def check_division(division: Division, layout: str, dtype: str, first_step: int) -> dict[str, Any]:
    """A step for each data rank, other rows on each; returns what the caller wants to count."""
    engine, heads = division.engine(), division.heads
    todo = [steps(BLOCK)[(first_step + rank) % len(steps(BLOCK))] for rank in range(division.data)]
    # one visibility for each batch: the rule of the first step, without its spans
    todo = [Step(step.name, step.rows, todo[0].visibility) for step in todo]
    model = division.model()
    dense = [draw(model, step, dtype, seed=rank) for rank, step in enumerate(todo)]
    tables = [
        assign_blocks(model, step.rows, np.random.default_rng(rank))
        for rank, step in enumerate(todo)
    ]
    outputs, pools = _sharded(engine, division, layout, dtype, todo, dense, tables)
    one = create_engine()
    for rank, step in enumerate(todo):
        where = f"{division} {layout} {dtype} data rank {rank}, {step.name!r}"
        expected = expected_outputs(model, step, dense[rank], division.num_heads, dtype, rank)
        single = run_step(
            one,
            model,
            plan_of(model, layout, dtype),
            step,
            dense[rank],
            tables[rank],
            dtype=dtype,
            kernel="xla",
            num_heads=division.num_heads,
            seed=rank,
            room=room_for(BLOCK),
        )
        for layer in range(LAYERS):
            got = outputs[layer][rank]
            assert_close(got, expected[layer], "attention", dtype, where)
            assert_close(got, single.outputs[layer], "engines", dtype, where)
        _check_pools(pools, division, rank, layout, dtype, dense[rank], tables[rank])
    return {"owners": heads.owners, "replicas": heads.replicas}


def _sharded(
    engine: ShardedEngine,
    division: Division,
    layout: str,
    dtype: str,
    todo: list[Step],
    dense: list[Dense],
    tables: list[Tables],
) -> tuple[list[list[Array]], tuple[bytes, ...]]:
    """Outputs ``[layer][data rank]`` with the model's heads, and the bytes of each rank."""
    heads, plan = division.heads, plan_of(division.rank(), layout, dtype)
    room = room_for(BLOCK)
    ranks = division.data * division.tensor
    pool = engine.load_bytes(plan, [bytes([POISON]) * plan.size_bytes] * ranks)
    for layer in range(LAYERS):
        pool = _write_history(engine, pool, layer, heads, todo, dense, tables)
    batch = engine.prepare(
        plan,
        [step.rows for step in todo],
        tables,
        visibility=todo[0].visibility,
        num_heads=heads.heads_per_rank,
        bucket=room.bucket(BLOCK),
    )
    outputs = []
    for layer in range(LAYERS):
        query = np.concatenate(
            [
                padded(
                    draw_queries(step, division.num_heads, division.head_size, dtype, rank),
                    room.tokens,
                    float("nan"),
                )
                for rank, step in enumerate(todo)
            ]
        )
        parts = [step_tokens(step, d, layer, room.tokens) for step, d in zip(todo, dense)]
        key, value = (
            spread_keys(jnp.asarray(np.concatenate(arrays)), heads) for arrays in zip(*parts)
        )
        output, pool = engine.forward_paged(
            pool, layer, spread_queries(jnp.asarray(query), heads), key, value, batch
        )
        real = np.asarray(gather_queries(output, heads))
        each = real.reshape(division.data, room.tokens, *real.shape[1:])
        outputs.append(
            [each[rank, : sum(r.query_len for r in step.rows)] for rank, step in enumerate(todo)]
        )
    return outputs, engine.pool_bytes(pool)


def _write_history(
    engine: ShardedEngine,
    pool: Any,
    layer: int,
    heads: HeadPlan,
    todo: list[Step],
    dense: list[Dense],
    tables: list[Tables],
) -> Any:
    """Every token that the step does not write, in one call for all data ranks."""
    keys, values, slots = [], [], []
    for step, of_rows, table in zip(todo, dense, tables):
        k, v, s = _history(step, of_rows, table, layer)
        keys.append(k)
        values.append(v)
        slots.append(s)
    length = max(len(s) for s in slots)
    key, value = (
        spread_keys(jnp.asarray(np.concatenate([padded(a, length, 99.0) for a in arrays])), heads)
        for arrays in (keys, values)
    )
    padded_slots = np.concatenate([padded(s + 1, length, 0) - 1 for s in slots])
    return engine.write(pool, layer, key, value, padded_slots)


def _history(step: Step, dense: Dense, tables: Tables, layer: int) -> tuple[Array, Array, Array]:
    keys, values, slots = [], [], []
    seen = {r.identity: r for r in sorted(step.rows, key=lambda r: not r.read_only)}
    for identity, r in seen.items():
        now = range(0) if r.read_only else range(r.kv_start_pos, r.kv_start_pos + r.query_len)
        before = [p for p in range(r.first_key, r.seq_len) if p not in now]
        k, v = dense[identity, layer]
        keys.append(k[before])
        values.append(v[before])
        slots += slots_of(tables.blocks[identity, 0], before, BLOCK)
    return np.concatenate(keys), np.concatenate(values), np.array(slots, np.int32)


def _check_pools(
    pools: tuple[bytes, ...],
    division: Division,
    data_rank: int,
    layout: str,
    dtype: str,
    dense: Dense,
    tables: Tables,
) -> None:
    """Each rank holds its own heads, and poison where nothing was written."""
    for tensor_rank, own in enumerate(division.heads.owners):
        of_rank = {at: (_of_heads(k, own), _of_heads(v, own)) for at, (k, v) in dense.items()}
        memory = expected_memory(division.rank(), layout, dtype, of_rank, tables)
        got = pools[data_rank * division.tensor + tensor_rank]
        where = f"{division} {layout} rank {data_rank}, {tensor_rank}"
        assert_same_bytes(got, memory.data.tobytes(), where)


def _of_heads(array: Array, own: tuple[int, ...]) -> Array:
    out = np.zeros((len(array), len(own), array.shape[2]), array.dtype)
    for at, head in enumerate(own):
        if head < array.shape[1]:
            out[:, at] = array[:, head]
    return out


# --- beside whole steps -------------------------------------------------------------------------


def _tensor_engine(ranks: int) -> ShardedEngine:
    return sharded_engine(Mesh(np.array(jax.devices()[:ranks]), ("tensor",)))


def _one_row(tokens: int, blocks: list[int]) -> tuple[list[PagedAttentionRow], Tables]:
    r, tables = row("a", tokens, tokens), Tables()
    tables.put(r, 0, blocks)
    return [r], tables


def field_case_15() -> Any:
    """6 query and 2 KV heads with ``V[h] = h`` over 2 ranks: [0, 0, 0, 1, 1, 1]."""
    heads, engine = pad_heads(6, 2, 2), _tensor_engine(2)
    plan = plan_of(_shape(heads.kv_heads_per_rank, 32), "LBNHC", "float32")
    rows, tables = _one_row(4, [5])
    batch = engine.prepare(plan, [rows], [tables], visibility=FULL, num_heads=heads.heads_per_rank)
    value = jnp.broadcast_to(jnp.arange(2.0)[None, :, None], (4, 2, 32))
    rng = np.random.default_rng(0)
    query, key = (jnp.asarray(numbers(rng, (4, n, 32), "float32")) for n in (6, 2))
    output, _ = engine.forward_paged(
        engine.allocate(plan),
        0,
        spread_queries(query, heads),
        spread_keys(key, heads),
        spread_keys(value, heads),
        batch,
    )
    real = np.asarray(gather_queries(output, heads))
    assert_close(real, np.broadcast_to(real[:1, :, :1], real.shape), "attention", "float32")
    return [round(float(x), 5) for x in real[0, :, 0]]


def field_case_26() -> Any:
    """2 KV heads over 4 ranks: each twice in the pools, once where they are gathered."""
    heads, engine = pad_heads(8, 2, 4), _tensor_engine(4)
    plan = plan_of(_shape(heads.kv_heads_per_rank, 32), "BHLNC", "bfloat16")
    rng = np.random.default_rng(1)
    key, value = (random_bits(rng, (6, 2, 32), "bfloat16") for _ in "kv")
    slots = np.array([22, 9, -1, 4, 94, 13], np.int32)
    pool = engine.write(
        engine.allocate(plan), 1, *(spread_keys(jnp.asarray(a), heads) for a in (key, value)), slots
    )
    parts = engine.pool_bytes(pool)
    assert parts[0] == parts[1] != parts[2] == parts[3], "replicas hold equal bytes"
    got = engine.read_heads(pool, 1, slots, heads)
    for array, want in zip(got, (key, value)):
        want[2] = 0  # −1 was not written, and reads as zeros
        host = np.asarray(array)
        assert_same_bytes(host.tobytes(), want.tobytes(), "gathered heads")
    return {"owners": heads.owners, "gathered": got[0].shape[1]}


def blocks_are_copied_on_each_data_rank() -> Any:
    """Pairs of their own on each data rank, in all heads."""
    division = Division(2, 2, 4, 2)
    engine, plan = division.engine(), plan_of(division.rank(), "LHBNC", "float16")
    rng = np.random.default_rng(2)
    start = [rng.integers(0, 256, plan.size_bytes, dtype=np.uint8).tobytes() for _ in range(4)]
    pairs = [[(3, 7), (3, 1), (9, 2)], [(1, 20)]]
    pool = engine.copy_blocks(engine.load_bytes(plan, start), pairs)
    one = create_engine()
    for rank, got in enumerate(engine.pool_bytes(pool)):
        want = one.copy_blocks(one.load_bytes(plan, start[rank]), pairs[rank // 2])
        assert_same_bytes(got, one.pool_bytes(want), f"rank {rank}")
    same = engine.copy_blocks(pool, [[], []])
    assert same is pool, "nothing to copy consumes nothing"
    place = [x.data.unsafe_buffer_pointer() for x in pool.words.addressable_shards]
    cleared = engine.clear(pool)
    assert cleared.words.sharding == engine.allocate(plan).words.sharding
    assert place == [x.data.unsafe_buffer_pointer() for x in cleared.words.addressable_shards]
    assert not any(any(part) for part in engine.pool_bytes(cleared))
    with pytest.raises(PoolError, match="consumed by clear"):
        engine.pool_bytes(pool)
    return None


def a_program_of_ones_own_works_in_place() -> Any:
    """All layers under ``scan`` in one jit: traced once for other lengths, the pool in place."""
    division = Division(2, 4, 8, 8)
    engine, heads = division.engine(), division.heads
    plan = plan_of(division.rank(), "BLNHC", "bfloat16")
    bucket = Bucket(tokens=8, rows=2, blocks=3)
    traced: list[int] = []

    def layers(pool: Any, query: Any, key: Any, value: Any, batch: Any) -> Any:
        traced.append(1)

        def one(pool: Any, layer: Any) -> Any:
            output, pool = engine.forward_paged(pool, layer, query, key, value, batch)
            return pool, output

        pool, outputs = jax.lax.scan(one, pool, jnp.arange(LAYERS, dtype=jnp.int32))
        return outputs, pool

    program = jax.jit(layers, donate_argnums=0)
    rng = np.random.default_rng(3)
    query, key, value = (jnp.asarray(numbers(rng, (16, n, 32), "bfloat16")) for n in (8, 8, 8))
    batch = None
    for lengths in ((5, 8), (2, 3)):
        made = [_one_row(n, [4 + rank, 9]) for rank, n in enumerate(lengths)]
        rows, tables = [r for r, _ in made], [t for _, t in made]
        if batch is None:
            batch = engine.prepare(
                plan, rows, tables, visibility=CAUSAL, num_heads=heads.heads_per_rank, bucket=bucket
            )
        else:
            batch = engine.update(batch, rows, tables)
            assert engine.update(batch, rows, tables) is batch
        pool = engine.allocate(plan)
        compiled = program.lower(pool, query, key, value, batch).compile()
        check_donation(compiled, pool)  # on each rank: aliased, and never copied
        outputs, new = program(pool, query, key, value, batch)
        eager = engine.allocate(plan)
        for layer in range(LAYERS):
            want, eager = engine.forward_paged(eager, layer, query, key, value, batch)
            assert_close(outputs[layer], want, "engines", "bfloat16", f"layer {layer}")
        for got, expected in zip(engine.pool_bytes(new), engine.pool_bytes(eager)):
            assert_same_bytes(got, expected, "scan against single calls")
        with pytest.raises(PoolError, match="consumed by a program that it was donated to"):
            engine.pool_bytes(pool)
    stale = tables[1]
    stale.put(rows[1][0], 0, [7, 8])
    with pytest.raises(StaleBatchError) as stale_batch:
        engine.forward_paged(new, 0, query, key, value, batch)
    return {"traced": len(traced), "stale": str(stale_batch.value)}


def wrong_head_maps_are_caught() -> Any:
    """Query heads shifted by one, and KV heads of the wrong rank, must show in the output."""
    caught = []
    for function in (spread_queries, spread_keys):

        def shifted(array: Any, heads: HeadPlan, function: Any = function) -> Any:
            return jnp.roll(function(array, heads), 1, axis=1)

        globals()[function.__name__] = shifted
        try:
            with pytest.raises(Mismatch):
                check_division(Division(1, 2, 4, 2), "LBNHC", "float32", 0)
            caught.append(function.__name__)
        finally:
            globals()[function.__name__] = function
    return caught


CHECKS: dict[str, Callable[[], Any]] = {
    check.__name__: check
    for check in (
        field_case_15,
        field_case_26,
        blocks_are_copied_on_each_data_rank,
        a_program_of_ones_own_works_in_place,
        wrong_head_maps_are_caught,
    )
}


def run(name: str, function: Callable[[], Any]) -> None:
    """One line of JSON: what the check gave, or its traceback."""
    try:
        outcome = {"name": name, "gave": function()}
    except BaseException:  # pytest's own failures too; the parent's test fails with it
        outcome = {"name": name, "failed": traceback.format_exc()}
    print(json.dumps(outcome), flush=True)


def main(arguments: list[str]) -> None:
    """Run every check, and divisions given as JSON: ``[[data, tensor, Hq, Hkv, dtype, step]]``."""
    print(json.dumps({"name": "devices", "gave": len(jax.devices())}))
    for index, (*division, dtype, step) in enumerate(json.loads(arguments[0])):
        check = partial(
            check_division, Division(*division), LAYOUTS[index % len(LAYOUTS)], dtype, step
        )
        run(json.dumps([*division, dtype, step]), check)
    for name, check in CHECKS.items():
        run(name, check)


if __name__ == "__main__":
    main(sys.argv[1:])
