"""Every engine on every dense feature and dtype, against the oracle and against each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from layout_core.attention import (
    AttentionMetadata,
    QueryRange,
    VideoTokenLayout,
    VideoTokenSpan,
)
from layout_core.errors import TensorError, UnsupportedError, VisibilityError
from tests.engines.suite import DTYPES, ENGINE_KERNELS
from tests.engines.suite_dense import BOUNDS, FEATURES, documents, draw, expected, run_case
from tests.tolerances import assert_close, assert_same_bits

LoadEngine = Callable[[str], Any]

ENGINES = [name for name, _ in ENGINE_KERNELS]
engines = pytest.mark.parametrize("engine", ENGINES)
dtypes = pytest.mark.parametrize("dtype", DTYPES)


@dtypes
@pytest.mark.parametrize("feature", FEATURES)
def test_feature(
    load_engine: LoadEngine,
    count_dense: Callable[[str, str, str], None],
    dtype: str,
    feature: str,
) -> None:
    """Each engine against the oracle, then the engines against each other."""
    case = FEATURES[feature](dtype)
    want = expected(case)
    got = {}
    for name in ENGINES:
        output = run_case(load_engine(name), case)
        assert output.dtype == case.q.dtype
        assert_close(output, want, "attention", dtype, f"{name}: {feature}")
        got[name] = output
        count_dense(name, feature, dtype)
    first = got[ENGINES[0]]
    for name in ENGINES[1:]:
        assert_close(got[name], first, "engines", dtype, f"{name} and {ENGINES[0]}: {feature}")


@engines
@pytest.mark.parametrize("masked", [False, True])
def test_documents_do_not_leak(load_engine: LoadEngine, engine: str, masked: bool) -> None:
    """One document changes, even to NaN: the bits of the others stay."""
    loaded = load_engine(engine)
    case = documents("float32", masked=masked)
    before = run_case(loaded, case)
    start, end = BOUNDS[2], BOUNDS[3]
    others = np.r_[0:start, end : BOUNDS[-1]]
    for change in (1.0, np.nan):
        case.k[:, start:end] += np.float32(change)
        case.v[:, start:end] += np.float32(change)
        after = run_case(loaded, case)
        assert_same_bits(after[:, others], before[:, others], f"other documents, {change}")
        assert (after[:, start:end] != before[:, start:end]).any()
    assert np.isnan(after[:, start:end]).any()


@engines
def test_contradictions_raise(load_engine: LoadEngine, engine: str) -> None:
    loaded = load_engine(engine)
    backend = loaded.attention_backend()
    q, k, v = (loaded.from_numpy(x) for x in draw("float32", queries=8))
    layer = backend.get_impl_cls()(4, 32, 0.2, num_kv_heads=2, prefix="blocks.0")
    narrow = loaded.from_numpy(np.ones((2, 7), np.float32))
    video = VideoTokenLayout
    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (TensorError, "joint_strategy: expected one of front, rear", {"joint_strategy": "side"}),
        (TensorError, "joint_value: expected joint_key and joint_value", {"joint_key": k}),
        (TensorError, "joint_attn_mask: expected a joint_key", {"joint_attn_mask": k}),
        (TensorError, r"attn_mask: expected \[2, 8\], \[8, 8\]", {"attn_mask": narrow}),
        (VisibilityError, "each of 2 samples, got 1", {"full_attn_spans": [[(0, 4)]]}),
        (VisibilityError, "ends past seq_len 8", {"full_attn_spans": [[(0, 9)], []]}),
        (VisibilityError, r"query_ranges\[1\]: expected local queries from 3",
         {"query_ranges": (QueryRange(0, 3, 0), QueryRange(4, 8, 4))}),
        (VisibilityError, "cover all 8 local queries, got 3",
         {"query_ranges": (QueryRange(0, 3, 0),)}),
        (VisibilityError, r"valid_kv_length'\]: expected an int in \[0, 8\], got 9",
         {"extra": {"valid_kv_length": 9}}),
        (TensorError, "cu_seqlens_q'.*from 0 to at most 16 tokens",
         {"extra": {"cu_seqlens_q": [0, 17]}}),
        (TensorError, "expected ascending bounds", {"extra": {"cu_seqlens_q": [0, 9, 8]}}),
        (TensorError, "cu_seqlens_q'.*beside cu_seqlens_k", {"extra": {"cu_seqlens_k": [0, 9]}}),
        (TensorError, "bounds of 1 documents, got 2",
         {"extra": {"cu_seqlens_q": [0, 9], "cu_seqlens_k": [0, 4, 9]}}),
        (VisibilityError, "cannot be combined with documents",
         {"extra": {"cu_seqlens_q": [0, 9]}, "full_attn_spans": [[], []]}),
        (VisibilityError, "expected used_len, or prefix_len", {"video_layout": video()}),
        (VisibilityError, "end at row 9, past used_len 8",
         {"video_layout": video(prefix_len=1, latent_grid=(2, 2, 2), used_len=8)}),
        (VisibilityError, r"rows \[4, 9\) are outside the used rows \[0, 8\)",
         {"video_layout": video(
             used_len=8, video_spans=(VideoTokenSpan(4, (5, 1, 1), "target"),))}),
    ]  # fmt: skip
    for error, message, fields in cases:
        with pytest.raises(error, match=message):
            layer.forward(q, k, v, AttentionMetadata(**fields))
    with pytest.raises(TensorError, match=r"value: layer 'blocks\.0' expects .*float32"):
        layer.forward(q, k, loaded.from_numpy(draw("float16", queries=8)[2]))
    with pytest.raises(TensorError, match="expects 4 query heads, 2 KV heads of size 32"):
        layer.forward(q[..., :16], k[..., :16], v)
    with pytest.raises(
        UnsupportedError, match=r"backend_kwargs: .* has no options, got \['tile'\]"
    ):
        backend.get_impl_cls()(4, 32, 0.2, backend_kwargs={"tile": 64})
    with pytest.raises(TensorError, match="expects a multiple of 3 KV heads, got 4"):
        backend.get_impl_cls()(4, 32, 0.2, num_kv_heads=3)
    with pytest.raises(UnsupportedError, match="qkv_layout"):
        backend.get_impl_cls()(4, 32, 0.2, qkv_layout="BNSD")
    with pytest.raises(TensorError, match="metadata: unknown field 'mask'"):
        backend.get_builder_cls()().build(mask=None)
