"""The JAX engine's Triton path beside whole steps; run by ``interpreted_jax``, where kernels run.

python -m tests.engines.interpreted_jax tests/engines/interpreted_jax_checks.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from backends.jax_gpu import create_engine
from backends.jax_gpu.kernels import triton as module
from backends.jax_gpu.kernels.select import Toolkit
from backends.jax_gpu.kernels.triton import TritonKernel
from backends.jax_gpu.ranks import Ranks
from backends.jax_gpu.sharding import ShardedEngine
from layout_core.rows import Bucket
from tests.cases import (
    CAUSAL,
    LAYOUTS,
    PLAIN,
    Cells,
    Group,
    PoolShape,
    Tables,
    legal,
    numbers,
    plan_of,
    row,
    steps,
)
from tests.engines.suite import check_step
from tests.equivalence.test_sequences import STORED, Machine
from tests.tolerances import Mismatch, assert_close, assert_same_bytes

XLA = create_engine()

LoadEngine = Callable[[str], Any]


@pytest.mark.parametrize(
    ("shape", "layout", "dtype"),
    [
        pytest.param(shape, layout, STORED[at % 4], id=f"{shape.name}-{layout}")
        for at, (shape, layout) in enumerate(legal())
    ][::5],
)
def test_writes_copies_and_forks_give_the_bytes_of_xla(
    load_engine: LoadEngine, shape: PoolShape, layout: str, dtype: str
) -> None:
    machine = Machine([load_engine("jax_gpu"), XLA], shape, layout, dtype, seed=5)
    machine.admit()
    machine.fork()
    for _ in range(6):
        machine.step()
    machine.write()
    for engine, pool in zip(machine.engines, machine.pools):
        got = engine.pool_bytes(pool)
        assert_same_bytes(got, machine.memory.data.tobytes(), f"{engine} {shape.name} {layout}")


def test_a_slot_past_the_pool_is_not_written(load_engine: LoadEngine) -> None:
    engine, plan = load_engine("jax_gpu"), plan_of(PLAIN, "BLNHC", "bfloat16")
    key = jnp.ones((4, 2, 32), jnp.bfloat16)
    slots = jnp.asarray([96, -1, 5, 2**30], jnp.int32)
    pool = engine.write(engine.allocate(plan), 1, key, key, slots)
    want = XLA.write(XLA.allocate(plan), 1, key[:1], key[:1], [5])
    assert_same_bytes(engine.pool_bytes(pool), XLA.pool_bytes(want))


def test_one_program_serves_a_bucket_and_a_scan_over_layers(load_engine: LoadEngine) -> None:
    """Field case 28: other lengths in a bucket, and equal layers, trace nothing anew."""
    engine, plan = load_engine("jax_gpu"), plan_of(PLAIN, "LHBNC", "float32")
    bucket = Bucket(tokens=8, rows=2, blocks=4)
    rng = np.random.default_rng(0)
    query, key, value = (jnp.asarray(numbers(rng, (8, n, 32), "float32")) for n in (4, 2, 2))
    traced: list[int] = []

    def layers(pool: Any, batch: Any) -> Any:
        traced.append(1)

        def one(pool: Any, layer: Any) -> Any:
            output, pool = engine.forward_paged(pool, layer, query, key, value, batch)
            return pool, output

        return jax.lax.scan(one, pool, jnp.arange(2, dtype=jnp.int32))

    program, tables = jax.jit(layers, donate_argnums=0), Tables()
    rows = [row("a", 5, 5), row("b", 3, 3)]
    tables.put(rows[0], 0, [4, 9])
    tables.put(rows[1], 0, [7])
    prepare = {"visibility": CAUSAL, "num_heads": 4, "bucket": bucket}
    batch = engine.prepare(plan, rows, tables, **prepare)
    for these in (rows, rows[:1], [row("b", 2, 3)]):
        batch = engine.update(batch, these, tables)
        pool, outputs = program(engine.allocate(plan), batch)
        plain = XLA.prepare(plan, these, tables, **prepare)
        want = XLA.allocate(plan)
        for layer in range(2):
            expected, want = XLA.forward_paged(want, layer, query, key, value, plain)
            assert_close(outputs[layer], expected, "engines", "float32", f"layer {layer}")
        assert_same_bytes(engine.pool_bytes(pool), XLA.pool_bytes(want))
    assert len(traced) == 1


@pytest.mark.parametrize("layout", LAYOUTS[::2])
def test_keys_are_split_where_few_programs_would_run(load_engine: LoadEngine, layout: str) -> None:
    engine = load_engine("jax_gpu")
    shape = PoolShape("long", (Group((Cells(1, 32),) * 2, 16),), 80)
    plan, tables = plan_of(shape, layout, "float32"), Tables()
    r = row("a", 2, 1100)
    tables.put(r, 0, range(1, 70))
    batch = engine.prepare(plan, [r], tables, visibility=CAUSAL, num_heads=2)
    assert batch.shape.bound.work[0].num_splits > 1
    rng = np.random.default_rng(1)
    history, query = (
        jnp.asarray(numbers(rng, (n, h, 32), "float32")) for n, h in ((1100, 1), (2, 2))
    )
    slots = np.arange(16, 16 + 1100, dtype=np.int32)
    outputs = []
    for e in (engine, XLA):
        pool = e.write(e.allocate(plan), 1, history, history * 2, slots)
        on = batch if e is engine else e.prepare(plan, [r], tables, visibility=CAUSAL, num_heads=2)
        outputs.append(e.forward_paged(pool, 1, query, None, None, on)[0])
    assert_close(outputs[0], outputs[1], "engines", "float32", layout)


def test_ranks_of_a_mesh_launch_the_same(load_engine: LoadEngine) -> None:
    """Under ``shard_map``, as far as one device goes: equal to the engine without a mesh."""
    engine, plan, tables = load_engine("jax_gpu"), plan_of(PLAIN, "BLHNC", "float32"), Tables()
    kernel = engine.prepare(
        plan, [], tables, visibility=CAUSAL, num_heads=4, bucket=Bucket(1, 1, 1)
    ).shape.bound.kernel
    mesh = Mesh(np.array(jax.devices()[:1]), ("tensor",))
    ranks = ShardedEngine(Ranks(mesh, None, "tensor"), Toolkit("cpu", (kernel,)))
    r = row("a", 6, 6)
    tables.put(r, 0, [4, 9])
    rng = np.random.default_rng(2)
    query, key, value = (jnp.asarray(numbers(rng, (6, n, 32), "float32")) for n in (4, 2, 2))
    sharded = ranks.prepare(plan, [[r]], [tables], visibility=CAUSAL, num_heads=4)
    assert sharded.kernel == "triton"
    got, pool = ranks.forward_paged(ranks.allocate(plan), 1, query, key, value, sharded)
    pool = ranks.copy_blocks(pool, [[(4, 2), (9, 3)]])
    batch = engine.prepare(plan, [r], tables, visibility=CAUSAL, num_heads=4)
    want, one = engine.forward_paged(engine.allocate(plan), 1, query, key, value, batch)
    one = engine.copy_blocks(one, [(4, 2), (9, 3)])
    assert_same_bytes(np.asarray(got).tobytes(), np.asarray(want).tobytes(), "output")
    assert_same_bytes(ranks.pool_bytes(pool)[0], engine.pool_bytes(one), "pool")


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {}


def fault(plant: Callable[[pytest.MonkeyPatch], None]) -> Callable[[pytest.MonkeyPatch], None]:
    FAULTS[plant.__name__] = plant
    return plant


@fault
def head_and_token_strides_swapped(patch: pytest.MonkeyPatch) -> None:
    right = module.place_of_cells
    patch.setattr(module, "place_of_cells", lambda a: right(a)[..., jnp.array([0, 1, 3, 2])])


@fault
def offset_of_a_layer_forgotten(patch: pytest.MonkeyPatch) -> None:
    right = module.place_of_cells
    patch.setattr(module, "place_of_cells", lambda a: right(a).at[..., 0].set(0))


@fault
def tiles_of_another_step(patch: pytest.MonkeyPatch) -> None:
    right = TritonKernel.tables

    def shifted(self: TritonKernel, work: Any, step: Any) -> Any:
        return tuple(np.roll(t, 1, axis=1) for t in right(self, work, step))

    patch.setattr(TritonKernel, "tables", shifted)


@fault
def scale_left_out(patch: pytest.MonkeyPatch) -> None:
    right = module._number
    patch.setattr(module, "_number", lambda value: right(value) * 0 + 1)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_turns_the_suite_red(
    load_engine: LoadEngine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    engine = load_engine("jax_gpu")
    jax.clear_caches()  # a program that was traced before has no fault in it
    FAULTS[name](monkeypatch)
    with pytest.raises((Mismatch, jax.errors.JaxRuntimeError)):
        check_step(
            engine, PLAIN, "LBNHC", steps(4)[1], dtype="float32", kernel="triton", num_heads=4
        )
    monkeypatch.undo()
    jax.clear_caches()
