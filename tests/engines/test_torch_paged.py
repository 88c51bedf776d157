"""The torch engine alone: paged attention against the oracle, and what it refuses."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from backends.torch_cuda import create_engine
from backends.torch_cuda.dtypes import quantize
from backends.torch_cuda.paged import paged_attention
from layout_core.errors import (
    BlockTableError,
    DeviceError,
    PoolError,
    RowError,
    StaleBatchError,
    TensorError,
    UnsupportedError,
)
from layout_core.layouts import KVCacheLayout
from layout_core.resolve import make_config, resolve_layout, single_group_config
from layout_core.rows import Bucket, PagedAttentionRow
from layout_core.specs import FullAttentionSpec
from layout_core.tensors import KVCacheGroupSpec
from layout_core.views import ResolvedLayout
from layout_core.visibility import Visibility
from tests.oracle import dense_attention, visible
from tests.tolerances import assert_close, assert_same_bits, assert_same_bytes

LAYOUTS = tuple(KVCacheLayout.__members__)
DTYPES = ("float32", "float16", "bfloat16")
ENGINE = create_engine("cpu")


class Tables:
    """Block tables by row identity."""

    def __init__(self, blocks: dict[tuple[str, int | str], Sequence[int]]) -> None:
        self.blocks = blocks
        self._version = 0

    @property
    def version(self) -> int:
        return self._version

    def change(self) -> None:
        self._version += 1

    def block_ids(self, row: PagedAttentionRow, group: int) -> array[int]:
        return array("i", self.blocks[row.identity])


def plan(
    layout: str = "LBNHC",
    dtype: str = "float32",
    *,
    num_blocks: int = 24,
    block_size: int = 8,
    kv_heads: int = 2,
    head_size: int = 32,
    layers: int = 2,
    **fields: Any,
) -> ResolvedLayout:
    spec = FullAttentionSpec(
        block_size=block_size, num_kv_heads=kv_heads, head_size=head_size, dtype=dtype, **fields
    )
    names = [f"layer.{i}" for i in range(layers)]
    return resolve_layout(single_group_config(spec, num_blocks, names, layout))


def poisoned(resolved: ResolvedLayout) -> Any:
    return ENGINE.load_bytes(resolved, b"\xff" * resolved.size_bytes)


def random(rng: np.random.Generator, *shape: int, dtype: str = "float32") -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal(shape).astype(np.float32)).to(getattr(torch, dtype))


def row(query_len: int, seq_len: int, start: int = 0, **fields: Any) -> PagedAttentionRow:
    fields.setdefault("sequence_id", 0)
    fields.setdefault("request_id", "r")
    return PagedAttentionRow(query_len=query_len, seq_len=seq_len, kv_start_pos=start, **fields)


def slots_of(ids: Sequence[int], count: int, block_size: int) -> torch.Tensor:
    return torch.tensor([ids[p // block_size] * block_size + p % block_size for p in range(count)])


RULES = {
    "full": (Visibility(causal=False), None),
    "causal": (Visibility(causal=True), None),
    "window": (Visibility(causal=True, window_left=11), None),
    "two-sided window": (Visibility(causal=False, window_left=5, window_right=3), None),
    "chunk": (Visibility(causal=True, chunk=16), None),
    "spans": (Visibility(causal=True), [(5, 9), (40, 77)]),
    "no spans": (Visibility(causal=False), []),
}


def rule_arguments(visibility: Visibility, spans: Any) -> dict[str, Any]:
    return {
        "causal": visibility.causal,
        "window_left": visibility.window_left,
        "window_right": visibility.window_right,
        "chunk": visibility.chunk,
        "spans": spans,
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rule", RULES)
def test_two_steps_of_ragged_rows_in_a_poisoned_pool(layout: str, dtype: str, rule: str) -> None:
    """A prefill, then a target that is rewritten over the written prefix; all else is NaN."""
    visibility, spans = RULES[rule]
    resolved = plan(layout, dtype, layers=3)
    rng = np.random.default_rng(0)
    tables = Tables({("r", 0): [7, 3, 12, 5, 9, 1, 20, 4, 2, 6], ("r", 1): [8, 10], ("s", 0): []})
    lengths = {("r", 0): 77, ("r", 1): 15, ("s", 0): 0}
    keys = {i: random(rng, n, 2, 32, dtype=dtype) for i, n in lengths.items()}
    values = {i: random(rng, n, 2, 32, dtype=dtype) for i, n in lengths.items()}
    pool = poisoned(resolved)
    spans_of = [spans, None if spans is None else [(2, 15)], None if spans is None else []]
    steps = (
        [row(77, 77), row(15, 15, sequence_id=1), row(0, 0, request_id="s")],
        [row(20, 77, 57), row(4, 15, 11, sequence_id=1), row(0, 0, request_id="s")],
    )
    for rows in steps:
        query = random(rng, sum(r.query_len for r in rows), 4, 32, dtype=dtype)
        at = [slice(r.kv_start_pos, r.kv_start_pos + r.query_len) for r in rows]
        if rows is steps[1]:  # the target's K/V change
            for r, where in zip(rows, at, strict=True):
                keys[r.identity][where] = random(rng, r.query_len, 2, 32, dtype=dtype)
        key = torch.cat([keys[r.identity][where] for r, where in zip(rows, at, strict=True)])
        value = torch.cat([values[r.identity][where] for r, where in zip(rows, at, strict=True)])
        batch = ENGINE.prepare(
            resolved, rows, tables, visibility=visibility, num_heads=4, spans=spans_of
        )
        assert batch.kernel == "sdpa"
        for layer in (0, "layer.1", resolved.layers[2]):
            out, same = ENGINE.forward_paged(pool, layer, query, key, value, batch)
            assert same is pool
            assert out.dtype == query.dtype
            start = 0
            for r, row_spans in zip(rows, spans_of, strict=True):
                part = slice(start, start + r.query_len)
                start += r.query_len
                mask = visible(
                    r.query_len,
                    r.seq_len,
                    kv_start_pos=r.kv_start_pos,
                    **rule_arguments(visibility, row_spans),
                )
                expected, _ = dense_attention(
                    query[part].double().numpy(),
                    keys[r.identity].double().numpy(),
                    values[r.identity].double().numpy(),
                    mask,
                )
                assert_close(out[part].double().numpy(), expected, "attention", dtype, rule)


@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("rule", RULES)
def test_lse_softcap_and_scale(rule: str, softcap: float) -> None:
    visibility, spans = RULES[rule]
    resolved = plan()
    rng = np.random.default_rng(1)
    tables = Tables({("r", 0): [7, 3, 12, 5, 9, 1, 20, 4, 2, 6]})
    rows = [row(77, 77)]
    query, key, value = (random(rng, 77, heads, 32) for heads in (6, 2, 2))
    batch = ENGINE.prepare(
        resolved, rows, tables, visibility=visibility, num_heads=6, spans=[spans]
    )
    out, lse = paged_attention(
        poisoned(resolved),
        0,
        query,
        key,
        value,
        batch,
        softmax_scale=0.3,
        softcap=softcap,
        return_lse=True,
    )
    assert lse is not None
    mask = visible(77, 77, **rule_arguments(visibility, spans))
    expected, expected_lse = dense_attention(
        query.numpy(), key.numpy(), value.numpy(), mask, scale=0.3, softcap=softcap
    )
    assert_close(out.numpy(), expected, "attention", "float32")
    assert_close(lse.numpy(), expected_lse, "lse", "float32")
    if not softcap:
        plain, _ = ENGINE.forward_paged(
            poisoned(resolved), 0, query, key, value, batch, softmax_scale=0.3
        )
        assert_close(plain.numpy(), expected, "attention", "float32")


def test_queries_that_see_nothing_give_zero_and_minus_infinity() -> None:
    """Case 12: bottom-right, 5 queries over 3 keys."""
    resolved = plan()
    pool = poisoned(resolved)
    rng = np.random.default_rng(2)
    tables = Tables({("r", "text"): [4]})
    key, value = random(rng, 3, 2, 32), random(rng, 3, 2, 32)
    ENGINE.write(pool, 0, key, value, torch.tensor([32, 33, 34]))
    rows = [row(5, 3, -2, sequence_id=None, context_id="text", read_only=True)]
    query = random(rng, 5, 4, 32)
    batch = ENGINE.prepare(resolved, rows, tables, visibility=Visibility(causal=True), num_heads=4)
    out, lse = paged_attention(pool, 0, query, None, None, batch, return_lse=True)
    assert lse is not None
    assert torch.equal(out[:2], torch.zeros(2, 4, 32))
    assert bool((lse[:2] == -torch.inf).all())
    assert torch.allclose(out[2], value[0].repeat_interleave(2, 0))
    expected, _ = dense_attention(
        query.numpy(), key.numpy(), value.numpy(), visible(5, 3, kv_start_pos=-2, causal=True)
    )
    assert_close(out.numpy(), expected, "attention", "float32")


def test_a_bucket_pads_with_zero_outputs_and_writes_nothing() -> None:
    resolved = plan()
    pool = ENGINE.allocate(resolved)
    tables = Tables({("r", 0): [4, 9]})
    batch = ENGINE.prepare(
        resolved,
        [row(11, 11)],
        tables,
        visibility=Visibility(causal=False),
        num_heads=4,
        bucket=Bucket(tokens=16, rows=3, blocks=4),
    )
    rng = np.random.default_rng(3)
    query, key, value = (random(rng, 16, heads, 32) for heads in (4, 2, 2))
    key[11:] = value[11:] = torch.nan
    out, _ = ENGINE.forward_paged(pool, 0, query, key, value, batch)
    assert torch.equal(out[11:], torch.zeros(5, 4, 32))
    assert bool(torch.isfinite(out).all())
    assert not bool(torch.isnan(pool.storage.view(torch.float32)).any())
    # other lengths in the same bucket refill the same device tensors
    before = {name: getattr(batch.tensors, name).data_ptr() for name in ("slots", "lo", "hi")}
    again = ENGINE.update(batch, [row(5, 14, 9)], tables)
    assert again is batch
    assert before == {n: getattr(batch.tensors, n).data_ptr() for n in ("slots", "lo", "hi")}
    assert batch.tensors.slots.tolist() == [73, 74, 75, 76, 77] + [-1] * 11
    query, key, value = (random(rng, 16, heads, 32) for heads in (4, 2, 2))
    out, _ = ENGINE.forward_paged(pool, 0, query, key, value, batch)
    fresh = ENGINE.prepare(
        resolved, [row(5, 14, 9)], tables, visibility=Visibility(causal=False), num_heads=4
    )
    other, _ = ENGINE.forward_paged(pool, 0, query[:5], None, None, fresh)
    assert torch.equal(out[:5], other)


def test_update_of_unchanged_rows_does_nothing_and_changed_ones_are_checked() -> None:
    resolved = plan()
    tables = Tables({("r", 0): [4, 9, 2]})
    rows = [row(4, 12, 8)]
    batch = ENGINE.prepare(resolved, rows, tables, visibility=Visibility(causal=False), num_heads=2)
    work = batch.work
    assert ENGINE.update(batch, rows, tables).work is work
    with pytest.raises(RowError, match="update expects the 1 rows and 4 tokens"):
        ENGINE.update(batch, [row(5, 13, 8)], tables)
    with pytest.raises(RowError, match="update has room for 2 blocks in each row, a row needs 3"):
        ENGINE.update(batch, [row(4, 20, 16)], tables)
    assert batch.work is work
    ENGINE.update(batch, [row(4, 8, 4)], tables)
    assert batch.work is not work
    assert batch.tensors.seq_lens.tolist() == [8]


def test_a_stale_batch_raises_and_writes_nothing() -> None:
    resolved = plan()
    pool = ENGINE.allocate(resolved)
    tables = Tables({("r", 0): [4]})
    batch = ENGINE.prepare(
        resolved, [row(8, 8)], tables, visibility=Visibility(causal=True), num_heads=2
    )
    tables.change()
    ones = torch.ones(8, 2, 32)
    with pytest.raises(StaleBatchError, match="version 0 of the block tables, which are now at 1"):
        ENGINE.forward_paged(pool, 0, ones, ones, ones, batch)
    assert ENGINE.pool_bytes(pool) == bytes(resolved.size_bytes)
    ENGINE.update(batch, [row(8, 8)], tables)
    out, _ = ENGINE.forward_paged(pool, 0, ones, ones, ones, batch)
    assert torch.equal(out, ones)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn", "uint8"])
def test_write_moves_bits_and_skips_padded_slots(layout: str, dtype: str) -> None:
    """Random bit patterns, NaN payloads among them, from strided inputs."""
    resolved = plan(layout, dtype, head_size=16, layers=2)
    view = resolved.layers[1]
    size = view.dtype.itemsize
    rng = np.random.default_rng(4)
    before = rng.integers(0, 256, resolved.size_bytes, np.uint8).tobytes()
    pool = ENGINE.load_bytes(resolved, before)
    wide = rng.integers(0, 256, (6, 2, 2, 16 * size), np.uint8)
    both = torch.from_numpy(wide).view(getattr(torch, dtype))
    key, value = both[:, :, 0], both[:, :, 1]
    assert not key.is_contiguous()
    slots = torch.tensor([9, -1, 183, 16, -1, 10], dtype=torch.int32)
    assert ENGINE.write(pool, "layer.1", key, value, slots) is pool
    expected = bytearray(before)
    for token, slot in enumerate(slots.tolist()):
        for head in range(2):
            if slot >= 0:
                at = view.cell_offset(slot // 8, head, slot % 8)
                expected[at : at + 32 * size] = wide[token, head].tobytes()
    assert_same_bytes(ENGINE.pool_bytes(pool), bytes(expected), layout)


def test_write_refuses_what_does_not_fit_and_writes_nothing() -> None:
    resolved = plan(dtype="bfloat16")
    pool = ENGINE.allocate(resolved)
    good = torch.ones(3, 2, 32, dtype=torch.bfloat16)
    slots = torch.tensor([8, 9, 10])
    cases: list[tuple[Any, Any, Any, str]] = [
        (good.float(), good, slots, "key: layer 'layer.0' expects dtype bfloat16, got float32"),
        (good, good[:2], slots, r"value: .* expects shape \[3, 2, 32\], got \[2, 2, 32\]"),
        (good[..., :16], good, slots, r"key: .* expects shape \[3, 2, 32\], got \[3, 2, 16\]"),
        (good, good, slots.float(), "slots: .* expects int64 or int32"),
    ]
    for key, value, where, message in cases:
        with pytest.raises(TensorError, match=message):
            ENGINE.write(pool, 0, key, value, where)
    for bad in (-2, 192):
        with pytest.raises(BlockTableError, match=rf"slots in \[0, 192\) or -1, got {bad}"):
            ENGINE.write(pool, 0, good, good, torch.tensor([8, 9, bad]))
    assert ENGINE.pool_bytes(pool) == bytes(resolved.size_bytes)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_copy_blocks_copies_all_layers_of_the_group_and_nothing_else(layout: str) -> None:
    specs = [
        FullAttentionSpec(
            block_size=4, num_kv_heads=2, head_size=8, dtype="bfloat16", page_size_padded=None
        )
        for _ in range(2)
    ]
    groups = [KVCacheGroupSpec([f"{g}.{i}" for i in range(2)], specs[g]) for g in range(2)]
    resolved = resolve_layout(make_config(groups, 10, layout))
    before = np.random.default_rng(5).integers(0, 256, resolved.size_bytes, np.uint8).tobytes()
    pool = ENGINE.load_bytes(resolved, before)
    assert ENGINE.copy_blocks(pool, [(3, 7), (3, 2), (0, 9)], group=1) is pool
    expected = bytearray(before)
    for index in resolved.group_layers(1):
        view = resolved.layers[index]
        for source, target in ((3, 7), (3, 2), (0, 9)):
            for head in range(2):
                for token in range(4):
                    a = view.cell_offset(source, head, token)
                    b = view.cell_offset(target, head, token)
                    expected[b : b + 32] = before[a : a + 32]
    assert_same_bytes(ENGINE.pool_bytes(pool), bytes(expected), layout)


def test_copy_blocks_refuses_bad_pairs_and_copies_nothing() -> None:
    resolved = plan()
    before = np.random.default_rng(6).integers(0, 256, resolved.size_bytes, np.uint8).tobytes()
    pool = ENGINE.load_bytes(resolved, before)
    for pairs, message in (
        ([(1, 2), (3, 2)], r"pairs\[1\]: destination 2 is given twice"),
        ([(1, 2), (2, 3)], r"pairs\[0\]: destination 2 is also a source"),
        ([(1, 1)], r"pairs\[0\]: destination 1 is also a source"),
        ([(1, 0)], "destination 0 is the null block"),
        ([(1, 24)], r"destination 24 of group 0 is outside \[0, 24\)"),
        ([(-1, 2)], r"source -1 of group 0 is outside \[0, 24\)"),
    ):
        with pytest.raises(BlockTableError, match=message):
            ENGINE.copy_blocks(pool, pairs)
    assert ENGINE.pool_bytes(pool) == before


def test_kernel_blocks_and_manager_blocks_hold_the_same_bytes() -> None:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=16, dtype="float32")
    config = single_group_config(spec, 8, ["a", "b"], "LBNHC")
    whole = resolve_layout(config)
    split = resolve_layout(config, kernel_block_sizes=[4])
    rng = np.random.default_rng(7)
    tables = Tables({("r", 0): [5, 2, 7]})
    query, key, value = random(rng, 40, 2, 16), random(rng, 40, 1, 16), random(rng, 40, 1, 16)
    outputs, pools = [], []
    for resolved in (whole, split):
        pool = ENGINE.allocate(resolved)
        batch = ENGINE.prepare(
            resolved, [row(40, 40)], tables, visibility=Visibility(causal=True), num_heads=2
        )
        outputs.append(ENGINE.forward_paged(pool, 1, query, key, value, batch)[0])
        ENGINE.copy_blocks(pool, [(5, 1)])
        pools.append(ENGINE.pool_bytes(pool))
    assert split.layers[0].blocks_per_manager_block == 4
    assert torch.equal(*outputs)
    assert_same_bytes(pools[1], pools[0])


def test_forward_paged_refuses_what_does_not_fit_and_writes_nothing() -> None:
    groups = [
        KVCacheGroupSpec(
            [f"{g}.{i}" for i in range(2)],
            FullAttentionSpec(block_size=8, num_kv_heads=2, head_size=16, dtype="float32"),
        )
        for g in range(2)
    ]
    resolved = resolve_layout(make_config(groups, 6, "LBNHC"))
    pool = ENGINE.allocate(resolved)
    tables = Tables({("r", 0): [4]})
    rule = Visibility(causal=True)
    batch = ENGINE.prepare(resolved, [row(8, 8)], tables, visibility=rule, num_heads=4)
    query, kv = torch.ones(8, 4, 16), torch.ones(8, 2, 16)
    cases: list[tuple[type[Exception], str, tuple[Any, ...], dict[str, Any]]] = [
        (PoolError, "layer '1.0': it belongs to group 1", ("1.0", query, kv, kv), {}),
        (TensorError, r"query: .* expects shape \[8, 4, 16\]", (0, query[:7], kv, kv), {}),
        (TensorError, "query: .* dtype float32, got float16", (0, query.half(), kv, kv), {}),
        (TensorError, "value: .* got value=None alone", (0, query, kv, None), {}),
        (TensorError, "key: .* got key=None alone", (0, query, None, kv), {}),
        (TensorError, "softcap: expected 0", (0, query, kv, kv), {"softcap": -1.0}),
        (TensorError, "softmax_scale: expected a finite", (0, query, kv, kv),
         {"softmax_scale": float("nan")}),
        (TensorError, "k_scale: expected a finite number > 0", (0, query, kv, kv),
         {"k_scale": 0.0}),
    ]  # fmt: skip
    for error, message, arguments, options in cases:
        with pytest.raises(error, match=message):
            ENGINE.forward_paged(pool, *arguments, batch, **options)
    other = ENGINE.allocate(plan())
    with pytest.raises(PoolError, match="prepared for another plan"):
        ENGINE.forward_paged(other, 0, query, kv, kv, batch)
    assert ENGINE.pool_bytes(pool) == bytes(resolved.size_bytes)
    with pytest.raises(TensorError, match=r"2 KV heads of layer '0\.0', got 3"):
        ENGINE.prepare(resolved, [row(8, 8)], tables, visibility=rule, num_heads=3)


def test_kernels_are_chosen_by_name_or_refused() -> None:
    resolved = plan(dtype="uint8")
    tables = Tables({("r", 0): [4]})
    with pytest.raises(UnsupportedError, match="expects one of auto, sdpa, got 'warp'"):
        ENGINE.prepare(
            resolved,
            [row(8, 8)],
            tables,
            visibility=Visibility(causal=True),
            num_heads=2,
            kernel="warp",
        )
    for kernel in ("auto", "sdpa"):
        with pytest.raises(UnsupportedError, match=r"sdpa: layer 'layer\.0' stores uint8"):
            ENGINE.prepare(
                resolved,
                [row(8, 8)],
                tables,
                visibility=Visibility(causal=True),
                num_heads=2,
                kernel=kernel,
            )


def test_quantised_storage_reads_back_times_its_scales() -> None:
    resolved = plan(dtype="float8_e4m3fn", block_size=4)
    tables = Tables({("r", 0): [7, 3, 12]})
    rng = np.random.default_rng(8)
    query = random(rng, 11, 4, 32, dtype="bfloat16")
    key, value = random(rng, 11, 2, 32), random(rng, 11, 2, 32)
    stored_key = ENGINE.quantize(key, 0.5, "float8_e4m3fn")
    stored_value = ENGINE.quantize(value, 0.25, "float8_e4m3fn")
    batch = ENGINE.prepare(
        resolved, [row(11, 11)], tables, visibility=Visibility(causal=True), num_heads=4
    )
    out, _ = ENGINE.forward_paged(
        poisoned(resolved), 0, query, stored_key, stored_value, batch, k_scale=0.5, v_scale=0.25
    )
    expected, _ = dense_attention(
        query.double().numpy(),
        stored_key.double().numpy() * 0.5,
        stored_value.double().numpy() * 0.25,
        visible(11, 11, causal=True),
    )
    assert_close(out.double().numpy(), expected, "attention", "bfloat16")


@pytest.mark.parametrize(
    ("dtype", "largest", "nan"),
    [
        ("float8_e4m3fn", 0x7E, 0x7F),
        ("float8_e5m2", 0x7B, 0x7F),
        ("float8_e4m3fnuz", 0x7F, 0x80),
        ("float8_e5m2fnuz", 0x7F, 0x80),
    ],
)
def test_quantize_saturates_and_keeps_nan(dtype: str, largest: int, nan: int) -> None:
    x = torch.tensor([1e9, -1e9, torch.inf, torch.nan, -torch.nan, 0.0])
    stored = quantize(x, 1.0, dtype).view(torch.uint8).tolist()
    assert stored == [largest, largest | 0x80, largest, nan, nan, 0]
    if dtype == "float8_e4m3fn":
        assert quantize(torch.tensor([466.0]), 1.0, dtype).view(torch.uint8).item() == 0x7E
        assert quantize(torch.tensor([466.0]), 2.0, dtype).item() == 240.0  # 233, to nearest
    with pytest.raises(UnsupportedError, match="quantize expects one of float8_e4m3fn"):
        quantize(x, 1.0, "bfloat16")
    with pytest.raises(TensorError, match="scale: expected a finite number > 0"):
        quantize(x, 0.0, dtype)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn",
                                   "float8_e5m2", "int64", "int32", "uint8", "bool"])  # fmt: skip
def test_numpy_arrays_travel_bit_for_bit(dtype: str) -> None:
    import ml_dtypes

    kind = np.dtype(getattr(np, dtype) if hasattr(np, dtype) else getattr(ml_dtypes, dtype))
    high = 2 if dtype == "bool" else 256
    raw = np.random.default_rng(9).integers(0, high, (5, 6, kind.itemsize), np.uint8)
    array_in = raw.view(kind)[..., 0].T  # not contiguous
    tensor = ENGINE.from_numpy(array_in)
    assert tensor.dtype == getattr(torch, dtype)
    assert tensor.shape == (6, 5)
    assert_same_bits(ENGINE.to_numpy(tensor), array_in)
    back = ENGINE.to_numpy(tensor[:, 1])
    assert_same_bits(back, array_in[:, 1])
    back[:] = back[0]
    assert_same_bits(ENGINE.to_numpy(tensor), array_in)


def test_load_bytes_wants_the_whole_allocation() -> None:
    resolved = plan()
    with pytest.raises(PoolError, match=f"expected the {resolved.size_bytes} bytes of the plan"):
        ENGINE.load_bytes(resolved, b"\0")


def test_devices() -> None:
    assert create_engine(None).device == "cpu"
    for name in ("gpu", "cuda:x", "cpu:0", ""):
        with pytest.raises(DeviceError, match="expects 'cpu', 'cuda' or 'cuda:N'"):
            create_engine(name)
    if not torch.cuda.is_available():
        with pytest.raises(DeviceError, match="sees no CUDA device"):
            create_engine("cuda")
    missing = f"cuda:{torch.cuda.device_count()}"
    with pytest.raises(DeviceError, match="CUDA device"):
        create_engine(missing)
