"""Dense calls beside vLLM-Omni's, on the same random inputs, in float32.

Its ``forward`` knows no CPU; the methods that it would dispatch to run on CPU tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from vllm_omni.diffusion.attention.backends import abstract, sdpa
from vllm_omni.diffusion.attention.backends.abstract import (
    AttentionMetadata,
    PackedPaddingMetadata,
    QueryRange,
    VideoTokenLayout,
    VideoTokenSpan,
)
from vllm_omni.diffusion.attention.backends.utils.piecewise_attn import piecewise_attn

from integrations.vllm_omni import (
    OmniJaxBackend,
    OmniTorchBackend,
    as_attention_metadata,
)
from layout_core import attention as ours
from layout_core.errors import TensorError, UnsupportedError
from tests import oracle
from tests.tolerances import assert_close

BACKENDS = (OmniTorchBackend, OmniJaxBackend)
B, S, D = 2, 24, 32


@pytest.fixture(params=BACKENDS, ids=lambda backend: backend.get_name())
def backend(request: pytest.FixtureRequest) -> Iterator[Any]:
    return request.param


def build(backend: Any, *, causal: bool = False, heads: int = 4, kv_heads: int = 2) -> Any:
    return backend.get_impl_cls()(
        num_heads=heads,
        head_size=D,
        softmax_scale=0.2,
        causal=causal,
        num_kv_heads=kv_heads,
        prefix="l",
        role="self",
        backend_explicit=True,
    )


def qkv(seed: int, queries: int = S, keys: int = S) -> tuple[torch.Tensor, ...]:
    rng = np.random.default_rng(seed)

    def make(count: int, heads: int) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal((B, count, heads, D)).astype(np.float32))

    return make(queries, 4), make(keys, 2), make(keys, 2)


def agree(mine: torch.Tensor, peer: torch.Tensor, where: str = "") -> None:
    assert_close(mine.numpy(), peer.numpy(), "engines", "float32", where)


def test_subclasses_and_flags(backend: Any) -> None:
    assert issubclass(backend, abstract.AttentionBackend)
    assert issubclass(backend.get_impl_cls(), abstract.AttentionImpl)
    assert backend.get_metadata_cls() is AttentionMetadata
    made = backend.get_builder_cls()().build(extra={"valid_kv_length": 3})
    assert type(made) is AttentionMetadata
    assert made.extra == {"valid_kv_length": 3}
    with pytest.raises(TensorError, match="joint_value: expected joint_key and joint_value"):
        backend.get_builder_cls()().build(joint_key=torch.zeros(1, 1, 1, 1))
    assert backend.supports_paged_kv
    assert backend.supports_attention_mask()
    assert backend.supports_head_size(7)
    assert backend.indexes_kv_by_block_stride is None
    backend.validate_available()


# torch refuses a causal call with a mask
@pytest.mark.parametrize(
    ("causal", "masked"),
    [(False, None), (True, None), (False, "keys"), (False, "full"), (False, "additive")],
)
def test_dense_calls_are_those_of_its_sdpa_backend(
    backend: Any, causal: bool, masked: str | None
) -> None:
    query, key, value = qkv(1)
    mask = None
    if masked == "keys":
        mask = torch.ones(B, S, dtype=torch.bool)
        mask[0, 17:] = mask[1, 9:] = False
    elif masked == "full":
        mask = torch.rand(B, 1, S, S, generator=torch.Generator().manual_seed(0)) > 0.3
        mask[..., 0] = True
    elif masked == "additive":
        mask = torch.randn(B, 1, S, S, generator=torch.Generator().manual_seed(0))
    metadata = None if mask is None else AttentionMetadata(attn_mask=mask)
    theirs = sdpa.SDPAImpl(4, D, 0.2, causal=causal, num_kv_heads=2)
    with pytest.raises(NotImplementedError):  # a CPU is no platform of its own
        theirs.forward(query, key, value, metadata)
    peer = theirs.forward_cuda(query, key, value, metadata)
    agree(build(backend, causal=causal).forward(query, key, value, metadata), peer)
    agree(build(backend, causal=causal).forward_cpu(query, key, value, metadata), peer)
    if masked is None:
        for seed in range(2, 6):
            more = qkv(seed)
            agree(build(backend, causal=causal).forward(*more), theirs.forward_cuda(*more, None))


@pytest.mark.parametrize("ranges", [None, (QueryRange(0, 5, 2), QueryRange(5, 14, 12))])
def test_spans_are_those_of_its_piecewise_attention(backend: Any, ranges: Any) -> None:
    spans = [(2, 6), (8, 16)]
    queries = S if ranges is None else 14
    query, key, value = qkv(2, queries)

    def attend(q: Any, k: Any, v: Any, *, causal: bool, softmax_scale: float) -> torch.Tensor:
        """Bottom-right, as flash attention is."""
        out = []
        for sample in range(B):
            mask = oracle.visible(
                q.shape[1], k.shape[1], kv_start_pos=k.shape[1] - q.shape[1], causal=causal
            )
            part, _ = oracle.dense_attention(
                *(x[sample].numpy() for x in (q, k, v)), mask, scale=softmax_scale
            )
            out.append(torch.from_numpy(part.astype(np.float32)))
        return torch.stack(out)

    peer = piecewise_attn(query, key, value, [spans] * B, 0.2, attend, query_ranges=ranges)
    metadata = AttentionMetadata(full_attn_spans=[spans] * B, query_ranges=ranges)
    agree(build(backend, causal=True).forward(query, key, value, metadata), peer)


@pytest.mark.parametrize("strategy", ["front", "rear"])
def test_joint_tokens_and_their_mask(backend: Any, strategy: str) -> None:
    query, key, value = qkv(3)
    joint_query, joint_key, joint_value = qkv(4, 7, 7)
    joint_mask = torch.ones(B, 7, dtype=torch.bool)
    joint_mask[:, 5:] = False
    metadata = AttentionMetadata(
        joint_query=joint_query,
        joint_key=joint_key,
        joint_value=joint_value,
        joint_attn_mask=joint_mask,
        joint_strategy=strategy,
    )
    out = build(backend).forward(query, key, value, metadata)

    def join(joint: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        return torch.cat((joint, own) if strategy == "front" else (own, joint), dim=1)

    whole = AttentionMetadata(attn_mask=join(joint_mask, torch.ones(B, S, dtype=torch.bool)))
    peer = sdpa.SDPAImpl(4, D, 0.2, num_kv_heads=2).forward_cuda(
        join(joint_query, query), join(joint_key, key), join(joint_value, value), whole
    )
    agree(out, peer)


def test_packed_documents_never_see_each_other(backend: Any) -> None:
    query, key, value = (x[:1] for x in qkv(5))
    bounds = torch.tensor([0, 5, 12, S], dtype=torch.int32)
    extra = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": 12}
    out = build(backend).forward(query, key, value, AttentionMetadata(extra=extra))
    theirs = sdpa.SDPAImpl(4, D, 0.2, num_kv_heads=2)
    for first, last in ((0, 5), (5, 12), (12, S)):
        at = slice(first, last)
        agree(out[:, at], theirs.forward_cuda(query[:, at], key[:, at], value[:, at]))


def test_a_layer_left_unquantised_says_float(backend: Any) -> None:
    """vLLM-Omni's word for it, which is no dtype that a backend would have to support."""
    query, key, value = qkv(6)
    metadata = AttentionMetadata(extra={"kv_cache_dtype": "float"})
    impl = build(backend)
    agree(impl.forward(query, key, value, metadata), impl.forward(query, key, value))
    assert metadata.extra == {"kv_cache_dtype": "float"}, "the caller's metadata is unchanged"
    with pytest.raises(UnsupportedError, match=r"supports_kv_cache_dtype\('fp8', 'cpu'\)"):
        impl.forward(query, key, value, AttentionMetadata(extra={"kv_cache_dtype": "fp8"}))


def test_the_heads_of_one_ulysses_rank(backend: Any) -> None:
    query, key, value = qkv(7)
    impl = build(backend)
    whole = impl.forward(query, key, value)
    for rank in range(2):
        q, kv = slice(2 * rank, 2 * rank + 2), slice(rank, rank + 1)
        part = impl.forward(query[:, :, q], key[:, :, kv], value[:, :, kv])
        agree(part, whole[:, :, q])
    with pytest.raises(TensorError, match=r"layer 'l' expects \[B, S, H, 32\] with H dividing 4"):
        impl.forward(query[:, :, :3], key, value)


def test_an_unknown_layout_of_the_tensors_is_refused(backend: Any) -> None:
    with pytest.raises(UnsupportedError, match="qkv_layout: layer 'l'"):
        backend.get_impl_cls()(4, D, 0.2, prefix="l", qkv_layout="BNSD")


def test_every_field_of_its_metadata_comes_over() -> None:
    lengths = torch.tensor([0, 3], dtype=torch.int32)
    theirs = AttentionMetadata(
        attn_mask=torch.ones(1, 3),
        joint_strategy="rear",
        extra={"valid_kv_length": 2, "kv_cache_dtype": "float", "own": 1},
        full_attn_spans=[[(0, 2)]],
        query_ranges=(QueryRange(0, 2, 5),),
        video_layout=VideoTokenLayout(1, (1, 2, 3), 9, (VideoTokenSpan(1, (1, 2, 3), "target"),)),
        packed_padding=PackedPaddingMetadata(3, 3, lengths, lengths),
    )
    taken = as_attention_metadata(theirs)
    assert taken is not None
    assert taken.attn_mask is theirs.attn_mask
    assert taken.extra == {"valid_kv_length": 2, "own": 1}
    assert taken.query_ranges == (ours.QueryRange(0, 2, 5),)
    assert taken.video_layout == ours.VideoTokenLayout(
        1, (1, 2, 3), 9, (ours.VideoTokenSpan(1, (1, 2, 3), "target"),)
    )
    assert taken.video_layout.used_length() == 9
    assert taken.packed_padding is not None
    assert taken.packed_padding.cu_seqlens_k is lengths
    assert (taken.joint_strategy, taken.full_attn_spans) == ("rear", [[(0, 2)]])
    assert as_attention_metadata(taken) is taken
    assert as_attention_metadata(None) is None
