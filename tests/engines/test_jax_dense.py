"""The JAX engine alone: dense calls of the attention contract against the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from backends.jax_gpu import create_engine
from layout_core.attention import (
    AttentionMetadata,
    PackedPaddingMetadata,
    QueryRange,
    VideoTokenLayout,
    VideoTokenSpan,
)
from layout_core.errors import TensorError, UnsupportedError, VisibilityError
from tests.cases import NUMPY_DTYPES
from tests.oracle import dense_attention, visible
from tests.tolerances import assert_close

ENGINE = create_engine("cpu")
BACKEND = ENGINE.attention_backend()
Array = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]


def arrays(
    *shape: int, kv_heads: int = 2, keys: int | None = None, dtype: str = "float32", seed: int = 0
) -> tuple[Array, Array, Array]:
    """Q ``[B, Sq, H, D]`` of ``shape``; K and V with other heads and lengths."""
    rng = np.random.default_rng(seed)
    batch, queries, _, size = shape
    kv = (batch, queries if keys is None else keys, kv_heads, size)
    return tuple(rng.standard_normal(s).astype(NUMPY_DTYPES[dtype]) for s in (shape, kv, kv))  # type: ignore[return-value]


class Layer:
    """An ``AttentionImpl`` that takes and gives NumPy arrays, so that tests can write into them."""

    def __init__(self, q: Array, k: Array, *, causal: bool = False, scale: float = 0.2) -> None:
        heads, size = q.shape[2:]
        self.impl = BACKEND.get_impl_cls()(
            heads, size, scale, causal=causal, num_kv_heads=k.shape[2], prefix="blocks.0"
        )

    def forward(
        self, q: Array, k: Array, v: Array, metadata: AttentionMetadata[Any] | None = None
    ) -> Array:
        if metadata is not None:
            given = {
                f.name: jnp.asarray(value)
                for f in fields(metadata)
                if isinstance(value := getattr(metadata, f.name), np.ndarray)
            }
            metadata = replace(metadata, **given)
        out = self.impl.forward(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), metadata)
        return np.asarray(out)


def check(
    out: Array,
    q: Array,
    k: Array,
    v: Array,
    masks: Sequence[Mask],
    *,
    scale: float = 0.2,
    dtype: str = "float32",
) -> None:
    assert tuple(out.shape) == (*q.shape[:3], v.shape[3])
    for sample, mask in enumerate(masks):
        expected, _ = dense_attention(
            q[sample].astype(np.float64),
            k[sample].astype(np.float64),
            v[sample].astype(np.float64),
            mask,
            scale=scale,
        )
        got = out[sample].astype(np.float64)
        assert_close(got, expected, "attention", dtype, f"sample {sample}")


@pytest.mark.parametrize(
    ("size", "dtype"), [(32, "float32"), (80, "bfloat16"), (128, "float16"), (256, "float32")]
)
def test_full_and_causal(size: int, dtype: str) -> None:
    """Queries stand bottom-right; 5 queries over 3 keys leave two that see nothing."""
    for queries, keys in ((70, 70), (5, 40), (5, 3), (1, 1), (0, 4), (4, 0)):
        q, k, v = arrays(2, queries, 4, size, keys=keys, dtype=dtype)
        for causal in (False, True):  # data of one program
            mask = visible(queries, keys, kv_start_pos=keys - queries, causal=causal)
            out = Layer(q, k, causal=causal).forward(q, k, v)
            check(out, q, k, v, [mask] * 2, dtype=dtype)


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
def test_grouped_heads_and_value_sizes(kv_heads: int) -> None:
    q, k, v = arrays(1, 9, 8, 32, kv_heads=kv_heads)
    v = np.concatenate([v, v[..., :16]], axis=-1)
    check(Layer(q, k).forward(q, k, v), q, k, v, [np.ones((9, 9), bool)])


def test_case_15_heads_map_to_their_group() -> None:
    q, k, v = arrays(1, 3, 6, 32)
    v = np.broadcast_to(np.arange(2, dtype=np.float32)[None, None, :, None], (1, 3, 2, 32))
    out = Layer(q, k).forward(q, k, v)
    assert out[0, 0, :, 0].tolist() == pytest.approx([0, 0, 0, 1, 1, 1])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", ["keys", "pairs", "samples", "heads", "integers"])
def test_boolean_masks_and_nan_behind_them(shape: str, causal: bool) -> None:
    rng = np.random.default_rng(3)
    q, k, v = arrays(3, 11, 4, 32)
    made = {
        "keys": (3, 11),
        "integers": (3, 11),
        "pairs": (11, 11),
        "samples": (3, 11, 11),
        "heads": (3, 4, 11, 11),
    }[shape]
    mask = rng.random(made) < 0.6
    if shape == "heads":  # the same in each head, as the oracle has none
        mask = np.broadcast_to(mask[:, :1], made)
    mask = mask.copy()
    mask[..., -1] = False  # a key that nobody sees
    k[:, -1] = v[:, -1] = np.nan
    given = mask.astype(np.int32) if shape == "integers" else mask
    out = Layer(q, k, causal=causal).forward(q, k, v, AttentionMetadata(attn_mask=given))
    if mask.ndim == 2 and shape != "pairs":
        mask = mask[:, None]
    full = np.broadcast_to(mask[:, 0] if mask.ndim == 4 else mask, (3, 11, 11))
    rule = visible(11, 11, causal=causal)
    check(out, q, k, v, [m & rule for m in full])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_additive_mask_adds_and_minus_infinity_hides(dtype: str) -> None:
    """A bias is the same as one more element of the heads, which the oracle can do."""
    rng = np.random.default_rng(4)
    q, k, v = arrays(1, 7, 4, 32, dtype=dtype)
    bias = rng.standard_normal((1, 1, 1, 7)).astype(np.float32)
    bias[..., 2] = -np.inf
    out = Layer(q, k).forward(
        q, k, v, AttentionMetadata(attn_mask=np.broadcast_to(bias, (1, 4, 7, 7)))
    )
    wide_q = np.concatenate([q[0].astype(np.float64), np.full((7, 4, 1), 5.0)], axis=-1)
    finite = np.where(np.isinf(bias), 0, bias)[0, 0, 0].astype(np.float64)
    column = np.repeat(finite[:, None, None], 2, axis=1)
    wide_k = np.concatenate([k[0].astype(np.float64), column], axis=-1)
    mask = np.ones((7, 7), bool)
    mask[:, 2] = False
    expected, _ = dense_attention(wide_q, wide_k, v[0].astype(np.float64), mask, scale=0.2)
    assert_close(out[0].astype(np.float64), expected, "attention", dtype)
    hidden = np.full((7, 7), -np.inf, np.float32)
    out = Layer(q, k).forward(q, k, v, AttentionMetadata(attn_mask=hidden))
    assert not out.any()


@pytest.mark.parametrize("strategy", ["front", "rear"])
@pytest.mark.parametrize("masks", ["none", "joint", "own", "both", "whole"])
def test_joint_tokens(strategy: str, masks: str) -> None:
    rng = np.random.default_rng(5)
    q, k, v = arrays(2, 6, 4, 32)
    jq, jk, jv = arrays(2, 4, 4, 32, seed=6)
    own, joint = rng.random((2, 6)) < 0.7, rng.random((2, 4)) < 0.7
    own[:, 0] = joint[:, 0] = True
    order = slice(None) if strategy == "front" else slice(None, None, -1)
    whole = np.concatenate([joint, own][order], axis=1)
    metadata: AttentionMetadata[Array] = AttentionMetadata(
        joint_query=jq, joint_key=jk, joint_value=jv, joint_strategy=strategy
    )
    if masks in ("own", "both"):
        metadata.attn_mask = own
    if masks in ("joint", "both"):
        metadata.joint_attn_mask = joint
    if masks == "whole":
        metadata.attn_mask = whole
    seen_own = own if masks in ("own", "both", "whole") else np.ones_like(own)
    seen_joint = joint if masks in ("joint", "both", "whole") else np.ones_like(joint)
    seen = np.concatenate([seen_joint, seen_own][order], axis=1)
    out = Layer(q, k).forward(q, k, v, metadata)
    full = [np.concatenate([a, b][order], axis=1) for a, b in ((jq, q), (jk, k), (jv, v))]
    check(out, *full, [np.broadcast_to(m, (10, 10)) for m in seen])


def test_joint_keys_without_joint_queries() -> None:
    q, k, v = arrays(1, 6, 4, 32)
    _, jk, jv = arrays(1, 4, 4, 32, seed=6)
    out = Layer(q, k).forward(q, k, v, AttentionMetadata(joint_key=jk, joint_value=jv))
    check(out, q, np.concatenate([jk, k], 1), np.concatenate([jv, v], 1), [np.ones((6, 10), bool)])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_packed_documents_do_not_leak(causal: bool, as_tensor: bool) -> None:
    """Documents of unlike lengths, an empty one, and padding after the last."""
    q, k, v = arrays(1, 40, 4, 32)
    bounds = [0, 7, 7, 30, 33]
    mask = np.zeros((40, 40), bool)
    for a, b in pairwise(bounds):
        mask[a:b, a:b] = visible(b - a, b - a, causal=causal)
    given: Any = jnp.asarray(bounds) if as_tensor else bounds
    extra = {"cu_seqlens_q": given, "cu_seqlens_k": given, "max_seqlen_q": 23, "max_seqlen_k": 23}
    k[:, 33:] = v[:, 33:] = np.nan
    out = Layer(q, k, causal=causal).forward(q, k, v, AttentionMetadata(extra=extra))
    check(out, q, k, v, [mask])
    k[:, 7:30] += 1.0  # another document changes, and nobody else's bits do
    again = Layer(q, k, causal=causal).forward(q, k, v, AttentionMetadata(extra=extra))
    assert np.array_equal(out[:, :7], again[:, :7])
    assert np.array_equal(out[:, 30:], again[:, 30:])
    assert not np.array_equal(out[:, 7:30], again[:, 7:30])


def test_packed_cross_attention_over_two_samples() -> None:
    q, k, v = arrays(2, 5, 4, 32, keys=8)
    extra = {"cu_seqlens_q": [0, 4, 10], "cu_seqlens_k": [0, 9, 16]}
    out = Layer(q, k).forward(q, k, v, AttentionMetadata(extra=extra))
    mask = np.zeros((10, 16), bool)
    mask[:4, :9] = mask[4:, 9:] = True
    flat = [x.reshape(1, -1, *x.shape[2:]) for x in (q, k, v)]
    check(out.reshape(1, 10, 4, 32), *flat, [mask])
    assert out.shape == (2, 5, 4, 32)


def test_real_and_padding_without_a_mask() -> None:
    q, k, v = arrays(1, 20, 4, 32)
    for x in (q, k, v):
        x[:, 13:] = np.nan
    mask = np.zeros((20, 20), bool)
    mask[:13, :13] = True
    bounds = jnp.asarray([0, 13])
    packed = PackedPaddingMetadata(13, 13, bounds, bounds)
    extra: dict[str, Any] = {
        "cu_seqlens_q": [0, 13, 20],
        "cu_seqlens_k": [0, 13, 20],
        "valid_kv_length": 13,
        "unknown": object(),
        "kv_cache_dtype": None,
    }
    for metadata in (
        AttentionMetadata(packed_padding=packed),
        AttentionMetadata(packed_padding=packed, extra=extra),
        AttentionMetadata(extra=extra),
    ):
        check(Layer(q, k).forward(q, k, v, metadata), q, k, v, [mask])


def test_valid_kv_length_keeps_all_queries() -> None:
    q, k, v = arrays(2, 6, 4, 32, keys=10)
    k[:, 7:] = v[:, 7:] = np.nan
    out = Layer(q, k).forward(q, k, v, AttentionMetadata(extra={"valid_kv_length": 7}))
    mask = np.zeros((6, 10), bool)
    mask[:, :7] = True
    check(out, q, k, v, [mask] * 2)


def test_spans_that_differ_from_sample_to_sample() -> None:
    """Case 19 among them: queries 4 to 11 of 16 keys see 6 6 7 8 16 16 16 16."""
    q, k, v = arrays(3, 8, 4, 32, keys=16)
    spans = [[(2, 6), (8, 16)], [], [(0, 11)]]
    ranges = (QueryRange(0, 8, 4),)
    out = Layer(q, k).forward(
        q, k, v, AttentionMetadata(full_attn_spans=spans, query_ranges=ranges)
    )
    assert visible(8, 16, kv_start_pos=4, spans=spans[0]).sum(1).tolist() == [
        6, 6, 7, 8, 16, 16, 16, 16,
    ]  # fmt: skip
    check(out, q, k, v, [visible(8, 16, kv_start_pos=4, spans=s) for s in spans])


@pytest.mark.parametrize("spans", [[], [(10, 50)], [(0, 7), (9, 100), (130, 300)]])
def test_spans_of_a_whole_sequence(spans: list[tuple[int, int]]) -> None:
    q, k, v = arrays(2, 300, 2, 32)
    out = Layer(q, k).forward(q, k, v, AttentionMetadata(full_attn_spans=[spans, spans]))
    check(out, q, k, v, [visible(300, 300, spans=spans)] * 2)


def test_shards_of_a_sequence_give_the_whole() -> None:
    q, k, v = arrays(1, 24, 4, 32)
    metadata: AttentionMetadata[Array] = AttentionMetadata(full_attn_spans=[[(6, 20)]])
    whole = Layer(q, k).forward(q, k, v, metadata)
    for start in (0, 10):
        # a replicated front part of 3 and a shard of 7
        local = np.concatenate([q[:, :3], q[:, start + 3 : start + 10]], axis=1)
        ranges = (QueryRange(0, 3, 0), QueryRange(3, 10, start + 3))
        out = Layer(q, k).forward(local, k, v, replace(metadata, query_ranges=ranges))
        expected = np.concatenate([whole[:, :3], whole[:, start + 3 : start + 10]], axis=1)
        assert_close(out, expected, "attention", "float32")


@pytest.mark.parametrize(
    "layout",
    [
        VideoTokenLayout(prefix_len=3, latent_grid=(2, 2, 3)),
        VideoTokenLayout(
            used_len=15,
            video_spans=(
                VideoTokenSpan(1, (1, 2, 2), "reference"),
                VideoTokenSpan(7, (2, 2, 2), "target"),
            ),
        ),
    ],
)
@pytest.mark.parametrize("with_mask", [False, True])
def test_video_layout_drops_the_padding(layout: VideoTokenLayout, with_mask: bool) -> None:
    q, k, v = arrays(1, 20, 4, 32)
    for x in (q, k, v):
        x[:, 15:] = np.nan
    mask = np.zeros((20, 20), bool)
    mask[:15, :15] = True
    padding = np.arange(20)[None] < 15 if with_mask else None
    metadata: AttentionMetadata[Array] = AttentionMetadata(attn_mask=padding, video_layout=layout)
    check(Layer(q, k).forward(q, k, v, metadata), q, k, v, [mask])


def test_contradictions_raise() -> None:
    q, k, v = arrays(2, 8, 4, 32)
    layer = Layer(q, k)
    video = VideoTokenLayout
    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (TensorError, "joint_strategy: expected one of front, rear", {"joint_strategy": "side"}),
        (TensorError, "joint_value: expected joint_key and joint_value", {"joint_key": k}),
        (TensorError, "joint_attn_mask: expected a joint_key", {"joint_attn_mask": k}),
        (TensorError, r"attn_mask: expected \[2, 8\], \[8, 8\]", {"attn_mask": np.ones((2, 7))}),
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
    for error, message, values in cases:
        with pytest.raises(error, match=message):
            layer.forward(q, k, v, AttentionMetadata(**values))
    with pytest.raises(TensorError, match=r"value: layer 'blocks\.0' expects .*float32"):
        layer.forward(q, k, v.astype(np.float16))
    with pytest.raises(TensorError, match="expects 4 query heads, 2 KV heads of size 32"):
        layer.forward(q[..., :16], k[..., :16], v)
    with pytest.raises(UnsupportedError, match="qkv_layout"):
        BACKEND.get_impl_cls()(4, 32, 0.2, qkv_layout="BNSD")
    with pytest.raises(TensorError, match="metadata: unknown field 'mask'"):
        BACKEND.get_builder_cls()().build(mask=None)


def test_a_dense_call_inside_a_program() -> None:
    """Ints of the metadata are constants there; boundaries as arrays are refused."""
    q, k, v = (jnp.asarray(x) for x in arrays(1, 12, 4, 32))
    layer = Layer(q, k).impl

    def packed(q: jax.Array, bounds: Any) -> jax.Array:
        return layer.forward(q, k, v, AttentionMetadata(extra={"cu_seqlens_q": bounds}))

    inside = jax.jit(lambda q: packed(q, [0, 5, 12]))(q)
    np.testing.assert_allclose(inside, packed(q, [0, 5, 12]), rtol=1e-6, atol=1e-6)
    with pytest.raises(TensorError, match="inside a program expected ints, got a traced array"):
        jax.jit(packed)(q, jnp.asarray([0, 5, 12]))


def test_long_rows_walk_chunks_of_keys() -> None:
    """More keys than a chunk: gaps, a mask, causality, and NaN in keys that nobody sees."""
    q, k, v = arrays(1, 600, 2, 32, keys=1300, kv_heads=1)
    k[:, 1200:] = v[:, 1200:] = np.nan
    rng = np.random.default_rng(8)
    mask = rng.random((600, 1300)) < 0.5
    extra = {"valid_kv_length": 1200}
    rule = visible(600, 1300, kv_start_pos=700, causal=True)
    rule[:, 1200:] = False
    layer = Layer(q, k, causal=True)
    check(layer.forward(q, k, v, AttentionMetadata(extra=extra)), q, k, v, [rule])
    given: AttentionMetadata[Any] = AttentionMetadata(attn_mask=mask, extra=extra)
    check(layer.forward(q, k, v, given), q, k, v, [rule & mask])


def test_the_backend_says_what_it_is() -> None:
    assert BACKEND.get_name() == "PAGESTRIDE_JAX"
    assert BACKEND.indexes_kv_by_block_stride is None
    assert BACKEND.supports_head_size(72)
    assert BACKEND.supports_paged_kv
    assert not BACKEND.get_impl_cls().supports_kv_cache_dtype("fp8", "cuda")
    BACKEND.validate_available()
