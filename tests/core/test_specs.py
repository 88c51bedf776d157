"""Specs: the sizes that follow, what a spec refuses, and what merges into one."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from layout_core import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    KVQuantMode,
    MLAAttentionSpec,
    ModelConfig,
    MultipleOf,
    ParallelConfig,
    RSWASpec,
    RunConfig,
    SchedulerConfig,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    get_kv_quant_mode,
)
from layout_core.dtypes import DTYPES, DType
from layout_core.errors import MergeError, SpecError, UnsupportedError


def full(**changes: Any) -> FullAttentionSpec:
    values: dict[str, Any] = {
        "block_size": 16,
        "num_kv_heads": 8,
        "head_size": 128,
        "dtype": "bfloat16",
    }
    return FullAttentionSpec(**(values | changes))


def config(max_model_len: int = 1000, dcp: int = 1, batched: int = 64) -> RunConfig:
    return RunConfig(
        ModelConfig(max_model_len),
        scheduler_config=SchedulerConfig(
            max_num_batched_tokens=batched, max_num_encoder_input_tokens=1500
        ),
        parallel_config=ParallelConfig(decode_context_parallel_size=dcp),
    )


def test_dense_sizes() -> None:
    spec = full()
    assert spec.head_size_v == 128
    assert spec.dtype is DTYPES["bfloat16"]
    assert (spec.num_heads, spec.num_states, spec.state_content_size_bytes) == (8, 16, 512)
    assert spec.unpadded_page_size_bytes == spec.real_page_size_bytes == 65536
    assert spec.page_size_bytes == 65536
    assert full(page_size_padded=70000).page_size_bytes == 70000
    assert full(head_size_v=64).state_content_size_bytes == 384


def test_packed_content_head_slots_and_states() -> None:
    assert full(state_content_bytes=100).page_size_bytes == 8 * 16 * 100
    assert full(num_head_slots=2).num_heads == 2
    assert full(tokens_per_state=4).num_states == 4
    assert full(tokens_per_state=Fraction(1, 4)).num_states == 64
    assert full(tokens_per_state=Fraction(1, 4)).get_num_kernel_states(4) == 16


def test_sizes_are_counted_in_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DTYPES, "int4", DType("int4", 4))
    even = full(dtype="int4", head_size=3, head_size_v=5)
    assert even.state_content_size_bytes == 4
    with pytest.raises(SpecError, match=r"36 bits, no whole number of bytes"):
        full(dtype="int4", head_size=3, head_size_v=6)
    packed = full(dtype="int4", head_size=3, head_size_v=6, state_content_bytes=5)
    assert packed.state_content_size_bytes == 5


@pytest.mark.parametrize(
    ("changes", "wording"),
    [
        ({"block_size": 0}, r"FullAttentionSpec.block_size: expected an int >= 1, got 0"),
        ({"block_size": 16.0}, r"block_size: expected an int >= 1, got 16.0"),
        ({"block_size": True}, r"block_size: expected an int >= 1, got True"),
        ({"num_kv_heads": 0}, r"num_kv_heads: expected an int >= 1, got 0"),
        ({"head_size": -1}, r"head_size: expected an int >= 1, got -1"),
        ({"head_size_v": -1}, r"head_size_v: expected an int >= 0, got -1"),
        ({"page_size_padded": 65535}, r"at least the payload of 65536 bytes, got 65535"),
        ({"num_head_slots": 0}, r"num_head_slots: expected an int >= 1, got 0"),
        ({"state_content_bytes": 0}, r"state_content_bytes: expected an int >= 1, got 0"),
        ({"tokens_per_state": 0}, r"tokens_per_state: expected an int or a Fraction > 0, got 0"),
        ({"tokens_per_state": 0.5}, r"expected an int or a Fraction > 0, got 0.5"),
        ({"tokens_per_state": 17}, r"a block of 16 tokens holds no whole state of 17 tokens"),
        ({"kv_quant_mode": 99}, r"kv_quant_mode: expected a KVQuantMode, got 99"),
        ({"dtype": "complex64"}, r"dtype: expected one of .* got 'complex64'"),
        ({"block_stride_alignment": 0}, r"block_stride_alignment: expected an int >= 1, got 0"),
        ({"dcp_sharded": 1}, r"dcp_sharded: expected None or a bool, got 1"),
        ({"sliding_window": 0}, r"sliding_window: expected an int >= 1, got 0"),
    ],
)
def test_a_spec_is_checked_when_built(changes: dict[str, Any], wording: str) -> None:
    with pytest.raises(ValueError, match=wording):
        full(**changes)


def test_the_other_specs_check_their_own_fields() -> None:
    values: dict[str, Any] = {
        "block_size": 16,
        "num_kv_heads": 1,
        "head_size": 8,
        "dtype": "float16",
    }
    with pytest.raises(SpecError, match=r"SlidingWindowSpec.sliding_window: .* got 0"):
        SlidingWindowSpec(sliding_window=0, **values)
    with pytest.raises(SpecError, match=r"attention_chunk_size: expected an int >= 1, got -2"):
        ChunkedLocalAttentionSpec(attention_chunk_size=-2, **values)
    with pytest.raises(SpecError, match=r"expected None or 'deepseek_v4', got 'x'"):
        SlidingWindowMLASpec(sliding_window=4, model_version="x", **values)


def test_mla_stores_one_vector_and_aligns_its_page() -> None:
    spec = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype="bfloat16")
    assert (spec.head_size_v, spec.page_size_bytes) == (0, 64 * 1152)
    aligned = MLAAttentionSpec(
        block_size=4, num_kv_heads=1, head_size=10, dtype="float16", alignment=64
    )
    assert (aligned.unpadded_page_size_bytes, aligned.page_size_padded) == (80, 128)
    with pytest.raises(SpecError, match=r"at least the payload of 320 bytes, got 100"):
        MLAAttentionSpec(
            block_size=16,
            num_kv_heads=1,
            head_size=10,
            dtype="float16",
            alignment=64,
            page_size_padded=100,
        )
    longer = aligned.copy_with_new_block_size(16)
    assert (longer.unpadded_page_size_bytes, longer.page_size_bytes) == (320, 320)


def test_block_stride_alignment() -> None:
    assert full().get_block_stride_alignment() == 1
    assert full(block_stride_alignment=96).get_block_stride_alignment() == 96
    assert full(block_stride_alignment=MultipleOf(4)).get_block_stride_alignment() == 16384
    # a kernel block that is the whole block asks for nothing
    assert full(block_stride_alignment=MultipleOf(64)).get_block_stride_alignment() == 1


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (full(), 63),  # ceil(1000 / 16)
        (full(sliding_window=8), 63),
        (full(attention_chunk_size=8), 63),
    ],
)
def test_full_attention_keeps_every_token(spec: FullAttentionSpec, expected: int) -> None:
    assert spec.max_memory_usage_bytes(config()) == expected * spec.page_size_bytes


def test_decode_context_parallelism_shards_the_tokens() -> None:
    spec = full()
    assert spec.max_memory_usage_bytes(config(dcp=4)) == 16 * spec.page_size_bytes
    assert spec.max_num_blocks_per_req(config(dcp=4), 1000) == 16
    replicated = full(dcp_sharded=False)
    assert replicated.max_memory_usage_bytes(config(dcp=4)) == 63 * spec.page_size_bytes
    assert replicated.max_num_blocks_per_req(config(dcp=4), 1000) == 63


def test_windows_and_chunks_keep_what_is_in_reach() -> None:
    values: dict[str, Any] = {
        "block_size": 16,
        "num_kv_heads": 1,
        "head_size": 8,
        "dtype": "float16",
    }
    window = SlidingWindowSpec(sliding_window=100, **values)
    # 99 earlier tokens and 64 in flight, in whole blocks, and one for a window cut by a block
    assert window.max_memory_usage_bytes(config()) == 12 * window.page_size_bytes
    assert window.max_memory_usage_bytes(config(max_model_len=20)) == 3 * window.page_size_bytes
    kept = replace(window, extra_retained_tokens=10)
    assert kept.max_admission_blocks_per_request(64, 1000) == 12
    two_batches = config()
    two_batches.max_concurrent_batches = 2  # 99 and 128 in flight: 15 blocks and one
    assert window.max_memory_usage_bytes(two_batches) == 16 * window.page_size_bytes
    chunk = ChunkedLocalAttentionSpec(attention_chunk_size=100, **values)
    assert chunk.max_memory_usage_bytes(config()) == 11 * chunk.page_size_bytes
    with pytest.raises(UnsupportedError, match=r"parallelism of 2 cannot shard a sliding window"):
        window.max_memory_usage_bytes(config(dcp=2))
    assert replace(window, dcp_sharded=False).max_memory_usage_bytes(config(dcp=2)) > 0


def test_encoder_layers() -> None:
    values: dict[str, Any] = {
        "block_size": 16,
        "num_kv_heads": 1,
        "head_size": 8,
        "dtype": "float16",
    }
    cross = CrossAttentionSpec(**values)
    assert cross.max_memory_usage_bytes(config()) == 94 * cross.page_size_bytes
    assert EncoderOnlyAttentionSpec(**values).max_memory_usage_bytes(config()) == 0


def test_full_specs_merge_windows_and_causality() -> None:
    merged = FullAttentionSpec.merge([full(), full(sliding_window=8), full(non_causal=True)])
    assert merged == full(sliding_window=8, non_causal=True)
    same = full()
    assert FullAttentionSpec.merge([same, full()]) is same


@pytest.mark.parametrize(
    ("specs", "error", "wording"),
    [
        (
            [full(), full(head_size=64)],
            MergeError,
            r"specs\[1\].head_size: .* expected 128, got 64",
        ),
        ([full(), full(block_size=32)], MergeError, r"specs\[1\].block_size"),
        (
            [full(), full(kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)],
            MergeError,
            r"specs\[1\].kv_quant_mode",
        ),
        (
            [full(sliding_window=8), full(sliding_window=9)],
            SpecError,
            r"must have the same, got \[8, 9\]",
        ),
        (
            [full(sliding_window=8), full(attention_chunk_size=9)],
            MergeError,
            r"cannot hold both sliding windows \(8\) and chunked",
        ),
        ([], MergeError, r"expected at least one spec to merge"),
    ],
)
def test_what_does_not_merge(
    specs: list[FullAttentionSpec], error: type[SpecError], wording: str
) -> None:
    with pytest.raises(error, match=wording):
        FullAttentionSpec.merge(specs)


def test_merging_refuses_other_classes() -> None:
    mla = MLAAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype="bfloat16")
    window = SlidingWindowSpec(
        block_size=16, num_kv_heads=8, head_size=128, dtype="bfloat16", sliding_window=4
    )
    with pytest.raises(MergeError, match=r"specs\[1\]: MLAAttentionSpec cannot be merged"):
        FullAttentionSpec.merge([full(), mla])
    with pytest.raises(MergeError, match=r"must all be MLAAttentionSpec, got FullAttentionSpec"):
        MLAAttentionSpec.merge([mla, full()])  # type: ignore[list-item]
    with pytest.raises(MergeError, match=r"must all be FullAttentionSpec, got SlidingWindowSpec"):
        FullAttentionSpec.merge([full(), window])  # type: ignore[list-item]
    with pytest.raises(MergeError, match=r"specs\[1\].sliding_window"):
        SlidingWindowSpec.merge([window, replace(window, sliding_window=5)])


def test_classes_that_differ_only_in_what_they_keep_do_not_merge() -> None:
    values: dict[str, Any] = {
        "block_size": 16,
        "num_kv_heads": 1,
        "head_size": 8,
        "dtype": "float16",
    }
    cross = CrossAttentionSpec(**values)
    window = SlidingWindowSpec(sliding_window=4, **values)
    assert CrossAttentionSpec.merge([cross, CrossAttentionSpec(**values)]) is cross
    for other in (window, FullAttentionSpec(**values), EncoderOnlyAttentionSpec(**values)):
        with pytest.raises(MergeError, match=r"specs\[1\]: .* must all be CrossAttentionSpec"):
            CrossAttentionSpec.merge([cross, other])  # type: ignore[list-item]


def test_mla_merge_keeps_the_page_and_drops_the_alignment() -> None:
    spec = MLAAttentionSpec(
        block_size=4, num_kv_heads=1, head_size=10, dtype="float16", alignment=64
    )
    merged = MLAAttentionSpec.merge([spec, spec])
    assert (merged.alignment, merged.page_size_padded, merged.page_size_bytes) == (None, 128, 128)
    with pytest.raises(MergeError, match=r"cache_dtype_str"):
        MLAAttentionSpec.merge([spec, replace(spec, cache_dtype_str="fp8_ds_mla")])


def test_sink_and_reference_windows_merge_as_full_attention() -> None:
    values: dict[str, Any] = {
        "block_size": 16,
        "num_kv_heads": 1,
        "head_size": 8,
        "dtype": "float16",
    }
    sink = SinkFullAttentionSpec(sink_len=4, **values)
    assert SinkFullAttentionSpec.merge([sink, sink]) == sink
    rswa = RSWASpec(rswa_window=4, **values)
    assert RSWASpec.merge([rswa, rswa]) == rswa
    with pytest.raises(MergeError, match=r"rswa_window: must agree in one group, got \[4, 5\]"):
        RSWASpec.merge([rswa, replace(rswa, rswa_window=5)])


def test_uniform_type_wraps_layers_of_unlike_pages() -> None:
    layers: dict[str, KVCacheSpec] = {"a": full(), "b": full(head_size=64)}
    uniform = UniformTypeKVCacheSpecs.from_specs(layers)
    assert uniform is not None
    assert uniform.page_size_bytes == 65536 + 32768
    assert uniform.max_memory_usage_pages(config()) == 63
    assert uniform.max_memory_usage_bytes(config()) == 63 * (65536 + 32768)
    assert uniform.max_num_blocks_per_req(config(dcp=4), 1000) == 16
    assert uniform.get_max_layers_per_page_size() == 1
    window = SlidingWindowSpec(
        block_size=16, num_kv_heads=8, head_size=128, dtype="bfloat16", sliding_window=4
    )
    assert UniformTypeKVCacheSpecs.from_specs({"a": full(), "b": window}) is None
    assert UniformTypeKVCacheSpecs.from_specs({"a": full(), "b": full(block_size=32)}) is None
    assert UniformTypeKVCacheSpecs.from_specs({"a": full(), "b": full(dcp_sharded=False)}) is None
    with pytest.raises(SpecError, match=r"layer 'b' has blocks of 32 tokens, expected 16"):
        UniformTypeKVCacheSpecs(
            block_size=16, kv_cache_specs={"a": full(), "b": full(block_size=32)}
        )
    with pytest.raises(SpecError, match=r"expected at least one layer"):
        UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={})


def test_specs_are_values() -> None:
    assert hash(full()) == hash(full())
    assert full() != full(head_size=64)
    with pytest.raises(AttributeError):
        full().block_size = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("auto", KVQuantMode.NONE),
        ("fp8", KVQuantMode.FP8_PER_TENSOR),
        ("fp8_e5m2", KVQuantMode.FP8_PER_TENSOR),
        ("fp8_per_token_head", KVQuantMode.FP8_PER_TOKEN_HEAD),
        ("int4_per_token_head", KVQuantMode.INT4_PER_TOKEN_HEAD),
        ("nvfp4_4over6", KVQuantMode.NVFP4),
        ("nvfp4_ds_mla", KVQuantMode.NVFP4_DS_MLA),
        ("turboquant_k8v4", KVQuantMode.TURBOQUANT_K8V4),
    ],
)
def test_quant_modes(name: str, mode: KVQuantMode) -> None:
    assert get_kv_quant_mode(name) is mode
