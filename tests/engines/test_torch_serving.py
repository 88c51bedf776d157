"""What engines refuse by name, before anything is allocated."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from backends.torch_cuda import create_engine
from layout_core.errors import PoolError, TensorError, UnsupportedError
from layout_core.quant import KVQuantMode
from layout_core.resolve import resolve_layout, single_group_config
from layout_core.serving import check_num_heads, check_servable, find_layer
from layout_core.specs import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from layout_core.views import ResolvedLayout

DENSE: dict[str, Any] = {
    "block_size": 8, "num_kv_heads": 2, "head_size": 16, "dtype": "bfloat16",
}  # fmt: skip


def resolved(spec: KVCacheSpec, layout: str = "LBNHC") -> ResolvedLayout:
    return resolve_layout(single_group_config(spec, 4, ["a", "b"], layout))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (MLAAttentionSpec(**DENSE), "MLAAttentionSpec stores one latent vector"),
        (FullAttentionSpec(**DENSE, num_head_slots=3), r"num_head_slots: .* serves None, got 3"),
        (FullAttentionSpec(**DENSE, state_content_bytes=80), "state_content_bytes: .* got 80"),
        (FullAttentionSpec(**DENSE, tokens_per_state=2), "tokens_per_state: .* serves 1, got 2"),
        (FullAttentionSpec(**DENSE, tokens_per_state=Fraction(1, 2)), "tokens_per_state: .* 1/2"),
        (FullAttentionSpec(**DENSE, head_size_v=0), "head_size_v: an engine serves >= 1, got 0"),
        (
            FullAttentionSpec(**DENSE, kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD),
            "serves NONE, FP8_PER_TENSOR, got INT8_PER_TOKEN_HEAD",
        ),
    ],
)
def test_specs_that_no_engine_serves_are_refused_by_name(spec: KVCacheSpec, message: str) -> None:
    plan = resolved(spec)
    with pytest.raises(UnsupportedError, match=f"layer 'a' of group 0: .*{message}"):
        check_servable(plan)
    with pytest.raises(UnsupportedError, match=message):
        create_engine("cpu").allocate(plan)
    with pytest.raises(UnsupportedError, match=message):
        create_engine("cpu").load_bytes(plan, bytes(plan.size_bytes))


@pytest.mark.parametrize(
    "spec",
    [
        FullAttentionSpec(**DENSE, sliding_window=4),
        FullAttentionSpec(**DENSE, head_size_v=8, page_size_padded=1024),
        SlidingWindowSpec(**DENSE, sliding_window=4),
        ChunkedLocalAttentionSpec(**DENSE, attention_chunk_size=16),
        CrossAttentionSpec(**DENSE),
        FullAttentionSpec(**DENSE | {"dtype": "float8_e4m3fn"},
                          kv_quant_mode=KVQuantMode.FP8_PER_TENSOR),
    ],
)  # fmt: skip
def test_dense_specs_are_served(spec: KVCacheSpec) -> None:
    plan = resolved(spec)
    check_servable(plan)
    assert create_engine("cpu").allocate(plan).nbytes == plan.size_bytes


def test_decode_context_parallelism_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"parallel_size: an engine serves 1, got 2"):
        check_servable(resolved(FullAttentionSpec(**DENSE)), decode_context_parallel_size=2)


def test_a_page_that_is_no_whole_number_of_elements_is_refused() -> None:
    plan = resolved(FullAttentionSpec(**DENSE, page_size_padded=1025))
    with pytest.raises(
        UnsupportedError, match=r"layer 'a': its stride of B is 1025 bytes, no multiple of the 2"
    ):
        create_engine("cpu").allocate(plan)


@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC"])
def test_case_2_views_of_one_head_report_canonical_strides(layout: str) -> None:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=4, dtype="float32")
    layer = create_engine("cpu").allocate(resolved(spec, layout)).layers[0]
    assert layer.content.shape == (4, 1, 16, 8)
    assert layer.content.stride() == (128, 128, 8, 1)


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC"])
def test_case_6_where_a_cell_lies(layout: str) -> None:
    """H = N = 8, C = 4 elements: cell (h=1, n=0) starts at element 32, or at 4."""
    import torch

    spec = FullAttentionSpec(block_size=8, num_kv_heads=8, head_size=2, dtype="float32")
    engine = create_engine("cpu")
    pool = engine.allocate(resolved(spec, layout))
    key = torch.zeros(1, 8, 2)
    key[0, 1] = 7.0
    engine.write(pool, 0, key, torch.zeros(1, 8, 2), torch.tensor([0]))
    found = torch.nonzero(pool.storage.view(torch.float32)).reshape(-1).tolist()
    assert found == {"LBHNC": [32, 33], "LBNHC": [4, 5]}[layout]


def test_layers_are_found_by_index_name_or_view() -> None:
    plan = resolved(FullAttentionSpec(**DENSE))
    assert [find_layer(plan, x) for x in (1, "b", plan.layers[1])] == [1, 1, 1]
    with pytest.raises(PoolError, match="the view of 'b' belongs to another plan"):
        find_layer(plan, replace(plan.layers[1], offset=4))
    with pytest.raises(ValueError, match=r"layer: expected an index in \[0, 2\), got 2"):
        find_layer(plan, 2)
    for bad in (0, 3, True):
        with pytest.raises(TensorError, match="num_heads: expected"):
            check_num_heads(plan, 0, bad)
