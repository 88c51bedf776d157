"""The shared suite as functions: run one step on an engine, and compare it with the oracle.

Test modules parametrise over engine, kernel, layout and dtype and call these; the planted
faults call the same functions, so what turns red there is what guards the engines.

Every run starts from a pool full of NaN (:data:`tests.cases.POISON`): only what a valid token
wrote is a number, so a read of anything else shows in the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from layout_core.rows import PagedAttentionRow
from layout_core.views import ResolvedLayout
from tests.cases import (
    NUMPY_DTYPES,
    POISON,
    Array,
    Identity,
    PoolShape,
    Room,
    Step,
    Tables,
    assign_blocks,
    numbers,
    plan_of,
    slots_of,
)
from tests.equivalence.memory import Memory, memory_of
from tests.oracle import Mask, dense_attention, visible
from tests.tolerances import Mismatch, assert_close, assert_same_bytes

ENGINE_KERNELS: tuple[tuple[str, str], ...] = (("torch_cuda", "sdpa"), ("jax_gpu", "xla"))
"""Engines and kernels that must be there and serve every case on the CPU."""

DTYPES: tuple[str, ...] = ("float32", "float16", "bfloat16")

WRITE_TOKENS = 32
"""Tokens of one call of ``write``: one shape, so that an engine that compiles does it once."""

JUNK = 99.0
"""What stands in padded entries of K and V: a number that is not poison, so a write of it shows."""

Dense = dict[tuple[Identity, int], tuple[Array, Array]]
"""K ``[seq_len, Hkv, D]`` and V ``[seq_len, Hkv, Dv]`` by position, for each row and layer."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one step gave."""

    outputs: tuple[Array, ...]  #: for each layer of the plan, ``[T, Hq, Dv]``, padding cut off
    pool: bytes


def draw(shape: PoolShape, step: Step, dtype: str, seed: int) -> Dense:
    """K/V of every row in every layer. Evicted positions hold NaN: no token is there."""
    rng = np.random.default_rng(seed)
    out: Dense = {}
    for r in step.rows:
        layer = 0
        for group in shape.groups:
            for cells in group.layers:
                if (r.identity, layer) not in out:
                    k = numbers(rng, (r.seq_len, cells.kv_heads, cells.head_size), dtype)
                    v = numbers(rng, (r.seq_len, cells.kv_heads, cells.value_size), dtype)
                    k[: r.first_key], v[: r.first_key] = np.nan, np.nan
                    out[r.identity, layer] = (k, v)
                layer += 1
    return out


def draw_queries(step: Step, num_heads: int, head_size: int, dtype: str, seed: int) -> Array:
    """Queries ``[T, Hq, D]`` of the whole step, rows packed one after another."""
    total = sum(r.query_len for r in step.rows)
    return numbers(np.random.default_rng([seed, 7]), (total, num_heads, head_size), dtype)


def mask_of(step: Step, index: int) -> Mask:
    """What the queries of one row see, by the oracle's predicate."""
    r, rule = step.rows[index], step.visibility
    return visible(
        r.query_len,
        r.seq_len,
        kv_start_pos=r.kv_start_pos,
        first_key=r.first_key,
        causal=rule.causal,
        window_left=rule.window_left,
        window_right=rule.window_right,
        chunk=rule.chunk,
        spans=None if step.spans is None else step.spans[index],
    )


def expected_outputs(
    shape: PoolShape,
    step: Step,
    dense: Dense,
    num_heads: int,
    dtype: str,
    seed: int,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
) -> list[Array]:
    """The oracle's output for every layer."""
    out, layer = [], 0
    for group in shape.groups:
        for cells in group.layers:
            query = draw_queries(step, num_heads, cells.head_size, dtype, seed)
            rows, first = [np.zeros((0, num_heads, cells.value_size))], 0
            for index, r in enumerate(step.rows):
                k, v = dense[r.identity, layer]
                part = query[first : first + r.query_len]
                rows.append(
                    dense_attention(part, k, v, mask_of(step, index), scale=scale, softcap=softcap)[
                        0
                    ]
                )
                first += r.query_len
            out.append(np.concatenate(rows))
            layer += 1
    return out


def expected_memory(
    shape: PoolShape, layout: str, dtype: str, dense: Dense, tables: Tables
) -> Memory:
    """Poison, and every valid token's K ‖ V at its place by NumPy's own axis order."""
    memory = memory_of(shape, layout, NUMPY_DTYPES[dtype].itemsize, fill=POISON)
    for (identity, layer), (k, v) in dense.items():
        group, _ = shape_layer(shape, layer)
        ids = tables.blocks[identity, group]
        n = shape.groups[group].block_size
        for p in range(len(k)):
            if not np.isnan(np.asarray(k[p, 0, 0], np.float32)):
                memory.put(layer, ids[p // n], p % n, k[p], v[p])
    return memory


def shape_layer(shape: PoolShape, layer: int) -> tuple[int, int]:
    """Group and place in the group of a layer of the plan."""
    for index, group in enumerate(shape.groups):
        if layer < len(group.layers):
            return index, layer
        layer -= len(group.layers)
    raise IndexError(layer)


def poisoned_pool(engine: Any, resolved: ResolvedLayout) -> Any:
    """A pool that holds NaN in every byte, padded pages and the null block included."""
    return engine.load_bytes(resolved, bytes([POISON]) * resolved.size_bytes)


def write_tokens(
    engine: Any, pool: Any, layer: int, key: Array, value: Array, slots: Sequence[int]
) -> Any:
    """``engine.write`` in calls of :data:`WRITE_TOKENS` tokens, padded with slot −1."""
    for first in range(0, len(slots), WRITE_TOKENS):
        k, v = key[first : first + WRITE_TOKENS], value[first : first + WRITE_TOKENS]
        s = np.full(WRITE_TOKENS, -1, np.int64)
        s[: len(k)] = slots[first : first + WRITE_TOKENS]
        pool = engine.write(
            pool,
            layer,
            engine.from_numpy(padded(k, WRITE_TOKENS, JUNK)),
            engine.from_numpy(padded(v, WRITE_TOKENS, JUNK)),
            engine.from_numpy(s.astype(np.int32)),
        )
    return pool


def padded(array: Array, length: int, fill: float) -> Array:
    """``array`` lengthened along its first axis."""
    out = np.full((length, *array.shape[1:]), fill, array.dtype)
    out[: len(array)] = array
    return out


def write_history(
    engine: Any,
    pool: Any,
    shape: PoolShape,
    step: Step,
    dense: Dense,
    tables: Tables,
    layers: Sequence[int],
) -> Any:
    """Write every token of the rows that the step itself does not write."""
    seen: dict[Identity, PagedAttentionRow] = {}
    for r in step.rows:
        if r.identity not in seen or not r.read_only:
            seen[r.identity] = r
    for layer in layers:
        group, _ = shape_layer(shape, layer)
        n = shape.groups[group].block_size
        keys, values, slots = [], [], []
        for identity, r in seen.items():
            now = range(0) if r.read_only else range(r.kv_start_pos, r.kv_start_pos + r.query_len)
            before = [p for p in range(r.first_key, r.seq_len) if p not in now]
            k, v = dense[identity, layer]
            keys.append(k[before])
            values.append(v[before])
            slots += slots_of(tables.blocks[identity, group], before, n)
        pool = write_tokens(
            engine, pool, layer, np.concatenate(keys), np.concatenate(values), slots
        )
    return pool


def step_tokens(step: Step, dense: Dense, layer: int, length: int) -> tuple[Array, Array]:
    """K and V of the tokens that the step writes, packed as the queries are; junk elsewhere."""
    keys, values = [], []
    for r in step.rows:
        k, v = dense[r.identity, layer]
        if r.read_only:
            keys.append(np.full((r.query_len, *k.shape[1:]), JUNK, k.dtype))
            values.append(np.full((r.query_len, *v.shape[1:]), JUNK, v.dtype))
        else:
            end = r.kv_start_pos + r.query_len
            keys.append(k[r.kv_start_pos : end])
            values.append(v[r.kv_start_pos : end])
    return padded(np.concatenate(keys), length, JUNK), padded(np.concatenate(values), length, JUNK)


def run_step(
    engine: Any,
    shape: PoolShape,
    resolved: ResolvedLayout,
    step: Step,
    dense: Dense,
    tables: Tables,
    *,
    dtype: str,
    kernel: str,
    num_heads: int,
    seed: int,
    room: Room | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    layers: Sequence[int] | None = None,
    query: Array | None = None,
    query_dtype: str | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Outcome:
    """One step on a poisoned pool, through the engine's public calls alone.

    ``query`` replaces the drawn queries, for every layer alike; ``query_dtype`` is the pool's
    dtype unless storage is quantised.
    """
    compute = query_dtype or dtype
    chosen = range(len(resolved.layers)) if layers is None else layers
    pool = write_history(
        engine, poisoned_pool(engine, resolved), shape, step, dense, tables, chosen
    )
    batches: dict[int, Any] = {}
    total = sum(r.query_len for r in step.rows)
    length = total if room is None else room.tokens
    outputs = []
    for layer in chosen:
        group, place = shape_layer(shape, layer)
        cells = shape.groups[group].layers[place]
        if group not in batches:
            batches[group] = engine.prepare(
                resolved,
                step.rows,
                tables,
                visibility=step.visibility,
                num_heads=num_heads,
                group=group,
                spans=step.spans,
                kernel=kernel,
                bucket=None if room is None else room.bucket(shape.groups[group].block_size),
            )
            if kernel not in ("auto", batches[group].kernel):
                raise AssertionError(f"asked for {kernel}, got {batches[group].kernel}")
        if query is None:
            drawn = draw_queries(step, num_heads, cells.head_size, compute, seed)
        else:
            drawn = query
        queries = padded(drawn, length, float("nan"))
        key = value = None
        if step.writes:
            key, value = (engine.from_numpy(a) for a in step_tokens(step, dense, layer, length))
        output, pool = engine.forward_paged(
            pool,
            layer,
            engine.from_numpy(queries),
            key,
            value,
            batches[group],
            softmax_scale=scale,
            softcap=softcap,
            k_scale=k_scale,
            v_scale=v_scale,
        )
        got = np.asarray(engine.to_numpy(output))
        if got.dtype != NUMPY_DTYPES[compute]:
            raise Mismatch(f"output dtype {got.dtype}, expected {compute}")
        if np.asarray(got[total:], np.float32).any():  # NaN counts as true
            raise Mismatch(f"layer {layer}: padded queries have an output that is not zero")
        outputs.append(got[:total].copy())
    return Outcome(tuple(outputs), engine.pool_bytes(pool))


def check_step(
    engine: Any,
    shape: PoolShape,
    layout: str,
    step: Step,
    *,
    dtype: str,
    kernel: str,
    num_heads: int,
    seed: int = 0,
    room: Room | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    resolved: ResolvedLayout | None = None,
    tables: Tables | None = None,
) -> Outcome:
    """Run a step and compare every output with the oracle and every byte with NumPy's order.

    Raises:
        Mismatch: naming layer and what differs.
    """
    plan = plan_of(shape, layout, dtype) if resolved is None else resolved
    dense = draw(shape, step, dtype, seed)
    owned = tables or assign_blocks(shape, step.rows, np.random.default_rng([seed, 3]))
    outcome = run_step(
        engine,
        shape,
        plan,
        step,
        dense,
        owned,
        dtype=dtype,
        kernel=kernel,
        num_heads=num_heads,
        seed=seed,
        room=room,
        scale=scale,
        softcap=softcap,
    )
    compare_outputs(
        outcome,
        expected_outputs(shape, step, dense, num_heads, dtype, seed, scale=scale, softcap=softcap),
        dtype,
        f"{engine.name} {layout} {step.name!r}",
    )
    if resolved is None:
        memory = expected_memory(shape, layout, dtype, dense, owned)
        assert_same_bytes(outcome.pool, memory.data.tobytes(), f"{layout} {step.name!r}: pool")
    return outcome


def compare_outputs(outcome: Outcome, expected: Sequence[Array], dtype: str, where: str) -> None:
    """Every layer's output against the oracle's."""
    for layer, (got, want) in enumerate(zip(outcome.outputs, expected, strict=True)):
        assert_close(got, want, "attention", dtype, f"{where} layer {layer}")
