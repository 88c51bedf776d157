"""Faults that others reported in public, with the right value (numbers: see the field cases)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from layout_core.errors import BlockTableError, IllegalCombinationError
from layout_core.layouts import KVCacheLayout
from layout_core.legality import LEGAL_COMBINATIONS
from layout_core.resolve import make_config, resolve_layout
from layout_core.rows import compute_slot_mapping
from layout_core.tensors import KVCacheGroupSpec
from layout_core.views import ResolvedLayout
from layout_core.visibility import Spans, Visibility
from tests.cases import (
    CAUSAL,
    FULL,
    LAYOUTS,
    PADDED,
    PLAIN,
    POISON,
    Array,
    Cells,
    Group,
    PoolShape,
    Room,
    Step,
    Tables,
    assign_blocks,
    layer_name,
    numbers,
    plan_of,
    room_for,
    row,
    slots_of,
    spec_of,
    steps,
)
from tests.engines.suite import (
    DTYPES,
    ENGINE_KERNELS,
    Dense,
    check_step,
    compare_outputs,
    draw,
    draw_queries,
    expected_outputs,
    mask_of,
    padded,
    poisoned_pool,
    run_step,
    step_tokens,
    write_tokens,
)
from tests.equivalence.memory import memory_of
from tests.oracle import dense_attention
from tests.tolerances import assert_close, assert_same_bits, assert_same_bytes

LoadEngine = Callable[[str], Any]
CountCase = Callable[[str, str, str, str], None]

engines = pytest.mark.parametrize(("engine", "kernel"), ENGINE_KERNELS)
layouts = pytest.mark.parametrize("layout", LAYOUTS)


ROOM = room_for(4)


def attend(
    engine: Any,
    kernel: str,
    layout: str,
    step: Step,
    value: Callable[[int, int], float],
    *,
    num_heads: int = 4,
    shape: PoolShape = PLAIN,
    dtype: str = "float32",
    room: Room | None = ROOM,
) -> Array:
    """Outputs ``[T, Hq]`` where all scores are 0 and V is ``value(position, KV head)``.

    So an output is the mean of the visible values. K is random, the pool full of NaN.
    """
    dense: Dense = draw(shape, step, dtype, seed=3)
    for k, v in dense.values():
        for position in range(len(k)):
            for head in range(v.shape[1]):
                v[position, head] = value(position, head)
    total = sum(r.query_len for r in step.rows)
    outcome = run_step(
        engine,
        shape,
        plan_of(shape, layout, dtype),
        step,
        dense,
        assign_blocks(shape, step.rows, np.random.default_rng(0)),
        dtype=dtype,
        kernel=kernel,
        num_heads=num_heads,
        seed=0,
        room=room,
        query=numbers(np.random.default_rng(0), (total, num_heads, 32), dtype) * 0,
    )
    output = outcome.outputs[0]
    assert (output == output[..., :1]).all(), "all elements of V are equal, so are the output's"
    return np.asarray(output[..., 0], np.float64)


def wide_plan(layout: str, dtype: str) -> ResolvedLayout:
    """PLAIN with blocks twice as far apart."""
    cells, n = PLAIN.groups[0].layers[0], PLAIN.groups[0].block_size
    dense = spec_of(cells, n, dtype)
    layers = len(PLAIN.groups[0].layers)
    times = layers if KVCacheLayout[layout].is_block_outermost else 1
    spec = replace(dense, block_stride_alignment=2 * times * dense.page_size_bytes)
    names = [layer_name(0, i) for i in range(layers)]
    plan = resolve_layout(make_config([KVCacheGroupSpec(names, spec)], PLAIN.num_blocks, layout))
    assert plan.layers[0].strides[0] == 2 * plan_of(PLAIN, layout, dtype).layers[0].strides[0]
    return plan


# --- case 1 ------------------------------------------------------------------------------------


@engines
@layouts
@pytest.mark.parametrize("dtype", DTYPES)
def test_case_1_strides_and_padding_change_no_output(
    load_engine: LoadEngine,
    count_case: CountCase,
    engine: str,
    kernel: str,
    layout: str,
    dtype: str,
) -> None:
    """A dense pool, one with twice the block stride, one with padded pages: equal outputs."""
    loaded = load_engine(engine)
    legal = LEGAL_COMBINATIONS[KVCacheLayout[layout]]
    plans = [plan_of(PLAIN, layout, dtype)]
    if legal.aligned_blocks:
        plans.append(wide_plan(layout, dtype))
    if legal.page_padding:
        plans.append(plan_of(PADDED, layout, dtype))
    step = steps(4)[3]
    dense = draw(PLAIN, step, dtype, seed=1)
    tables = assign_blocks(PLAIN, step.rows, np.random.default_rng(1))
    outcomes = [
        run_step(
            loaded, PLAIN, plan, step, dense, tables, dtype=dtype, kernel=kernel, num_heads=4,
            seed=1, room=room_for(4),
        )
        for plan in plans
    ]  # fmt: skip
    want = expected_outputs(PLAIN, step, dense, 4, dtype, 1)
    for plan, outcome in zip(plans, outcomes):
        compare_outputs(outcome, want, dtype, f"{layout} {plan.layers[0].strides}")
        for a, b in zip(outcome.outputs, outcomes[0].outputs):
            assert_same_bits(a, b, f"{layout}: strides {plan.layers[0].strides}")
        count_case(engine, kernel, layout, dtype)
    assert len(plans) == (1 if layout == "LHBNC" else 2 if layout == "BHLNC" else 3)


# --- case 9 ------------------------------------------------------------------------------------


@engines
@layouts
@pytest.mark.parametrize("dtype", DTYPES)
def test_case_9_a_position_past_a_row_is_written_nowhere(
    load_engine: LoadEngine,
    count_case: CountCase,
    engine: str,
    kernel: str,
    layout: str,
    dtype: str,
) -> None:
    """Rows [[5], [9]], block 16, row 0, positions 0 and 16: slots [80, -1], never [80, 144]."""
    loaded = load_engine(engine)
    slots = compute_slot_mapping([5], [0, 16], 16)
    assert list(slots) == [80, -1]
    shape = PoolShape("case 9", (Group((Cells(2, 32),), 16),), 10)
    rng = np.random.default_rng(0)
    key, value = (numbers(rng, (2, 2, 32), dtype) for _ in "kv")
    pool = write_tokens(
        loaded, poisoned_pool(loaded, plan_of(shape, layout, dtype)), 0, key, value, slots
    )
    memory = memory_of(shape, layout, key.dtype.itemsize, fill=POISON)
    memory.put(0, 5, 0, key[0], value[0])
    assert_same_bytes(loaded.pool_bytes(pool), memory.data.tobytes(), layout)
    count_case(engine, kernel, layout, dtype)


@engines
def test_case_9_prepare_refuses_a_row_longer_than_its_blocks(
    load_engine: LoadEngine, engine: str, kernel: str
) -> None:
    shape = PoolShape("case 9", (Group((Cells(2, 32),), 16),), 10)
    r = row("a", 1, 17)
    tables = Tables()
    tables.put(r, 0, [5])
    with pytest.raises(BlockTableError, match="position 16 is past the row's 1 blocks of 16"):
        load_engine(engine).prepare(
            plan_of(shape, "LBNHC", "float32"), [r], tables, visibility=CAUSAL, num_heads=2,
            kernel=kernel,
        )  # fmt: skip


# --- cases 12, 13, 19: counts of visible keys --------------------------------------------------


@engines
@layouts
def test_case_12_bottom_right_and_an_empty_row(
    load_engine: LoadEngine, count_case: CountCase, engine: str, kernel: str, layout: str
) -> None:
    """Start −2, 5 queries, 3 keys: queries 0 and 1 give 0, 2 sees one key, 4 sees three."""
    step = Step(
        "case 12",
        (
            row("a", 5, 3, -2, read_only=True),
            row("b", 2, 0, context="none", read_only=True),
            row("c", 0, 0),
        ),
        CAUSAL,
    )
    got = attend(load_engine(engine), kernel, layout, step, lambda k, h: 1.0 + k)
    for head in range(4):
        want = [0.0, 0.0, 1.0, 1.5, 2.0, 0.0, 0.0]
        assert_close(got[:, head], want, "attention", "float32", "case 12")
    count_case(engine, kernel, layout, "float32")


@engines
@layouts
def test_case_13_a_window_open_to_the_right(
    load_engine: LoadEngine, count_case: CountCase, engine: str, kernel: str, layout: str
) -> None:
    """q = 0, V[k] = k, 3 queries, 8 keys, start 5, left 2: 5.0, 5.5, 6.0."""
    rule = Visibility(causal=False, window_left=2)
    step = Step("case 13", (row("a", 3, 8, 5),), rule)
    got = attend(load_engine(engine), kernel, layout, step, lambda k, h: float(k))
    assert_close(got[:, 0], [5.0, 5.5, 6.0], "attention", "float32", "case 13")
    count_case(engine, kernel, layout, "float32")


@engines
def test_case_13_a_long_row(
    load_engine: LoadEngine, count_case: CountCase, engine: str, kernel: str
) -> None:
    """300 queries over 4096 keys, left 333, bottom-right: query 0 gives 3779, over 633 keys."""
    shape = PoolShape("case 13", (Group((Cells(1, 32),), 16),), 260)
    step = Step("case 13", (row("a", 300, 4096),), Visibility(causal=False, window_left=333))
    got = attend(
        load_engine(engine),
        kernel,
        "LBNHC",
        step,
        lambda k, h: float(k),
        num_heads=1,
        shape=shape,
        room=None,
    )
    want = [(p - 333 + 4095) / 2 for p in range(3796, 4096)]
    assert want[0] == 3779
    assert_close(got[:, 0], want, "attention", "float32", "case 13, long")
    count_case(engine, kernel, "LBNHC", "float32")


@engines
@layouts
@pytest.mark.parametrize("dtype", DTYPES)
def test_case_19_spans(
    load_engine: LoadEngine,
    count_case: CountCase,
    engine: str,
    kernel: str,
    layout: str,
    dtype: str,
) -> None:
    """Spans [2,6) and [8,16), queries 4 to 11: visible keys 6,6,7,8,16,16,16,16."""
    spans: Spans = [(2, 6), (8, 16)]
    step = Step("case 19", (row("a", 8, 16, 4),), CAUSAL, (spans,))
    got = attend(load_engine(engine), kernel, layout, step, lambda k, h: float(k), dtype=dtype)
    want = [(n - 1) / 2 for n in (6, 6, 7, 8, 16, 16, 16, 16)]
    assert_close(got[:, 0], want, "attention", dtype, "case 19")
    count_case(engine, kernel, layout, dtype)


# --- cases 14, 15, 16 --------------------------------------------------------------------------


@engines
@layouts
def test_case_14_active_rows_in_any_order(
    load_engine: LoadEngine, count_case: CountCase, engine: str, kernel: str, layout: str
) -> None:
    """Of 8 rows that own blocks, 3, 7 and 1 are active: their outputs, in that order."""
    loaded = load_engine(engine)
    everyone = [row(f"r{i}", 3, 5 + i) for i in range(8)]
    tables = assign_blocks(PLAIN, everyone, np.random.default_rng(5))

    def run(order: tuple[int, ...]) -> list[Array]:
        step = Step("case 14", tuple(everyone[i] for i in order), CAUSAL)
        dense = draw(PLAIN, Step("all", tuple(everyone), CAUSAL), "float32", seed=6)
        query = numbers(np.random.default_rng(7), (8, 3, 4, 32), "float32")[list(order)]
        outcome = run_step(
            loaded, PLAIN, plan_of(PLAIN, layout, "float32"), step, dense, tables,
            dtype="float32", kernel=kernel, num_heads=4, seed=0, room=room_for(4),
            query=query.reshape(-1, 4, 32),
        )  # fmt: skip
        return list(outcome.outputs[0].reshape(len(order), 3, 4, 32))

    active = run((3, 7, 1))
    assert_same_bits(np.stack(run((1, 3, 7))), np.stack([active[2], active[0], active[1]]), layout)
    assert_close(run((7,))[0], active[1], "attention", "float32", "row 7 alone")
    assert np.abs(active[0] - active[1]).max() > 0.01
    count_case(engine, kernel, layout, "float32")


@engines
@layouts
def test_case_15_query_heads_read_their_kv_head(
    load_engine: LoadEngine, count_case: CountCase, engine: str, kernel: str, layout: str
) -> None:
    """6 query heads over 2 KV heads, V[h] = h: [0, 0, 0, 1, 1, 1]."""
    step = Step("case 15", (row("a", 2, 6),), FULL)
    got = attend(load_engine(engine), kernel, layout, step, lambda k, h: float(h), num_heads=6)
    for query in got:
        assert_close(query, [0, 0, 0, 1, 1, 1], "attention", "float32", "case 15")
    count_case(engine, kernel, layout, "float32")


@engines
@layouts
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("prefixes", [(5, 9), (9, 5)])
def test_case_16_two_cfg_rows_of_unlike_prefixes(
    load_engine: LoadEngine,
    count_case: CountCase,
    engine: str,
    kernel: str,
    layout: str,
    dtype: str,
    prefixes: tuple[int, int],
) -> None:
    """Prefixes 5 and 9, target 4, padding NaN, V = 1; then swapped: every output is 1."""
    step = Step(
        "case 16",
        tuple(row("cfg", 4, p + 4, branch=i) for i, p in enumerate(prefixes)),
        CAUSAL,
        tuple(((p, p + 4),) for p in prefixes),
    )
    got = attend(load_engine(engine), kernel, layout, step, lambda k, h: 1.0, dtype=dtype)
    assert_close(got, np.ones((8, 4)), "attention", dtype, "case 16")
    count_case(engine, kernel, layout, dtype)


# --- wishes ------------------------------------------------------------------------------------


@engines
@layouts
@pytest.mark.parametrize("dtype", DTYPES)
def test_w1_non_causal_and_piecewise_paged_attention(
    load_engine: LoadEngine,
    count_case: CountCase,
    engine: str,
    kernel: str,
    layout: str,
    dtype: str,
) -> None:
    for name, rule, spans in (
        ("non-causal", FULL, None),
        ("piecewise", FULL, (((1, 6), (9, 11)), ((0, 7),))),
    ):
        step = Step(f"W1 {name}", (row("a", 9, 13, 3), row("b", 7, 7)), rule, spans)
        check_step(
            load_engine(engine), PLAIN, layout, step, dtype=dtype, kernel=kernel, num_heads=4,
            room=room_for(4),
        )  # fmt: skip
        count_case(engine, kernel, layout, dtype)


W3 = PoolShape("W3", (Group((Cells(8, 256),), 16), Group((Cells(1, 512),), 64)), 8)


@engines
@layouts
def test_w3_groups_of_unlike_heads_and_block_sizes(
    load_engine: LoadEngine, count_case: CountCase, engine: str, kernel: str, layout: str
) -> None:
    """(16 tokens, 8 heads, 256) and (64, 1, 512) share a pool; where they cannot, it is refused."""
    if layout == "LHBNC":
        with pytest.raises(IllegalCombinationError, match=r"unlike \(H, N, C\)"):
            plan_of(W3, layout, "bfloat16")
        return
    plan = plan_of(W3, layout, "bfloat16")
    assert plan.size_bytes == 8 * 16 * 8 * 512 * 2
    assert [v.block_size for v in plan.layers] == [16, 64]
    step = Step("W3", (row("a", 5, 40), row("b", 3, 17)), CAUSAL)
    check_step(load_engine(engine), W3, layout, step, dtype="bfloat16", kernel=kernel, num_heads=8)
    count_case(engine, kernel, layout, "bfloat16")


@engines
@layouts
def test_denoise_steps_rewrite_the_target_and_keep_the_prefix(
    load_engine: LoadEngine, count_case: CountCase, engine: str, kernel: str, layout: str
) -> None:
    """Step 0 writes prefix and target, later steps the target alone: prefix bytes never change."""
    loaded = load_engine(engine)
    plan = plan_of(PLAIN, layout, "float32")
    rows = (row("cfg", 11, 11, branch=0), row("cfg", 7, 7, branch=1))
    later = (row("cfg", 4, 11, branch=0), row("cfg", 4, 7, branch=1))
    spans: tuple[Spans, ...] = (((7, 11),), ((3, 7),))
    tables = assign_blocks(PLAIN, rows, np.random.default_rng(9))
    pool = poisoned_pool(loaded, plan)
    memory = memory_of(PLAIN, layout, 4, fill=POISON)
    dense = draw(PLAIN, Step("", rows, CAUSAL), "float32", seed=0)
    for number in range(3):
        now = rows if number == 0 else later
        step = Step(f"denoise step {number}", now, CAUSAL, spans)
        if number:
            fresh = draw(PLAIN, step, "float32", seed=number)
            for identity_layer, (k, v) in dense.items():
                start = len(k) - 4
                k[start:], v[start:] = (a[start:] for a in fresh[identity_layer])
        query = draw_queries(step, 4, 32, "float32", number)
        bucket = room_for(4).bucket(4)
        keys, values = step_tokens(step, dense, 0, bucket.tokens)
        batch = loaded.prepare(
            plan, now, tables, visibility=CAUSAL, num_heads=4, spans=spans, kernel=kernel,
            bucket=bucket,
        )  # fmt: skip
        output, pool = loaded.forward_paged(
            pool,
            0,
            *(loaded.from_numpy(a) for a in (padded(query, bucket.tokens, 0.0), keys, values)),
            batch,
        )
        first = 0
        for index, r in enumerate(now):
            k, v = dense[r.identity, 0]
            part = slice(first, first + r.query_len)
            want = dense_attention(query[part], k, v, mask_of(step, index))[0]
            got = np.asarray(loaded.to_numpy(output))[part]
            assert_close(got, want, "attention", "float32", f"{layout} {step.name}")
            ids = tables.blocks[r.identity, 0]
            for p, slot in enumerate(slots_of(ids, range(r.seq_len), 4)):
                memory.put(0, *divmod(slot, 4), k[p], v[p])
            first += r.query_len
        assert_same_bytes(loaded.pool_bytes(pool), memory.data.tobytes(), f"{layout} {step.name}")
    count_case(engine, kernel, layout, "float32")
