"""The JAX engine alone: pools as pytrees, donation, programs of the user's own, compilations."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from backends.jax_gpu import JaxBatch, JaxPool, check_donation, create_engine, quantize
from backends.jax_gpu import paged as paged_module
from backends.jax_gpu.compiled import pool_sized_copies
from backends.jax_gpu.kernels import xla
from backends.jax_gpu.paging import PoolPlan
from layout_core.errors import (
    BlockTableError,
    DeviceError,
    IndexLimitError,
    PoolError,
    RowError,
    StaleBatchError,
    TensorError,
    UnsupportedError,
)
from layout_core.rows import Bucket, PagedAttentionRow
from layout_core.views import ResolvedLayout
from layout_core.visibility import Visibility
from tests.cases import (
    GROUPS,
    LAYOUTS,
    MIXED,
    NUMPY_DTYPES,
    PLAIN,
    Cells,
    Group,
    PoolShape,
    plan_of,
)
from tests.oracle import dense_attention, visible
from tests.tolerances import assert_close

ENGINE = create_engine("cpu")
STRICT = create_engine("cpu", strict_donation=True)
FULL = Visibility(causal=False)
HEADS = 4
BUCKET = Bucket(tokens=16, rows=2, blocks=4)


@dataclass
class Tables:
    """Block tables by row name; a test changes them and the version."""

    blocks: dict[str, list[int]]
    version: int = 1
    asked: list[str] = field(default_factory=list)

    def block_ids(self, row: PagedAttentionRow, group: int) -> array[int]:
        self.asked.append(row.request_id)
        return array("i", self.blocks[row.request_id])


def row(name: str, query_len: int, seq_len: int, **more: Any) -> PagedAttentionRow:
    more.setdefault("kv_start_pos", seq_len - query_len)
    return PagedAttentionRow(name, query_len, seq_len, sequence_id=0, **more)


def numbers(*shape: int, seed: int = 0, dtype: Any = np.float32) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


TABLES = Tables({"a": [3, 7, 5], "b": [9, 2, 11, 4]})
ROWS = (row("a", 6, 10), row("b", 5, 13))


def plan(layout: str = "LBNHC", dtype: str = "float32") -> ResolvedLayout:
    return plan_of(PLAIN, layout, dtype)


def batch_of(
    resolved: ResolvedLayout,
    rows: Sequence[PagedAttentionRow] = ROWS,
    tables: Tables = TABLES,
    **more: Any,
) -> JaxBatch:
    more.setdefault("bucket", BUCKET)
    return ENGINE.prepare(resolved, rows, tables, visibility=FULL, num_heads=HEADS, **more)


def step_arrays(seed: int = 0, tokens: int = 16) -> tuple[jax.Array, jax.Array, jax.Array]:
    return (
        jnp.asarray(numbers(tokens, HEADS, 32, seed=seed)),
        jnp.asarray(numbers(tokens, 2, 32, seed=seed + 1)),
        jnp.asarray(numbers(tokens, 2, 32, seed=seed + 2)),
    )


# --- bytes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn"])
def test_cells_lie_where_the_plan_says_and_keep_every_bit(layout: str, dtype: str) -> None:
    """Random bits, NaN payloads among them; slots out of order, one padded, the last one free."""
    resolved = plan(layout, dtype)
    view = resolved.layers[1]
    rng = np.random.default_rng(1)
    kind = NUMPY_DTYPES[dtype]
    slots = np.array([95, 4, -1, 50, 7, 8], np.int32)
    key, value = (
        np.frombuffer(rng.bytes(6 * 2 * 32 * kind.itemsize), kind).reshape(6, 2, 32)
        for _ in range(2)
    )
    before = bytes([0xFF]) * resolved.size_bytes
    pool = ENGINE.load_bytes(resolved, before)
    pool = ENGINE.write(pool, 1, ENGINE.from_numpy(key), ENGINE.from_numpy(value), slots)
    expected = bytearray(before)
    for token, slot in enumerate(slots):
        for head in range(2):
            if slot >= 0:
                at = view.cell_offset(int(slot) // 4, head, int(slot) % 4)
                cell = key[token, head].tobytes() + value[token, head].tobytes()
                expected[at : at + len(cell)] = cell
    assert ENGINE.pool_bytes(pool) == bytes(expected)


def test_mixed_dtypes_and_contents_share_words() -> None:
    """A float32 layer and a bfloat16 layer in one pool: words of 16 bits, exact bytes."""
    from layout_core.resolve import make_config, resolve_layout
    from layout_core.specs import FullAttentionSpec
    from layout_core.tensors import KVCacheGroupSpec

    wide = FullAttentionSpec(4, num_kv_heads=1, head_size=16, dtype="float32")
    narrow = FullAttentionSpec(4, num_kv_heads=1, head_size=24, dtype="bfloat16", head_size_v=40)
    groups = [KVCacheGroupSpec(["wide"], wide), KVCacheGroupSpec(["narrow"], narrow)]
    resolved = resolve_layout(make_config(groups, 6, "BLNHC"))
    pool = ENGINE.allocate(resolved)
    assert pool.words.dtype == np.uint16
    cells = {name: PoolPlan(resolved).cells[i] for i, name in enumerate(("wide", "narrow"))}
    assert {c.rows_per_cell for c in cells.values()} == {1}
    k, v = numbers(2, 1, 16), numbers(2, 1, 16, seed=1)
    pool = ENGINE.write(pool, "wide", jnp.asarray(k), jnp.asarray(v), [4, 5])
    nk, nv = (
        numbers(1, 1, 24).astype(ml_dtypes.bfloat16),
        numbers(1, 1, 40).astype(ml_dtypes.bfloat16),
    )
    pool = ENGINE.write(pool, "narrow", jnp.asarray(nk), jnp.asarray(nv), [8])
    data = ENGINE.pool_bytes(pool)
    for layer, slot, cell in (
        ("wide", 4, k[0].tobytes() + v[0].tobytes()),
        ("wide", 5, k[1].tobytes() + v[1].tobytes()),
        ("narrow", 8, nk[0].tobytes() + nv[0].tobytes()),
    ):
        at = resolved.layer(layer).cell_offset(slot // 4, 0, slot % 4)
        assert data[at : at + len(cell)] == cell


@pytest.mark.parametrize(
    ("cells", "rows_per_cell", "boundary_on_a_row"),
    [(Cells(2, 32, 32, padding=16), 4, True), (Cells(2, 40, 72, padding=4), 28, True),
     (Cells(1, 24, 8, padding=16), 2, False)],
)  # fmt: skip
def test_cells_of_several_rows(cells: Cells, rows_per_cell: int, boundary_on_a_row: bool) -> None:
    """Page padding that C does not divide: a cell is a window of several rows."""
    shape = PoolShape("odd", (Group((cells, cells), 4),), 8)
    resolved = plan_of(shape, "LBNHC", "float32")
    cell = PoolPlan(resolved).cells[0]
    assert cell.rows_per_cell == rows_per_cell
    assert (cell.key_words % cell.words_per_row == 0) is boundary_on_a_row
    heads = cells.kv_heads
    key, value = numbers(3, heads, cells.head_size), numbers(3, heads, cells.value_size, seed=1)
    pool = ENGINE.load_bytes(resolved, bytes([0xFF]) * resolved.size_bytes)
    slots = np.array([5, -1, 18])
    pool = ENGINE.write(pool, 1, jnp.asarray(key), jnp.asarray(value), slots)
    pool = ENGINE.copy_blocks(pool, [(1, 6)])
    data = ENGINE.pool_bytes(pool)
    for token, slot in ((0, 5), (2, 18), (0, 25)):
        for head in range(heads):
            at = resolved.layers[1].cell_offset(slot // 4, head, slot % 4)
            expected = key[token, head].tobytes() + value[token, head].tobytes()
            assert data[at : at + len(expected)] == expected
    written = 3 * heads * (cells.head_size + cells.value_size) * 4
    assert resolved.size_bytes - data.count(0xFF) <= written, "nothing else was touched"


def test_copies_move_whole_blocks_of_one_group_and_nothing_else() -> None:
    resolved = plan_of(MIXED, "BLNHC", "bfloat16")
    before = np.random.default_rng(2).bytes(resolved.size_bytes)
    pool = ENGINE.load_bytes(resolved, before)
    pool = ENGINE.copy_blocks(pool, [(2, 5), (2, 7), (9, 1)])
    expected = bytearray(before)
    for view in resolved.layers:
        for source, target in ((2, 5), (2, 7), (9, 1)):
            for head in range(view.num_kv_heads):
                for token in range(view.block_size):
                    a = view.cell_offset(source, head, token)
                    b = view.cell_offset(target, head, token)
                    expected[b : b + view.shape[3]] = before[a : a + view.shape[3]]
    assert ENGINE.pool_bytes(pool) == bytes(expected)
    assert ENGINE.copy_blocks(pool, []) is pool


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([(1, 2), (3, 2)], r"pairs\[1\]: destination 2 is given twice"),
        ([(1, 2), (2, 3)], r"pairs\[0\]: destination 2 is also a source"),
        ([(1, 0)], r"pairs\[0\]: destination 0 is the null block"),
        ([(1, 24)], r"pairs\[0\]: destination 24 of group 0 is outside \[0, 24\)"),
    ],
)
def test_refused_copies_leave_the_pool(pairs: list[tuple[int, int]], message: str) -> None:
    pool = ENGINE.allocate(plan())
    with pytest.raises(BlockTableError, match=message):
        ENGINE.copy_blocks(pool, pairs)
    assert not any(ENGINE.pool_bytes(pool))


def test_quantize_saturates_and_has_one_nan() -> None:
    given = np.array([466, -1e9, np.inf, 448, 0.0156, 2**-10, -0.0, 17.5, 2**-9 * 1.5], np.float32)
    got = np.asarray(quantize(jnp.asarray(given), 1.0, "float8_e4m3fn")).view(np.uint8)
    with np.errstate(over="ignore"):
        expected = np.clip(given, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert got[0] == 0x7E
    assert got.tolist() == expected.tolist()
    for sign in (0x7FC00001, 0xFFC00001):
        nan = np.array([sign], np.uint32).view(np.float32)
        assert np.asarray(quantize(jnp.asarray(nan), 1.0, "fp8")).view(np.uint8).tolist() == [0x7F]


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_quantize_rounds_once_in_a_program_and_out_of_it(name: str) -> None:
    """Every float16 and many float32 just beside the midpoints of two neighbours."""
    kind = np.dtype(getattr(ml_dtypes, name))
    values = np.arange(256, dtype=np.uint8).view(kind).astype(np.float32)
    values = np.unique(values[np.isfinite(values)])
    middle = (values[1:] + values[:-1]) / 2
    near = np.concatenate([np.nextafter(middle, np.float32(s)) for s in (-np.inf, np.inf)])
    halves = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)
    given = np.concatenate([values, middle, near, halves[np.isfinite(halves)]])
    largest = values.max()
    for scale in (1.0, 0.3):
        wide = given / np.float32(scale)
        expected = np.clip(wide, -largest, largest).astype(kind).view(np.uint8)
        call = jax.jit(lambda x, scale=scale: quantize(x, scale, name))
        for got in (call(jnp.asarray(given)), quantize(jnp.asarray(given), scale, name)):
            assert np.array_equal(np.asarray(got).view(np.uint8), expected)


def test_quantised_storage_is_read_with_its_scales() -> None:
    resolved = plan(dtype="float8_e4m3fn")
    q, k, v = step_arrays()
    stored_k, stored_v = quantize(k, 0.5, "fp8"), quantize(v, 0.25, "fp8")
    tables = Tables({"a": [3, 7, 5, 9]})
    batch = batch_of(resolved, [row("a", 16, 16)], tables)
    out, _ = ENGINE.forward_paged(
        ENGINE.allocate(resolved), 0, q, stored_k, stored_v, batch, k_scale=0.5, v_scale=0.25
    )
    wide_k = np.asarray(stored_k).astype(np.float64) * 0.5
    wide_v = np.asarray(stored_v).astype(np.float64) * 0.25
    expected, _ = dense_attention(np.asarray(q), wide_k, wide_v, np.ones((16, 16), bool))
    assert_close(np.asarray(out), expected, "attention", "float32")


# --- donation -----------------------------------------------------------------------------------


def test_a_consumed_pool_says_who_consumed_it() -> None:
    resolved = plan()
    q, k, v = step_arrays()
    batch = batch_of(resolved)
    first = ENGINE.allocate(resolved)
    second = ENGINE.write(first, 0, k[:1], v[:1], [4])
    with pytest.raises(PoolError, match="pool: it was consumed by write; use the pool that"):
        ENGINE.pool_bytes(first)
    third = ENGINE.copy_blocks(second, [(1, 2)])
    _, fourth = ENGINE.forward_paged(third, 0, q, k, v, batch)
    for pool, by in ((second, "copy_blocks"), (third, "forward_paged")):
        with pytest.raises(PoolError, match=f"consumed by {by};"):
            ENGINE.write(pool, 0, k[:1], v[:1], [4])
        with pytest.raises(PoolError, match=f"consumed by {by};"):
            jax.jit(lambda pool: pool)(pool)
    _, same = ENGINE.forward_paged(fourth, 0, q, None, None, batch)
    assert same is fourth, "a read leaves the pool"
    program = jax.jit(lambda pool: ENGINE.write(pool, 0, k[:1], v[:1], np.array([5])),
                      donate_argnums=0)  # fmt: skip
    program(fourth)
    with pytest.raises(PoolError, match="consumed by a program that it was donated to"):
        ENGINE.forward_paged(fourth, 0, q, None, None, batch)


def test_a_refused_call_consumes_nothing() -> None:
    resolved = plan()
    q, k, v = step_arrays()
    pool = ENGINE.allocate(resolved)
    batch = batch_of(resolved)
    refusals: list[tuple[type[Exception], str, Any]] = [
        (TensorError, r"key: layer .* expects shape \[1, 2, 32\], got \[2, 2, 32\]",
         lambda: ENGINE.write(pool, 0, k[:2], v[:1], [4])),
        (TensorError, "value: layer .* expects dtype float32, got float16",
         lambda: ENGINE.write(pool, 0, k[:1], v[:1].astype(jnp.float16), [4])),
        (TensorError, r"slots: .*expects integers of shape \[T\], got float32\[1\]",
         lambda: ENGINE.write(pool, 0, k[:1], v[:1], jnp.ones(1))),
        (BlockTableError, r"slots\[1\]: layer .* has slots in \[0, 96\), and −1 pads; got 96",
         lambda: ENGINE.write(pool, 0, k[:2], v[:2], [4, 96])),
        (TensorError, r"query: layer .* expects shape \[16, 4, 32\], got \[15, 4, 32\]",
         lambda: ENGINE.forward_paged(pool, 0, q[:15], k, v, batch)),
        (TensorError, "query: layer .* expects one of float32, float16, bfloat16, got int32",
         lambda: ENGINE.forward_paged(pool, 0, q.astype(jnp.int32), k, v, batch)),
        (TensorError, "key, value: layer .* expects both or neither, got key",
         lambda: ENGINE.forward_paged(pool, 0, q, k, None, batch)),
        (TensorError, "softcap: expected 0",
         lambda: ENGINE.forward_paged(pool, 0, q, k, v, batch, softcap=-1.0)),
        (PoolError, "batch: it was prepared for another plan",
         lambda: ENGINE.forward_paged(pool, 0, q, k, v, batch_of(plan("BHLNC")))),
    ]  # fmt: skip
    for error, message, call in refusals:
        with pytest.raises(error, match=message):
            call()
        assert not any(ENGINE.pool_bytes(pool)), message


def test_calls_change_the_pool_in_place_and_views_are_short_lived() -> None:
    resolved = plan()
    _, k, v = step_arrays()
    pool = STRICT.allocate(resolved)
    address = pool.words.unsafe_buffer_pointer()
    for _ in range(2):
        pool = STRICT.write(pool, 0, k, v, np.arange(4, 20))
        pool = STRICT.copy_blocks(pool, [(1, 6)])
        STRICT.pool_bytes(pool)
        assert pool.words.unsafe_buffer_pointer() == address


@pytest.mark.parametrize("view", ["numpy", "dlpack"])
def test_strict_mode_refuses_a_copy_behind_a_live_view(view: str) -> None:
    """Field case 27: JAX copies in silence while a view is alive."""
    _, k, v = step_arrays()
    pool = STRICT.load_bytes(plan(), bytes([7]) * plan().size_bytes)
    held = np.asarray(pool.words) if view == "numpy" else np.from_dlpack(pool.words)
    with pytest.raises(
        PoolError, match=r"write copied it .* a NumPy or DLPack view of it is alive"
    ):
        STRICT.write(pool, 0, k[:1], v[:1], [4])
    assert held.view(np.uint8).min() == held.view(np.uint8).max() == 7
    assert STRICT.pool_bytes(pool) == bytes([7]) * plan().size_bytes, "still there and usable"


def test_check_donation_looks_at_a_program() -> None:
    resolved = plan()
    _, k, v = step_arrays()
    pool = ENGINE.allocate(resolved)

    def change(pool: JaxPool) -> JaxPool:
        return ENGINE.write(pool, 0, k, v, np.arange(4, 20))

    check_donation(jax.jit(change, donate_argnums=0).lower(pool).compile(), pool)
    with pytest.raises(PoolError, match=f"aliases 0 bytes, the pool has {resolved.size_bytes}"):
        check_donation(jax.jit(change).lower(pool).compile(), pool)

    def read_the_old_one_afterwards(pool: JaxPool) -> tuple[JaxPool, jax.Array]:
        return change(pool), pool.words[0]  # the write does not wait for this read

    compiled = jax.jit(read_the_old_one_afterwards, donate_argnums=0).lower(pool).compile()
    rows, width = pool.plan.shape
    copies = pool_sized_copies(compiled.as_text(), pool.plan.shape)
    planted = f"  %c = u32[{rows},{width}]{{1,0}} copy(%p)\n  %d = u32[{rows}]{{0}} copy(%p)"
    assert pool_sized_copies(planted, pool.plan.shape) == [planted.splitlines()[0].strip()]
    if copies:  # what XLA does here is its own affair; where it copies, the check says so
        with pytest.raises(PoolError, match="copies of the pool's size, the first is"):
            check_donation(compiled, pool)
    else:
        check_donation(compiled, pool)


# --- programs of the user's own -----------------------------------------------------------------


def eager_steps(
    pool: JaxPool, batch: JaxBatch, inputs: Any, layers: int
) -> tuple[list[Any], JaxPool]:
    outputs = []
    for step in range(len(inputs[0])):
        for layer in range(layers):
            q, k, v = (x[step] for x in inputs)
            out, pool = ENGINE.forward_paged(pool, layer, q + layer, k - layer, v * 2, batch)
            outputs.append(np.asarray(out))
    return outputs, pool


def test_a_denoise_loop_is_one_program_in_place() -> None:
    """3 steps of 2 layers in scans, the layer traced: the same outputs and bytes as call by call,
    the pool aliased, no copy of its shape, and one compilation for rows of other lengths."""
    resolved = plan("BLNHC")
    stacked = [jnp.stack(x) for x in zip(*(step_arrays(seed=10 * s) for s in range(3)))]
    traces = []

    def loop(pool: JaxPool, batch: JaxBatch, q: Any, k: Any, v: Any) -> tuple[JaxPool, Any]:
        traces.append(1)

        def one_step(pool: JaxPool, inputs: Any) -> tuple[JaxPool, Any]:
            q, k, v = inputs

            def one_layer(pool: JaxPool, layer: jax.Array) -> tuple[JaxPool, Any]:
                out, pool = ENGINE.forward_paged(pool, layer, q + layer, k - layer, v * 2, batch)
                return pool, out

            return lax.scan(one_layer, pool, jnp.arange(2, dtype=jnp.int32))

        return lax.scan(one_step, pool, (q, k, v))

    program = jax.jit(loop, donate_argnums=0)
    batch = batch_of(resolved)
    pool = ENGINE.allocate(resolved)
    compiled = program.lower(pool, batch, *stacked).compile()
    check_donation(compiled, pool)
    limit = pool.words.nbytes
    big = ENGINE.allocate(plan_of(PoolShape("big", PLAIN.groups, 4096), "BLNHC", "float32"))
    big_batch = batch_of(big.resolved)
    memory = program.lower(big, big_batch, *stacked).compile().memory_analysis()
    assert memory.temp_size_in_bytes < big.words.nbytes / 20 + limit, "no pool-sized temporary"

    traces.clear()
    expected, expected_pool = eager_steps(ENGINE.allocate(resolved), batch, stacked, 2)
    address = pool.words.unsafe_buffer_pointer()
    pool, outputs = program(pool, batch, *stacked)
    assert pool.words.unsafe_buffer_pointer() == address
    assert ENGINE.pool_bytes(pool) == ENGINE.pool_bytes(expected_pool)
    for got, want in zip(np.asarray(outputs).reshape(6, 16, HEADS, 32), expected):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)

    other = batch_of(resolved, [row("b", 9, 16), row("a", 1, 2)])
    pool, _ = program(pool, other, *stacked)
    assert traces == [], "traced once for each plan above, and never again for other lengths"


def test_equal_layers_and_layouts_share_one_compilation() -> None:
    """Field case 28, for the engine's own programs: place and lengths are data."""
    q, k, v = step_arrays()
    before = None
    for layout in ("LBNHC", "BLHNC"):
        resolved = plan(layout)
        pool = ENGINE.allocate(resolved)
        for layer in (0, 1):
            for rows in (ROWS, (row("a", 2, 2),), (row("b", 16, 16),)):
                _, pool = ENGINE.forward_paged(pool, layer, q, k, v, batch_of(resolved, rows))
                count = paged_module._step_program._cache_size()
                before = count if before is None else before
                assert count == before


@pytest.mark.parametrize("read", [False, True])
def test_a_piecewise_batch_is_one_program_for_each_layer(
    monkeypatch: pytest.MonkeyPatch, read: bool
) -> None:
    """Spans that differ from row to row cost no further call; ``xla`` is one program a layer."""
    ran: list[str] = []

    def counted(name: str) -> None:
        program = getattr(paged_module, name)

        def run(*arguments: Any) -> Any:
            ran.append(name)
            return program(*arguments)

        monkeypatch.setattr(paged_module, name, run)

    counted("_step_program")
    counted("_attend_program")
    resolved = plan()
    rows = [row("a", 6, 10), row("b", 4, 7)]
    tables = Tables({"a": [3, 7, 5], "b": [2, 4]})
    batch = ENGINE.prepare(
        resolved, rows, tables, visibility=Visibility(causal=True), num_heads=4,
        spans=[[(4, 6), (8, 10)], None],
    )  # fmt: skip
    pool = ENGINE.allocate(resolved)
    q, k, v = (jnp.ones((10, h, 32), jnp.float32) for h in (4, 2, 2))
    for layer in range(2):
        key, value = (None, None) if read else (k, v)
        _, pool = ENGINE.forward_paged(pool, layer, q, key, value, batch)
    assert ran == ["_attend_program" if read else "_step_program"] * 2


def test_a_traced_layer_needs_equal_layers() -> None:
    resolved = plan_of(MIXED, "LBNHC", "float32")
    pool = ENGINE.allocate(resolved)
    _, k, v = step_arrays()
    with pytest.raises(UnsupportedError, match="it may mean layers of 2 unlike shapes"):
        ENGINE.write(pool, jnp.int32(0), k[:1], v[:1], [4])
    with pytest.raises(TensorError, match=r"layer: expected a scalar integer, got float32\[\]"):
        ENGINE.write(ENGINE.allocate(plan()), jnp.float32(0), k[:1], v[:1], [4])


def test_shards_of_heads_equal_one_device() -> None:
    """The functions are plain inside ``shard_map``; one device here, the same program."""
    from jax.sharding import Mesh, PartitionSpec

    resolved = plan()
    batch = batch_of(resolved)
    q, k, v = step_arrays()
    mesh = Mesh(np.array(jax.devices("cpu")[:1]), ("heads",))

    def body(pool: JaxPool, q: Any, k: Any, v: Any, batch: JaxBatch) -> tuple[Any, JaxPool]:
        return ENGINE.forward_paged(pool, 0, q, k, v, batch)

    heads = PartitionSpec(None, "heads", None)
    sharded = jax.jit(
        jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(PartitionSpec(), heads, heads, heads, PartitionSpec()),
            out_specs=(heads, PartitionSpec()),
            check_vma=False,
        )
    )
    got, _ = sharded(ENGINE.allocate(resolved), q, k, v, batch)
    want, _ = ENGINE.forward_paged(ENGINE.allocate(resolved), 0, q, k, v, batch)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


# --- batches ------------------------------------------------------------------------------------


def test_a_batch_of_an_older_table_is_refused() -> None:
    resolved = plan()
    tables = Tables({"a": [3, 7, 5]})
    rows = [row("a", 6, 10)]
    batch = batch_of(resolved, rows, tables)
    pool = ENGINE.allocate(resolved)
    q, k, v = step_arrays()
    tables.version = 2
    with pytest.raises(StaleBatchError, match=r"prepared under version 1 .* now at 2"):
        ENGINE.forward_paged(pool, 0, q, k, v, batch)
    assert not any(ENGINE.pool_bytes(pool))
    tables.blocks["a"] = [1, 2, 3]
    batch = ENGINE.update(batch, rows, tables)
    _, pool = ENGINE.forward_paged(pool, 0, q, k, v, batch)
    at = resolved.layers[0].cell_offset(2, 0, 0)  # position 4 is now in block 2
    assert ENGINE.pool_bytes(pool)[at : at + 128] == np.asarray(k[0, 0]).tobytes()


def test_update_of_unchanged_rows_asks_nobody_and_moves_nothing() -> None:
    tables = Tables({"a": [3, 7, 5]})
    rows = [row("a", 6, 10)]
    batch = batch_of(plan(), rows, tables)
    tables.asked.clear()
    assert ENGINE.update(batch, list(rows), tables) is batch
    assert tables.asked == []
    moved = ENGINE.update(batch, [row("a", 3, 10)], tables)
    assert moved is not batch
    assert tables.asked == ["a"]
    shapes = [x.shape for x in jax.tree.leaves(batch)]
    assert [x.shape for x in jax.tree.leaves(moved)] == shapes


def test_update_keeps_the_shapes() -> None:
    tables = Tables({"a": [3, 7, 5, 9]})
    batch = batch_of(plan(), [row("a", 6, 10)], tables, bucket=None)
    with pytest.raises(
        RowError, match=r"num_tokens 6; the new rows need 7\. Give prepare a bucket"
    ):
        ENGINE.update(batch, [row("a", 7, 10)], tables)
    with pytest.raises(RowError, match="max_blocks 3; the new rows need 4"):
        ENGINE.update(batch, [row("a", 6, 14)], tables)
    leaves, tree = jax.tree.flatten(batch)
    with pytest.raises(RowError, match="rebuilt from its leaves and carries no rows"):
        ENGINE.update(jax.tree.unflatten(tree, leaves), [row("a", 6, 10)], tables)


def test_a_batch_of_another_group_is_refused() -> None:
    resolved = plan_of(GROUPS, "LBNHC", "float32")
    batch = batch_of(resolved, group=1)
    q, k, v = step_arrays()
    with pytest.raises(PoolError, match="belongs to group 0, the batch was prepared for group 1"):
        ENGINE.forward_paged(ENGINE.allocate(resolved), 0, q, k, v, batch)


def test_kernels_are_chosen_by_name() -> None:
    assert batch_of(plan()).kernel == "xla"
    with pytest.raises(
        UnsupportedError, match="jax_gpu on cpu expects one of auto, xla, got 'sdpa'"
    ):
        batch_of(plan(), kernel="sdpa")
    with pytest.raises(TensorError, match="num_heads: expected a multiple of the 2 KV heads"):
        ENGINE.prepare(plan(), ROWS, TABLES, visibility=FULL, num_heads=3)


# --- numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_long_tables_walk_only_the_visible_chunks(kv_heads: int) -> None:
    """1,500 keys in a table of 2,048, NaN everywhere else, a window that crosses chunks."""
    shape = PoolShape("long", (Group((Cells(kv_heads, 32),), 32),), 80)
    resolved = plan_of(shape, "LBHNC", "float32")
    blocks = np.random.default_rng(3).permutation(79)[:64] + 1
    tables = Tables({"a": blocks.tolist()})
    k, v = (numbers(1500, kv_heads, 32, seed=seed) for seed in (1, 2))
    q = numbers(640, 2 * kv_heads, 32, seed=3)
    rule = Visibility(causal=True, window_left=700)
    batch = ENGINE.prepare(
        resolved,
        [row("a", 600, 1500)],
        tables,
        visibility=rule,
        num_heads=2 * kv_heads,
        bucket=Bucket(640, 1, 64),
    )
    pool = ENGINE.load_bytes(resolved, bytes([0xFF]) * resolved.size_bytes)
    slots = np.array([blocks[p // 32] * 32 + p % 32 for p in range(900)])
    pool = ENGINE.write(pool, 0, jnp.asarray(k[:900]), jnp.asarray(v[:900]), slots)
    padded_k, padded_v = (np.pad(x[900:], ((0, 40), (0, 0), (0, 0))) for x in (k, v))
    out, _ = ENGINE.forward_paged(
        pool, 0, jnp.asarray(q), jnp.asarray(padded_k), jnp.asarray(padded_v), batch, softcap=3.0
    )
    mask = visible(600, 1500, kv_start_pos=900, causal=True, window_left=700)
    expected, _ = dense_attention(q[:600], k, v, mask, softcap=3.0)
    assert_close(np.asarray(out)[:600], expected, "attention", "float32")
    assert not np.asarray(out)[600:].any()


def test_the_kernel_gives_the_log_of_the_sum() -> None:
    resolved = plan()
    q, k, v = step_arrays()
    rows = [row("a", 6, 6), PagedAttentionRow("b", 5, 3, -2, sequence_id=0, read_only=True)]
    batch = ENGINE.prepare(
        resolved, rows, TABLES, visibility=Visibility(causal=True), num_heads=HEADS, bucket=BUCKET
    )
    _, pool = ENGINE.forward_paged(ENGINE.allocate(resolved), 0, q, k, v, batch)
    a = batch.arrays
    address = paged_module.place_of(pool, 0)[2]
    out, lse = xla.paged_attention(
        pool.words, pool.plan.cells[0], address, q, a.block_table, a.cu_seqlens,
        a.row_lo, a.row_hi, a.lo, a.hi,
        score_scale=jnp.float32(32**-0.5), value_scale=jnp.float32(1), softcap=None,
    )  # fmt: skip
    want, want_lse = dense_attention(
        *(np.asarray(x)[:6] for x in (q, k, v)), visible(6, 6, causal=True)
    )
    assert_close(np.asarray(lse)[:6], want_lse, "lse", "float32")
    assert_close(np.asarray(out)[:6], want, "attention", "float32")
    blind = np.asarray(lse)[6:8]
    assert (blind == -np.inf).all(), "two queries before position 0 see nothing"
    assert not np.asarray(out)[6:8].any()
    assert np.isfinite(np.asarray(lse)[8:11]).all()


# --- devices, limits, arrays --------------------------------------------------------------------


def test_devices_are_named_or_refused() -> None:
    assert (create_engine().device, create_engine().name) == ("cpu", "jax_gpu")
    for device in ("tpu", "cuda:", "cuda:x", "cpu:1", "gpu"):
        with pytest.raises(DeviceError, match="device: jax_gpu expects 'cpu', 'cuda' or 'cuda:N'"):
            create_engine(device)
    if not any(d.platform == "gpu" for d in jax.devices()):
        with pytest.raises(DeviceError, match="'cuda' was asked for, JAX has only cpu"):
            create_engine("cuda")


def test_a_pool_whose_rows_pass_int32_is_refused_before_it_is_made() -> None:
    shape = PoolShape("huge", (Group((Cells(1, 8),), 4),), 2**29)
    with pytest.raises(IndexLimitError, match="has 2147483648 rows of 64 bytes"):
        ENGINE.allocate(plan_of(shape, "LBNHC", "float32"))


def test_load_bytes_wants_the_whole_pool() -> None:
    with pytest.raises(PoolError, match=f"data: expected {plan().size_bytes} bytes.*, got 3"):
        ENGINE.load_bytes(plan(), b"abc")


def test_arrays_come_and_go_bit_for_bit() -> None:
    rng = np.random.default_rng(5)
    for kind in NUMPY_DTYPES.values():
        given = np.frombuffer(rng.bytes(64 * kind.itemsize), kind).reshape(4, 16)
        got = ENGINE.to_numpy(ENGINE.from_numpy(given))
        assert got.dtype == kind
        assert got.tobytes() == given.tobytes()
    source = np.zeros(4, np.float32)
    device_array = ENGINE.from_numpy(source)
    source[:] = 1
    assert not np.asarray(device_array).any(), "a copy, not a view of the caller's memory"
    assert ENGINE.from_numpy(np.array([1, -1], np.int64)).dtype == np.int32
    with pytest.raises(TensorError, match="int64 values do not fit int32"):
        ENGINE.from_numpy(np.array([2**31]))
    with pytest.raises(TensorError, match="expected at most 32-bit elements, got float64"):
        ENGINE.from_numpy(np.zeros(1))
