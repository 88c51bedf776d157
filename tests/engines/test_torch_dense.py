"""The torch engine alone: how its dense calls are cut. The numbers are in the shared suite."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from backends.torch_cuda import create_engine
from tests.engines.suite_dense import BOUNDS, DenseCase, documents, draw, expected, run_case
from tests.engines.test_torch_kernels import Watch
from tests.oracle import visible
from tests.tolerances import assert_close

ENGINE = create_engine("cpu")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("queries", [15, 16, 70, 300])
def test_lengths_around_the_cuts(queries: int, causal: bool, dtype: str) -> None:
    for keys in (queries, queries + 33):
        q, k, v = draw(dtype, queries=queries, keys=keys)
        shown = visible(queries, keys, kv_start_pos=keys - queries, causal=causal)
        case = DenseCase(q, k, v, shown, causal=causal)
        assert_close(run_case(ENGINE, case), expected(case), "attention", dtype, f"{keys} keys")


@pytest.mark.parametrize("spans", [[], [(10, 50)], [(0, 7), (9, 100), (130, 300)]])
def test_spans_of_a_whole_sequence(spans: list[tuple[int, int]]) -> None:
    """Full, causal and masked calls in one sequence, of several tiles."""
    q, k, v = draw("float32", queries=300)
    shown = visible(300, 300, spans=spans)
    case = DenseCase(q, k, v, shown, {"full_attn_spans": [spans, spans]})
    assert_close(run_case(ENGINE, case), expected(case), "attention", "float32", str(spans))


def calls_of(case: DenseCase) -> int:
    with Watch() as watch:
        run_case(ENGINE, case)
    return sum(n for name, n in watch.seen.items() if "scaled_dot_product" in name)


def test_calls_are_one_for_each_document_and_run_of_a_sequence() -> None:
    assert calls_of(documents("float32")) == 3, f"documents of {np.diff(BOUNDS)} tokens"
    q, k, v = draw("float32", queries=300)
    one = DenseCase(q, k, v, np.ones((300, 300), bool))
    assert calls_of(one) == 1
    spans = {"full_attn_spans": [[(20, 120)]] * 2}
    # a causal run before the span, the span, and masked tiles of 256 queries after it
    assert calls_of(DenseCase(q, k, v, one.shown, spans)) == 3


def test_rocm_is_cuda_to_torch_and_its_own_platform_here(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = ENGINE.attention_backend().get_impl_cls()(4, 32, 0.2)

    class OnGpu:
        device = torch.device("cuda")

    query: Any = OnGpu()
    assert layer.platform(query) == "cuda"
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert layer.platform(query) == "rocm"
