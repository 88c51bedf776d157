"""8-bit storage: one rule for casting, the same bytes from both engines, scales on reading."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from layout_core.errors import TensorError, UnsupportedError
from tests.cases import (
    LAYOUTS,
    NUMPY_DTYPES,
    PLAIN,
    Array,
    assign_blocks,
    plan_of,
    room_for,
    steps,
)
from tests.engines.suite import (
    ENGINE_KERNELS,
    Dense,
    draw,
    draw_queries,
    expected_memory,
    mask_of,
    run_step,
)
from tests.oracle import dense_attention
from tests.tolerances import assert_close, assert_same_bytes

LoadEngine = Callable[[str], Any]
CountCase = Callable[[str, str, str, str], None]

engines = pytest.mark.parametrize(("engine", "kernel"), ENGINE_KERNELS)

LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
NAN = {"float8_e4m3fn": 0x7F, "float8_e5m2": 0x7F}


def quantize(engine: str, x: Any, scale: float, kind: str) -> Any:
    """The engine's rule: the function of that name beside its element types."""
    return importlib.import_module(f"backends.{engine}.dtypes").quantize(x, scale, kind)


def nearest(values: Array, kind: str) -> Array:
    """Bytes of the nearest 8-bit floats, ties to the even byte, by looking at all of them."""
    bits = np.arange(128, dtype=np.uint8)
    all_values = bits.view(getattr(ml_dtypes, kind)).astype(np.float64)
    finite = bits[np.isfinite(all_values)]
    table = all_values[finite]  # rising: bytes of positive floats are ordered
    size = np.minimum(np.abs(values.astype(np.float64)), LARGEST[kind])
    size = np.where(np.isnan(size), 0.0, size)
    above = np.clip(np.searchsorted(table, size), 1, len(table) - 1)
    low, high = table[above - 1], table[above]
    to_high = (size - low > high - size) | ((size - low == high - size) & (above % 2 == 0))
    out = finite[np.where(to_high, above, above - 1)] | (np.signbit(values) << 7).astype(np.uint8)
    return np.where(np.isnan(values), NAN[kind], out).astype(np.uint8)


def test_the_reference_itself() -> None:
    values = np.array([466.0, np.inf, -np.inf, np.nan, -np.nan, 0.0, -0.0, 1.0, 17.0, 19.0])
    want = [0x7E, 0x7E, 0xFE, 0x7F, 0x7F, 0x00, 0x80, 0x38, 0x58, 0x5A]
    assert nearest(values, "float8_e4m3fn").tolist() == want


@engines
@pytest.mark.parametrize("kind", sorted(LARGEST))
@pytest.mark.parametrize("source", ["float32", "float16", "bfloat16"])
def test_quantize_rounds_to_nearest_even_and_saturates(
    load_engine: LoadEngine, engine: str, kernel: str, kind: str, source: str
) -> None:
    """Every bit pattern of the 16-bit types; for float32 those, and what lies around ties."""
    loaded = load_engine(engine)
    if source == "float32":
        patterns = np.arange(65536, dtype=np.uint32) << 16
        near = np.concatenate([patterns, patterns + 1, patterns - 1]).astype(np.uint32)
        values = near.view(np.float32)
    else:
        values = np.arange(65536, dtype=np.uint16).view(NUMPY_DTYPES[source])
    got = quantize(engine, loaded.from_numpy(values), 1.0, kind)
    got_bytes = np.asarray(loaded.to_numpy(got)).view(np.uint8)
    with np.errstate(invalid="ignore"):
        want = nearest(values.astype(np.float32), kind)
    # XLA and torch flush nothing here: a float32 denormal rounds to zero of its sign anyway
    assert_same_bytes(got_bytes.tobytes(), want.tobytes(), f"{engine}: {source} to {kind}")


@engines
def test_quantize_divides_by_the_scale_in_float32(
    load_engine: LoadEngine, engine: str, kernel: str
) -> None:
    loaded = load_engine(engine)
    values = np.random.default_rng(0).standard_normal(4096).astype(np.float32) * 50
    for scale in (0.037, 1.9, 3.0):
        got = quantize(engine, loaded.from_numpy(values), scale, "float8_e4m3fn")
        want = nearest(values / np.float32(scale), "float8_e4m3fn")
        got_bytes = np.asarray(loaded.to_numpy(got)).view(np.uint8)
        assert_same_bytes(got_bytes.tobytes(), want.tobytes(), f"{engine} scale {scale}")


@engines
@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_no_positive_number_is_refused(
    load_engine: LoadEngine, engine: str, kernel: str, scale: float
) -> None:
    loaded = load_engine(engine)
    one = loaded.from_numpy(np.ones(1, np.float32))
    with pytest.raises(TensorError, match="scale: expected a finite number > 0"):
        quantize(engine, one, scale, "float8_e4m3fn")
    with pytest.raises(UnsupportedError, match="quantize expects one of float8_e4m3fn"):
        quantize(engine, one, 1.0, "float32")


@engines
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("query_dtype", ["float32", "bfloat16"])
def test_attention_over_8_bit_pools(
    load_engine: LoadEngine,
    count_case: CountCase,
    engine: str,
    kernel: str,
    layout: str,
    query_dtype: str,
) -> None:
    """The oracle reads the stored values times the scales; the bytes are those that came in."""
    loaded = load_engine(engine)
    dtype = "float8_e4m3fn"
    step = steps(4)[LAYOUTS.index(layout) + 1]
    k_scale, v_scale = 0.75, 2.5
    dense: Dense = draw(PLAIN, step, dtype, seed=4)
    tables = assign_blocks(PLAIN, step.rows, np.random.default_rng(4))
    outcome = run_step(
        loaded, PLAIN, plan_of(PLAIN, layout, dtype), step, dense, tables, dtype=dtype,
        kernel=kernel, num_heads=4, seed=4, room=room_for(4), query_dtype=query_dtype,
        k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip
    query = draw_queries(step, 4, 32, query_dtype, 4)
    for layer, output in enumerate(outcome.outputs):
        first = 0
        for index, r in enumerate(step.rows):
            k, v = (a.astype(np.float64) for a in dense[r.identity, layer])
            part = slice(first, first + r.query_len)
            mask = mask_of(step, index)
            want = dense_attention(query[part], k * k_scale, v * v_scale, mask)[0]
            where = f"{engine} {layout} layer {layer} row {index}"
            assert_close(output[part], want, "attention over 8 bits", query_dtype, where)
            first += r.query_len
    memory = expected_memory(PLAIN, layout, dtype, dense, tables)
    assert_same_bytes(outcome.pool, memory.data.tobytes(), f"{engine} {layout}: pool")
    count_case(engine, kernel, layout, dtype)
