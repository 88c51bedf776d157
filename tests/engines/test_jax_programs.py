"""The engine's functions inside programs: exported, mapped by ``vmap``, compiled once a bucket."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from backends.jax_gpu import JaxBatch, JaxPool
from backends.jax_gpu import paged as paged_module
from backends.jax_gpu.compiled import check_donation
from backends.jax_gpu.export import export_program, load_program
from layout_core.errors import MissingPackageError, PoolError
from layout_core.rows import Bucket
from layout_core.visibility import Visibility
from tests.cases import LAYOUTS
from tests.engines.test_jax_paged import (
    BUCKET,
    ENGINE,
    HEADS,
    ROWS,
    TABLES,
    Tables,
    batch_of,
    numbers,
    plan,
    row,
    step_arrays,
)
from tests.tolerances import assert_close

Step = tuple[jax.Array, JaxPool]


def step(pool: JaxPool, batch: JaxBatch, q: jax.Array, k: jax.Array, v: jax.Array) -> Step:
    return ENGINE.forward_paged(pool, 1, q, k, v, batch)


# --- export -------------------------------------------------------------------------------------


def test_an_exported_step_serves_every_layout_and_donates() -> None:
    """From one layout's portable pool; lowered for CUDA too, with no GPU there."""
    arrays = step_arrays()
    made = ENGINE.allocate(plan()).portable()
    data = export_program(
        "step", step, made, batch_of(plan()).portable(), *arrays, platforms=("cpu", "cuda")
    )
    program = load_program(data)
    assert (program.name, program.platforms) == ("step", ("cpu", "cuda"))
    for layout in LAYOUTS:
        resolved = plan(layout)
        want, expected = step(ENGINE.allocate(resolved), batch_of(resolved), *arrays)
        pool = ENGINE.allocate(resolved)
        places, address = pool.plan, pool.words.unsafe_buffer_pointer()
        arguments = (batch_of(resolved).portable(), *arrays)
        check_donation(program.compile(pool.portable(), *arguments), pool)
        got, new = program(pool.portable(), *arguments)
        assert_close(np.asarray(got), np.asarray(want), "engines", "float32", layout)
        assert new.words.unsafe_buffer_pointer() == address
        assert ENGINE.pool_bytes(new.placed_as(places)) == ENGINE.pool_bytes(expected)
        with pytest.raises(PoolError, match="consumed by a program that it was donated to"):
            ENGINE.pool_bytes(pool)


def test_an_exported_program_refuses_what_it_was_not_traced_for() -> None:
    """Offsets are constants in a program: another layout would be read at the wrong ones."""
    arrays = step_arrays()
    resolved = plan("LBNHC")
    pool, batch = ENGINE.allocate(resolved), batch_of(resolved)
    program = load_program(export_program("step", step, pool, batch, *arrays))
    other = plan("BLHNC")
    half = arrays[0].astype(jnp.float16)
    wider = batch_of(resolved, bucket=Bucket(16, 3, 4))
    refused = [
        (ENGINE.allocate(other), (batch_of(other), *arrays),
         r"arguments\[0\]: layer 'group0.layer0' of group 0, 2 KV heads, blocks of 4, "
         r"32 \+ 32 float32 in 1 rows, 96 slots, at row 0, strides \[8, 1, 2\]\), "
         r"got \(.*strides \[16, 4, 1\]\)"),
        (pool.portable(), (batch_of(resolved).portable(), *arrays), r"got \(.*, anywhere\)"),
        (pool, (batch, half, *arrays[1:]), r"got \(arguments\[2\]: array float16\[16, 4, 32\]\)"),
        (pool, (batch, *arrays[:2]), r"it was exported for \d+ arrays and layers, got \d+"),
        (pool, (wider, *arrays), r"arguments\[1\]: array int32\[2, 4\]\), got \(.*int32\[3, 4\]\)"),
    ]  # fmt: skip
    for given, arguments, message in refused:
        assert not program.serves(given, *arguments)
        with pytest.raises(PoolError, match=f"program 'step': .*{message}"):
            program(given, *arguments)
    assert not any(ENGINE.pool_bytes(pool)), "still there and untouched"
    assert program.serves(pool, batch, *arrays)
    want, _ = step(ENGINE.allocate(resolved), batch, *arrays)
    assert_close(
        np.asarray(program(pool, batch, *arrays)[0]), np.asarray(want), "engines", "float32"
    )


def test_bytes_that_are_no_program_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PoolError, match="data: expected the bytes of export_program"):
        load_program(b"abc")
    with pytest.raises(PoolError, match="data: expected format 1, got 2"):
        load_program(b'pagestride program\n{"format": 2}\n')
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"exported program needs flatbuffers.*\[jax\]"):
        load_program(b"abc")


# --- vmap ---------------------------------------------------------------------------------------


def test_reads_map_over_queries() -> None:
    """Several sets of queries over the same pages: samplers or heads of a model that share K/V."""
    resolved = plan("BLNHC")
    batch = batch_of(resolved)
    _, pool = step(ENGINE.allocate(resolved), batch, *step_arrays())
    queries = jnp.asarray(numbers(3, 16, HEADS, 32, seed=9))

    def read(query: jax.Array) -> jax.Array:
        return ENGINE.forward_paged(pool, 1, query, None, None, batch)[0]

    got = jax.jit(jax.vmap(read))(queries)
    for one, query in zip(got, queries, strict=True):
        assert_close(np.asarray(one), np.asarray(read(query)), "engines", "float32")


def test_reads_map_over_batches_of_one_shape() -> None:
    """Rows of other lengths and tables, stacked: each sample sees its own rows' keys alone."""
    resolved = plan()
    fill = batch_of(resolved, [row("a", 12, 12), row("b", 4, 16)])
    _, pool = step(ENGINE.allocate(resolved), fill, *step_arrays())
    batches = [
        batch_of(resolved, rows)
        for rows in (ROWS, [row("b", 3, 16)], [row("b", 9, 9), row("a", 2, 12)])
    ]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)
    queries = jnp.asarray(numbers(3, 16, HEADS, 32, seed=9))

    def read(query: jax.Array, batch: JaxBatch) -> jax.Array:
        return ENGINE.forward_paged(pool, 1, query, None, None, batch)[0]

    got = jax.jit(jax.vmap(read))(queries, stacked)
    for one, query, batch in zip(got, queries, batches, strict=True):
        assert_close(np.asarray(one), np.asarray(read(query, batch)), "engines", "float32")


# --- compilations -------------------------------------------------------------------------------


def test_one_compilation_for_a_bucket_and_one_more_for_another() -> None:
    """Field case 28: other lengths, tables, layers and visibility in one bucket share a program."""
    resolved = plan("LHBNC")
    arrays = step_arrays(seed=3, tokens=24)
    bucket = Bucket(tokens=24, rows=3, blocks=5)
    tables = Tables({"a": [3, 7, 5, 1, 8], "b": [9, 2, 11, 4, 6]})
    count = paged_module._step_program._cache_size
    before = count()
    pool = ENGINE.allocate(resolved)
    for layer in (0, 1):
        for rows in ([row("a", 20, 20)], [row("b", 3, 17), row("a", 5, 9)], [row("a", 1, 4)]):
            for rule in (Visibility(causal=True), Visibility(causal=False, window_left=3)):
                batch = ENGINE.prepare(
                    resolved, rows, tables, visibility=rule, num_heads=HEADS, bucket=bucket
                )
                _, pool = ENGINE.forward_paged(pool, layer, *arrays, batch)
    assert count() == before + 1
    other = batch_of(resolved, tables=TABLES, bucket=Bucket(24, 3, BUCKET.blocks))
    ENGINE.forward_paged(pool, 0, *arrays, other)
    assert count() == before + 2
