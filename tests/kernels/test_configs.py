"""The written rules: tile shapes, the packing of heads, splits, alignment."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.triton_kernels.configs import (
    MAX_SPLITS,
    POOL_DTYPES,
    QUERY_DTYPES,
    TileShape,
    alignment_unit,
    choose_splits,
    choose_tile,
    is_uniform,
    padded,
    product_precision,
    refuse,
    vector_bytes,
)
from backends.triton_kernels.tiles import query_tiles

H200_SMS = 132


def tile(
    queries: int = 4096,
    heads: tuple[int, int] = (8, 8),
    size: int = 128,
    dtype: str = "bfloat16",
    block_size: int = 16,
    capability: tuple[int, int] = (9, 0),
    query_dtype: str | None = None,
) -> TileShape:
    return choose_tile(
        max_query_len=queries,
        query_heads=heads[0],
        kv_heads=heads[1],
        head_size=size,
        head_size_v=size,
        query_dtype=query_dtype or dtype,
        dtype=dtype,
        block_size=block_size,
        capability=capability,
    )


def splits(rows: list[int], keys: int, heads: int, shape: TileShape, sms: int = H200_SMS) -> int:
    """Of rows with that many queries, which all see ``keys`` keys."""
    cu = [0]
    for row in rows:
        cu.append(cu[-1] + row)
    tiles = query_tiles(cu, cu[-1], [0] * cu[-1], [keys] * cu[-1], shape.queries)
    return choose_splits(tiles, shape=shape, kv_heads=heads, num_sms=sms)


@settings(max_examples=300, deadline=None)
@given(
    queries=st.integers(0, 5000),
    group=st.integers(1, 200),
    size=st.integers(1, 256),
    block_size=st.integers(1, 256),
    dtype=st.sampled_from(POOL_DTYPES),
    query_dtype=st.sampled_from(QUERY_DTYPES),
    capability=st.sampled_from([(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]),
)
def test_a_tile_serves_every_head_of_a_group(
    queries: int,
    group: int,
    size: int,
    block_size: int,
    dtype: str,
    query_dtype: str,
    capability: tuple[int, int],
) -> None:
    if refuse(head_size=size, head_size_v=size, dtype=dtype, query_dtype=query_dtype):
        query_dtype = dtype
    shape = tile(queries, (2 * group, 2), size, dtype, block_size, capability, query_dtype)
    assert shape.queries >= 1
    assert shape.queries * shape.heads <= shape.block_m
    assert shape.head_chunks * shape.heads >= group
    assert (shape.head_chunks - 1) * shape.heads < group, "a chunk without heads"
    assert shape.block_n >= 16
    assert shape.block_m & (shape.block_m - 1) == shape.block_n & (shape.block_n - 1) == 0


@pytest.mark.parametrize(
    ("queries", "group", "chunks", "heads", "tokens"),
    [
        (4096, 1, 1, 1, 128),
        (4096, 4, 1, 4, 32),
        (4096, 7, 1, 7, 18),
        (4096, 48, 3, 16, 8),  # in one chunk 96 of 128 rows are used
        (4096, 50, 2, 25, 5),  # 125 of 128
        (1, 8, 1, 8, 2),
        (1, 48, 1, 48, 2),
    ],
)
def test_heads_fill_the_rows(
    queries: int, group: int, chunks: int, heads: int, tokens: int
) -> None:
    shape = tile(queries, (group, 1))
    assert (shape.head_chunks, shape.heads, shape.queries) == (chunks, heads, tokens)


def test_keys_of_a_tile_follow_the_page() -> None:
    """128 keys where the page holds them or is small, 64 where a page of 64 is one address."""
    sizes = {n: tile(block_size=n).block_n for n in (16, 64, 128, 192, 256)}
    assert sizes == {16: 128, 64: 64, 128: 128, 192: 64, 256: 128}


def test_few_queries_over_many_keys_are_split() -> None:
    """9 heads, 1,000 queries, 62,000 keys: 72 programs for 132 processors without splits."""
    shape = tile(1000, (9, 9), block_size=128)
    found = splits([1000], 62_000, 9, shape)
    assert 5 <= found <= MAX_SPLITS
    programs = 8 * 9
    one = 1 * 485  # a wave of whole rows
    many = -(-programs * found // H200_SMS) * (485 / found)
    assert many < 0.62 * one


def test_steps_that_fill_the_chip_are_not_split() -> None:
    assert splits([8192], 8192, 16, tile(8192, (16, 16))) == 1
    assert splits([512] * 32, 512, 8, tile(512)) == 1


def test_short_rows_and_no_keys_are_not_split() -> None:
    assert splits([16], 100, 1, tile(16, (1, 1))) == 1
    assert splits([100], 0, 8, tile(100)) == 1


def test_one_long_row_among_short_ones_is_split() -> None:
    """The chip would wait for one program."""
    shape = tile(128, (1, 1), block_size=128)
    lengths = [128] * 40
    cu = list(range(0, 128 * 41, 128))
    hi = [60_000] * 128 + [256] * (128 * 39)
    tiles = query_tiles(cu, cu[-1], [0] * cu[-1], hi, shape.queries)
    assert len(lengths) * 8 == len(tiles)
    assert choose_splits(tiles, shape=shape, kv_heads=1, num_sms=H200_SMS) > 4


@pytest.mark.parametrize(
    ("itemsize", "numbers", "unit"),
    [
        (2, (0, 4096, 128, 256), 8),
        (2, (4, 4096, 128, 256), 4),
        (2, (0, 81, 8), 1),
        (4, (0, 4096, 128), 4),
        (1, (0, 4096, 144), 16),
        (1, (8, 4096, 144), 8),
        (2, (), 8),
    ],
)
def test_alignment(itemsize: int, numbers: tuple[int, ...], unit: int) -> None:
    assert alignment_unit(itemsize, *numbers) == unit


def test_what_a_layout_costs_in_vectors() -> None:
    assert vector_bytes(2, 8, 128) == (16, 16)
    assert vector_bytes(2, 1024, 128) == (16, 16)
    assert vector_bytes(2, 4, 128) == (8, 8)
    assert vector_bytes(2, 8, 36) == (16, 8)  # V starts 72 bytes into a cell
    assert vector_bytes(1, 16, 40) == (16, 8)


def test_float32_is_true_float32_unless_asked() -> None:
    both = {"query_dtype": "float32", "dtype": "float32"}
    assert product_precision(**both) == "ieee"
    assert product_precision(**both, precision="tf32") == "tf32"
    stored = {"query_dtype": "float32", "dtype": "float8_e4m3fn"}
    assert product_precision(**stored) == "tf32x3"
    assert product_precision(**stored, precision="tf32") == "tf32"
    assert product_precision(query_dtype="bfloat16", dtype="float8_e4m3fn") == "ieee"


def test_uniform_strides_and_padding() -> None:
    assert is_uniform(16 * 256, 256, 16)
    assert not is_uniform(16 * 256 + 8, 256, 16)
    assert [padded(n) for n in (1, 16, 17, 40, 128, 129)] == [16, 16, 32, 64, 128, 256]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"head_size": 257}, r"head_size 257 is outside \[1, 256\]"),
        ({"head_size_v": 512}, r"head_size_v 512 is outside \[1, 256\]"),
        ({"dtype": "float64"}, "a pool of float64 is none of float32, float16"),
        ({"query_dtype": "float64"}, "queries of float64 are none of float32, float16, bfloat16"),
        ({"query_dtype": "float16"}, "queries of float16 over a pool of bfloat16; they must be"),
    ],
)
def test_refusals_say_why(changes: dict[str, object], says: str) -> None:
    case = {"head_size": 64, "head_size_v": 64, "dtype": "bfloat16", "query_dtype": "bfloat16"}
    assert refuse(**case) is None  # type: ignore[arg-type]
    reason = refuse(**{**case, **changes})  # type: ignore[arg-type]
    assert reason is not None
    with pytest.raises(ValueError, match=says):
        raise ValueError(reason)
