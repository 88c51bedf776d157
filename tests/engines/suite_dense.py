"""Dense calls of the attention contract as data: what goes in, and what each query may see.

A case knows no engine. Its arrays are NumPy's, its answer is the oracle's, and what a query sees
is written out key by key, not taken from the library's intervals. Where a key must reach nobody
(padding, the far side of a mask) it holds NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any

import numpy as np

from layout_core.attention import (
    PackedPaddingMetadata,
    QueryRange,
    VideoTokenLayout,
    VideoTokenSpan,
)
from tests.cases import NUMPY_DTYPES, Array
from tests.oracle import Mask, dense_attention, visible

BATCH, TOKENS, HEADS, KV_HEADS, SIZE = 2, 24, 4, 2, 32
"""The shape of most cases: one shape, so that an engine that compiles does it seldom."""


@dataclass(frozen=True, slots=True, eq=False)
class DenseCase:
    """One call. ``whole`` is Q, K, V as the oracle sees them, joint tokens put in place."""

    q: Array
    k: Array
    v: Array
    shown: Mask  #: broadcasts to [B, H, Sq, Sk] of the whole
    metadata: dict[str, Any] = field(default_factory=dict)
    causal: bool = False
    scale: float = 0.2
    bias: Array | None = None  #: broadcasts to [B, H, Sq, Sk]; −inf where not shown
    whole: tuple[Array, Array, Array] | None = None
    flat: bool = False  #: the samples are one sequence, one after another


def draw(
    dtype: str,
    *,
    batch: int = BATCH,
    queries: int = TOKENS,
    keys: int | None = None,
    heads: int = HEADS,
    kv_heads: int = KV_HEADS,
    size: int = SIZE,
    value_size: int | None = None,
    seed: int = 0,
) -> tuple[Array, Array, Array]:
    """Q ``[B, Sq, H, D]``, K ``[B, Sk, Hkv, D]`` and V ``[B, Sk, Hkv, Dv]``."""
    rng = np.random.default_rng(seed)
    count = queries if keys is None else keys
    shapes = (
        (batch, queries, heads, size),
        (batch, count, kv_heads, size),
        (batch, count, kv_heads, size if value_size is None else value_size),
    )
    q, k, v = (rng.standard_normal(s, np.float32).astype(NUMPY_DTYPES[dtype]) for s in shapes)
    return q, k, v


def run_case(engine: Any, case: DenseCase) -> Array:
    """The engine's output, ``[B, Sj + Sq, H, Dv]``."""
    backend = engine.attention_backend()
    layer = backend.get_impl_cls()(
        case.q.shape[2],
        case.q.shape[3],
        case.scale,
        causal=case.causal,
        num_kv_heads=case.k.shape[2],
        prefix="blocks.0",
    )
    metadata = None
    if case.metadata:
        metadata = backend.get_builder_cls()().build(**on_device(engine, case.metadata))
    q, k, v = (engine.from_numpy(x) for x in (case.q, case.k, case.v))
    return np.asarray(engine.to_numpy(layer.forward(q, k, v, metadata)))


def on_device(engine: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, np.ndarray):
            out[name] = engine.from_numpy(value)
        elif isinstance(value, dict):
            out[name] = on_device(engine, value)
        elif isinstance(value, PackedPaddingMetadata):
            arrays = {f.name: getattr(value, f.name) for f in fields(value)}
            out[name] = PackedPaddingMetadata(**on_device(engine, arrays))
        else:
            out[name] = value
    return out


def expected(case: DenseCase) -> Array:
    """The oracle's output, ``[B, Sj + Sq, H, Dv]`` in float64."""
    q, k, v = (case.q, case.k, case.v) if case.whole is None else case.whole
    shape = (*q.shape[:3], v.shape[3])
    if case.flat:
        q, k, v = (x.reshape(1, -1, *x.shape[2:]) for x in (q, k, v))
    batch, queries, heads = q.shape[:3]
    group = heads // k.shape[2]
    full = (batch, heads, queries, k.shape[1])
    shown = np.broadcast_to(case.shown, full)
    bias = None if case.bias is None else np.broadcast_to(case.bias, full)
    out = np.zeros((batch, queries, heads, v.shape[3]))
    for b in range(batch):
        for h in range(heads):
            own = slice(h // group, h // group + 1)
            extra = None
            if bias is not None:
                extra = np.where(shown[b, h], bias[b, h].astype(np.float64), 0.0)
            out[b, :, h : h + 1] = dense_attention(
                q[b, :, h : h + 1], k[b, :, own], v[b, :, own], shown[b, h],
                scale=case.scale, bias=extra,
            )[0]  # fmt: skip
    return out.reshape(shape)


def _random(shape: tuple[int, ...], seed: int, share: float = 0.6) -> Mask:
    return np.random.default_rng([seed, 99]).random(shape) < share


def _hide(k: Array, v: Array, where: Any) -> None:
    k[:, where] = np.nan
    v[:, where] = np.nan


# --- full, causal, scale, shapes -----------------------------------------------------------------


def _plain(dtype: str, *, causal: bool = False, scale: float = 0.2, **shape: Any) -> DenseCase:
    q, k, v = draw(dtype, **shape)
    queries, keys = q.shape[1], k.shape[1]
    shown = visible(queries, keys, kv_start_pos=keys - queries, causal=causal)
    return DenseCase(q, k, v, shown, causal=causal, scale=scale)


# --- masks ---------------------------------------------------------------------------------------


def _masked(
    dtype: str, shape: tuple[int, ...], *, causal: bool = False, kind: str = "bool"
) -> DenseCase:
    """A random mask of a shape, with a key that nobody sees, which holds NaN."""
    q, k, v = draw(dtype)
    mask = _random(shape, seed=1)
    mask[..., -1] = False
    mask[..., 0, :5] = False  # a query, or a sample, that sees little or nothing
    _hide(k, v, -1)
    shown = mask
    if mask.ndim == 2:
        shown = mask[:, None, None] if shape[0] == BATCH else mask
    elif mask.ndim == 3:
        shown = mask[:, None]
    bias = None
    given: Array = mask
    if kind == "integers":
        given = mask.astype(np.int32) * 3
    if kind == "additive":
        rng = np.random.default_rng(2)
        given = np.where(mask, rng.standard_normal(shape, np.float32), np.float32(-np.inf))
        bias = np.where(shown, given.reshape(shown.shape), -np.inf)
    rule = visible(TOKENS, TOKENS, causal=causal)
    return DenseCase(q, k, v, shown & rule, {"attn_mask": given}, causal, bias=bias)


def _all_hidden(dtype: str) -> DenseCase:
    q, k, v = draw(dtype)
    mask = np.full((TOKENS, TOKENS), -np.inf, np.float32)
    return DenseCase(q, k, v, np.zeros((TOKENS, TOKENS), bool), {"attn_mask": mask}, bias=mask)


# --- joint tokens --------------------------------------------------------------------------------

JOINT = 8


def _joint(dtype: str, strategy: str, masks: str, *, with_queries: bool = True) -> DenseCase:
    own_tokens = TOKENS - JOINT
    q, k, v = draw(dtype, queries=own_tokens)
    jq, jk, jv = draw(dtype, queries=JOINT, seed=6)
    order = slice(None) if strategy == "front" else slice(None, None, -1)
    own, joint = _random((BATCH, own_tokens), 3), _random((BATCH, JOINT), 4)
    own[:, 0] = joint[:, 0] = True
    metadata: dict[str, Any] = {"joint_key": jk, "joint_value": jv, "joint_strategy": strategy}
    if with_queries:
        metadata["joint_query"] = jq
    bias = None
    if masks in ("both", "float"):
        metadata["attn_mask"], metadata["joint_attn_mask"] = own, joint
    elif masks == "joint":
        metadata["joint_attn_mask"], own = joint, np.ones_like(own)
    elif masks == "own":
        metadata["attn_mask"], joint = own, np.ones_like(joint)
    elif masks == "whole":
        metadata["attn_mask"] = np.concatenate([joint, own][order], axis=1)
    else:
        own, joint = np.ones_like(own), np.ones_like(joint)
    seen = np.concatenate([joint, own][order], axis=1)
    if masks == "float":  # the own mask is added, the joint one stays boolean
        added = np.random.default_rng(7).standard_normal(own.shape).astype(np.float32)
        metadata["attn_mask"] = np.where(own, added, np.float32(-np.inf))
        both = [np.zeros(joint.shape, np.float32), added][order]
        bias = np.concatenate(both, axis=1)[:, None, None]
    whole_q = np.concatenate([jq, q][order], axis=1) if with_queries else q
    whole = (whole_q, *(np.concatenate(x[order], axis=1) for x in ([jk, k], [jv, v])))
    return DenseCase(q, k, v, seen[:, None, None], metadata, bias=bias, whole=whole)  # type: ignore[arg-type]


# --- documents, padding, valid keys --------------------------------------------------------------

BOUNDS = (0, 7, 7, 18, 21)
"""Three documents of unlike lengths and an empty one, with padding after the last."""


def documents(
    dtype: str, *, causal: bool = False, on_device: bool = False, masked: bool = False
) -> DenseCase:
    q, k, v = draw(dtype, batch=1)
    _hide(k, v, slice(BOUNDS[-1], None))
    shown = np.zeros((TOKENS, TOKENS), bool)
    for a, b in pairwise(BOUNDS):
        shown[a:b, a:b] = visible(b - a, b - a, causal=causal)
    given: Any = np.array(BOUNDS, np.int32) if on_device else list(BOUNDS)
    metadata: dict[str, Any] = {
        "extra": {"cu_seqlens_q": given, "cu_seqlens_k": given, "max_seqlen_q": 11,
                  "max_seqlen_k": 11}
    }  # fmt: skip
    if masked:
        mask = _random((1, TOKENS), 5)
        metadata["attn_mask"] = mask
        shown &= mask
    return DenseCase(q, k, v, shown, metadata, causal)


def _cross_documents(dtype: str) -> DenseCase:
    """Documents that pass the border of samples; other lengths of keys than of queries."""
    q, k, v = draw(dtype, queries=8)
    k, v = (np.concatenate([x, x[:, ::-1]], axis=1) for x in (k, v))  # 16 keys a sample
    shown = np.zeros((16, 32), bool)
    shown[:5, :13] = shown[5:, 13:] = True
    extra = {"cu_seqlens_q": [0, 5, 16], "cu_seqlens_k": [0, 13, 32]}
    return DenseCase(q, k, v, shown, {"extra": extra}, flat=True)


def _real_and_padding(dtype: str, *, packed: bool, bounds: bool) -> DenseCase:
    q, k, v = draw(dtype, batch=1)
    for x in (q, k, v):
        x[:, 13:] = np.nan
    shown = np.zeros((TOKENS, TOKENS), bool)
    shown[:13, :13] = True
    metadata: dict[str, Any] = {}
    if packed:
        ends = np.array([0, 13], np.int32)
        metadata["packed_padding"] = PackedPaddingMetadata(13, 13, ends, ends)
    if bounds:
        two = [0, 13, TOKENS]
        metadata["extra"] = {"cu_seqlens_q": two, "cu_seqlens_k": two, "valid_kv_length": 13,
                             "unknown": object(), "kv_cache_dtype": None}  # fmt: skip
    return DenseCase(q, k, v, shown, metadata)


def _valid_keys(dtype: str, *, causal: bool) -> DenseCase:
    """Keys past the valid ones are padding; every query keeps its output."""
    q, k, v = draw(dtype)
    _hide(k, v, slice(17, None))
    shown = visible(TOKENS, TOKENS, causal=causal)
    shown[:, 17:] = False
    return DenseCase(q, k, v, shown, {"extra": {"valid_kv_length": 17}}, causal)


# --- spans and shards ----------------------------------------------------------------------------


def _spans(dtype: str, *spans: list[tuple[int, int]], causal: bool = False) -> DenseCase:
    q, k, v = draw(dtype)
    shown = np.stack([visible(TOKENS, TOKENS, spans=s) for s in spans])[:, None]
    return DenseCase(q, k, v, shown, {"full_attn_spans": list(spans)}, causal)


def _case_19(dtype: str) -> DenseCase:
    """Queries 4 to 11 of 16 keys, spans [2, 6) and [8, 16)."""
    q, k, v = draw(dtype, queries=8, keys=16)
    spans = [(2, 6), (8, 16)]
    shown = visible(8, 16, kv_start_pos=4, spans=spans)
    assert shown.sum(1).tolist() == [6, 6, 7, 8, 16, 16, 16, 16]
    ranges = (QueryRange(0, 8, 4),)
    return DenseCase(q, k, v, shown, {"full_attn_spans": [spans, spans], "query_ranges": ranges})


def _shard(dtype: str, *, spans: list[tuple[int, int]] | None) -> DenseCase:
    """A front part that every shard holds, and the shard's own queries: 3 + 5 of 24."""
    q, k, v = draw(dtype, queries=8, keys=TOKENS)
    ranges = (QueryRange(0, 3, 0), QueryRange(3, 8, 14))
    positions = (0, 1, 2, 14, 15, 16, 17, 18)
    shown = np.concatenate(
        [visible(1, TOKENS, kv_start_pos=p, causal=True, spans=spans) for p in positions]
    )
    metadata: dict[str, Any] = {"query_ranges": ranges}
    if spans is not None:
        metadata["full_attn_spans"] = [spans] * BATCH
    return DenseCase(q, k, v, shown, metadata, causal=True)


# --- video ---------------------------------------------------------------------------------------


def _video(dtype: str, layout: VideoTokenLayout, *, masked: bool) -> DenseCase:
    """Rows from 15 on are padding: NaN, seen by nobody, and their output is zero."""
    q, k, v = draw(dtype)
    for x in (q, k, v):
        x[:, 15:] = np.nan
    shown = np.zeros((TOKENS, TOKENS), bool)
    shown[:15, :15] = True
    metadata: dict[str, Any] = {"video_layout": layout}
    if masked:
        metadata["attn_mask"] = np.broadcast_to(np.arange(TOKENS) < 15, (BATCH, TOKENS)).copy()
    return DenseCase(q, k, v, shown, metadata)


def _video_beside_joint(dtype: str) -> DenseCase:
    """The layout counts rows without joint tokens, so here the masks say what is padding."""
    case = _joint(dtype, "front", "both")
    layout = VideoTokenLayout(used_len=TOKENS - JOINT)
    return replace(case, metadata=case.metadata | {"video_layout": layout})


ONE_VIDEO = VideoTokenLayout(prefix_len=3, latent_grid=(2, 2, 3))
SEVERAL_VIDEOS = VideoTokenLayout(
    used_len=15,
    video_spans=(VideoTokenSpan(1, (1, 2, 2), "reference"), VideoTokenSpan(7, (2, 2, 2), "target")),
)


FEATURES: dict[str, Callable[[str], DenseCase]] = {
    "full": lambda d: _plain(d),
    "causal": lambda d: _plain(d, causal=True),
    "softmax_scale 0": lambda d: _plain(d, scale=0.0),
    "softmax_scale below 0": lambda d: _plain(d, causal=True, scale=-0.3),
    "softmax_scale 1": lambda d: _plain(d, scale=1.0),
    "one query head a KV head": lambda d: _plain(d, kv_heads=4),
    "one KV head": lambda d: _plain(d, kv_heads=1, causal=True),
    "seven query heads a KV head": lambda d: _plain(d, heads=14, causal=True),
    "head size 64, values of 48": lambda d: _plain(d, size=64, value_size=48),
    "head size 80": lambda d: _plain(d, size=80),
    "head size 128": lambda d: _plain(d, size=128, causal=True),
    "head size 256": lambda d: _plain(d, size=256, scale=0.06),
    "fewer queries than keys": lambda d: _plain(d, queries=5, keys=TOKENS, causal=True),
    "more queries than keys": lambda d: _plain(d, queries=TOKENS, keys=5, causal=True),
    "one query, one key": lambda d: _plain(d, queries=1, keys=1),
    "no query": lambda d: _plain(d, queries=0, keys=4),
    "no key": lambda d: _plain(d, queries=4, keys=0),
    "no sample": lambda d: _plain(d, batch=0),
    "thousands of keys": lambda d: _plain(
        d, batch=1, queries=40, keys=3000, heads=2, kv_heads=1, causal=True
    ),
    "mask of keys": lambda d: _masked(d, (BATCH, TOKENS)),
    "mask of integers": lambda d: _masked(d, (BATCH, TOKENS), kind="integers", causal=True),
    "mask of pairs": lambda d: _masked(d, (TOKENS, TOKENS), causal=True),
    "mask of samples": lambda d: _masked(d, (BATCH, TOKENS, TOKENS)),
    "mask of heads": lambda d: _masked(d, (BATCH, HEADS, TOKENS, TOKENS), causal=True),
    "additive mask of keys": lambda d: _masked(d, (BATCH, TOKENS), kind="additive"),
    "additive mask of pairs": lambda d: _masked(d, (TOKENS, TOKENS), kind="additive", causal=True),
    "additive mask of heads": lambda d: _masked(d, (BATCH, HEADS, TOKENS, TOKENS), kind="additive"),
    "additive mask that hides all": _all_hidden,
    "joint tokens in front": lambda d: _joint(d, "front", "none"),
    "joint tokens in the rear": lambda d: _joint(d, "rear", "none"),
    "joint mask, front": lambda d: _joint(d, "front", "joint"),
    "joint mask, rear": lambda d: _joint(d, "rear", "joint"),
    "own mask beside joint tokens": lambda d: _joint(d, "rear", "own"),
    "both masks, front": lambda d: _joint(d, "front", "both"),
    "both masks, rear": lambda d: _joint(d, "rear", "both"),
    "one mask for all, rear": lambda d: _joint(d, "rear", "whole"),
    "additive beside a joint mask": lambda d: _joint(d, "rear", "float"),
    "joint keys without queries": lambda d: _joint(d, "front", "joint", with_queries=False),
    "documents": lambda d: documents(d),
    "documents, causal, bounds on the device": lambda d: documents(d, causal=True, on_device=True),
    "documents and a mask": lambda d: documents(d, masked=True),
    "documents of cross attention": _cross_documents,
    "padding by packed_padding": lambda d: _real_and_padding(d, packed=True, bounds=False),
    "padding by bounds": lambda d: _real_and_padding(d, packed=False, bounds=True),
    "padding by both": lambda d: _real_and_padding(d, packed=True, bounds=True),
    "valid keys": lambda d: _valid_keys(d, causal=False),
    "valid keys, causal": lambda d: _valid_keys(d, causal=True),
    "spans of each sample": lambda d: _spans(d, [(2, 6), (8, 16)], []),
    "spans alike, causal": lambda d: _spans(d, [(0, 7), (9, 24)], [(0, 7), (9, 24)], causal=True),
    "spans of a shard (case 19)": _case_19,
    "ranges of a shard": lambda d: _shard(d, spans=None),
    "ranges and spans of a shard": lambda d: _shard(d, spans=[(1, 16)]),
    "one video": lambda d: _video(d, ONE_VIDEO, masked=False),
    "one video and a mask": lambda d: _video(d, ONE_VIDEO, masked=True),
    "several videos": lambda d: _video(d, SEVERAL_VIDEOS, masked=False),
    "several videos and a mask": lambda d: _video(d, SEVERAL_VIDEOS, masked=True),
    "a video beside joint tokens": _video_beside_joint,
}
"""Every dense feature of the contract by name; each takes a dtype."""
