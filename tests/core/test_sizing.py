"""Groups, block counts, the fit of a request, and the auto-fit of the longest length."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from layout_core import (
    CacheConfig,
    ChunkedLocalAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheLayout,
    KVCacheSpec,
    MLAAttentionSpec,
    ModelConfig,
    MultipleOf,
    ParallelConfig,
    RunConfig,
    SchedulerConfig,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    check_enough_kv_cache_memory,
    estimate_max_model_len,
    generate_scheduler_kv_cache_config,
    get_kv_cache_config_from_groups,
    get_kv_cache_configs,
    get_kv_cache_groups,
    get_max_concurrency_for_kv_cache_config,
    max_memory_usage_bytes,
    resolve_kv_cache_block_sizes,
    resolve_layout,
)
from layout_core.errors import (
    ConfigError,
    InsufficientMemoryError,
    SpecError,
    UnresolvedLayoutError,
    UnsupportedError,
)

VALUES: dict[str, Any] = {
    "block_size": 16,
    "num_kv_heads": 2,
    "head_size": 8,
    "dtype": "float16",
}
FULL = FullAttentionSpec(**VALUES)
WINDOW = SlidingWindowSpec(sliding_window=32, **VALUES)
PAGE = FULL.page_size_bytes  # 1024


def run_config(max_model_len: int = 160, layout: str | None = "LBNHC", **cache: Any) -> RunConfig:
    return RunConfig(
        ModelConfig(max_model_len),
        CacheConfig(kv_cache_layout=layout, **cache),
        SchedulerConfig(max_num_batched_tokens=64),
    )


def layers(spec: KVCacheSpec, count: int, prefix: str = "l") -> dict[str, KVCacheSpec]:
    return {f"{prefix}{i}": spec for i in range(count)}


# Groups


def test_equal_layers_are_one_group() -> None:
    (group,) = get_kv_cache_groups(run_config(), layers(FULL, 4))
    assert group == KVCacheGroupSpec(["l0", "l1", "l2", "l3"], FULL)
    assert get_kv_cache_groups(run_config(), {}) == []


def test_windows_of_full_layers_merge_and_causality_too() -> None:
    specs = {"a": FULL, "b": replace(FULL, sliding_window=8), "c": replace(FULL, non_causal=True)}
    (group,) = get_kv_cache_groups(run_config(), specs)
    assert group.kv_cache_spec == replace(FULL, sliding_window=8, non_causal=True)
    with pytest.raises(SpecError, match=r"sliding_window: .* must have the same, got \[8, 9\]"):
        get_kv_cache_groups(
            run_config(),
            {"a": replace(FULL, sliding_window=8), "b": replace(FULL, sliding_window=9)},
        )


def test_layers_of_one_type_share_a_group() -> None:
    (group,) = get_kv_cache_groups(run_config(), {"a": FULL, "b": replace(FULL, head_size=16)})
    assert isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs)
    assert group.layer_names == ["a", "b"]


def test_quantised_layers_group_apart_from_plain_ones() -> None:
    quantised = replace(FULL, kv_quant_mode=1)  # type: ignore[arg-type]
    (group,) = get_kv_cache_groups(run_config(), {"a": FULL, "b": quantised})
    assert isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs)


@pytest.mark.parametrize(
    ("full", "window", "expected"),
    [
        (2, 4, [["f0", "f1"], ["w0", "w2"], ["w1", "w3"]]),
        (4, 5, [["f0", "f1", "f2", "f3"], ["w0", "w1", "w2", "w3", "w4"]]),
        (2, 3, [["f0", "f1"], ["w0", "w2"], ["w1"]]),
    ],
)
def test_kinds_are_dealt_into_groups_of_one_length(
    full: int, window: int, expected: list[list[str]]
) -> None:
    specs = layers(FULL, full, "f") | layers(WINDOW, window, "w")
    groups = get_kv_cache_groups(run_config(), specs)
    assert [group.layer_names for group in groups] == expected


def test_smaller_pages_get_longer_blocks_or_padding() -> None:
    half = replace(WINDOW, num_kv_heads=1)
    groups = get_kv_cache_groups(run_config(), layers(FULL, 1, "f") | layers(half, 1, "w"))
    assert [group.kv_cache_spec.block_size for group in groups] == [16, 32]
    odd = replace(WINDOW, head_size=5)
    groups = get_kv_cache_groups(run_config(), layers(FULL, 1, "f") | layers(odd, 1, "w"))
    assert groups[1].kv_cache_spec == replace(odd, page_size_padded=PAGE)


def test_pages_that_cannot_be_brought_to_one_size() -> None:
    mla = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=9, dtype="float16")
    chunk = ChunkedLocalAttentionSpec(attention_chunk_size=32, **VALUES)
    with pytest.raises(UnsupportedError, match=r"layer 'm0': its page of 288 bytes .* 1024"):
        get_kv_cache_groups(run_config(), layers(mla, 1, "m") | layers(chunk, 1, "c"))
    # a window beside MLA is stored as full attention instead
    (group,) = get_kv_cache_groups(run_config(), layers(mla, 1, "m") | layers(WINDOW, 1, "w"))
    assert isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs)
    assert group.kv_cache_spec.kv_cache_specs["w0"] == replace(FULL, sliding_window=32)


def test_a_padded_page_is_not_made_longer_in_silence() -> None:
    padded = replace(WINDOW, num_kv_heads=1, head_size=4, page_size_padded=PAGE // 2)
    with pytest.raises(UnsupportedError, match=r"padded to 512 bytes, so 2 times the tokens"):
        get_kv_cache_groups(run_config(), layers(FULL, 1, "f") | layers(padded, 1, "w"))


def test_block_outermost_layouts_pack_mixed_pages() -> None:
    big, small = replace(FULL, head_size=16), replace(WINDOW, head_size=4)
    specs = (
        layers(FULL, 2, "f") | layers(big, 2, "g") | layers(WINDOW, 3, "w") | layers(small, 3, "v")
    )
    groups = get_kv_cache_groups(run_config(layout="BLNHC"), specs)
    assert [group.layer_names for group in groups] == [
        ["f0", "f1", "g0", "g1"],
        ["w0", "w1", "w2", "v0", "v1", "v2"],
    ]
    # four windows of one size beside a pattern of two repeats: two groups of two
    split = layers(FULL, 2, "f") | layers(big, 2, "g") | layers(WINDOW, 4, "w")
    groups = get_kv_cache_groups(run_config(layout="BLNHC"), split)
    assert [group.layer_names for group in groups] == [
        ["f0", "f1", "g0", "g1"],
        ["w0", "w2"],
        ["w1", "w3"],
    ]
    with pytest.raises(UnresolvedLayoutError):
        get_kv_cache_groups(run_config(layout=None), specs)


def test_a_disabled_hybrid_manager_stores_windows_as_full() -> None:
    config = run_config()
    config.scheduler_config.disable_hybrid_kv_cache_manager = True
    specs = layers(FULL, 1, "f") | layers(WINDOW, 1, "w")
    (group,) = get_kv_cache_groups(config, specs)
    assert group.kv_cache_spec == replace(FULL, sliding_window=32)
    assert specs["w0"] is WINDOW  # the caller's specs are not changed


def test_hidden_state_layers_get_groups_of_their_own() -> None:
    hidden = HiddenStateCacheSpec(block_size=16, num_kv_heads=1, head_size=100, dtype="float16")
    specs = layers(FULL, 1, "f") | layers(WINDOW, 1, "w") | layers(hidden, 1, "h")
    groups = get_kv_cache_groups(run_config(), specs)
    assert groups[-1].layer_names == ["h0"]
    # 200 bytes a token: four tokens (a divisor of 16) fit the shared page of 1024
    assert groups[-1].kv_cache_spec.block_size == 4
    assert groups[-1].kv_cache_spec.page_size_bytes == PAGE


# Blocks and memory


def test_padding_is_charged_once() -> None:
    # tpu-inference#1285: 76,268 planned pages, the physical page four times the planned one
    padded = replace(FULL, page_size_padded=4 * PAGE)
    config = run_config()
    (worker,) = get_kv_cache_configs(config, [layers(padded, 1)], [76_268 * PAGE])
    assert worker.num_blocks == 19_067
    resolved = resolve_layout(worker)
    assert resolved.size_bytes == 19_067 * 4 * PAGE
    assert resolved.layers[0].strides[0] == 4 * PAGE


def test_a_config_carries_its_layout_and_resolves() -> None:
    (worker,) = get_kv_cache_configs(run_config(), [layers(FULL, 3)], [20 * 3 * PAGE + 5])
    assert (worker.num_blocks, worker.kv_cache_layout) == (20, "LBNHC")
    assert resolve_layout(worker).size_bytes == 20 * 3 * PAGE


@pytest.mark.parametrize("layout", [layout.name for layout in KVCacheLayout])
def test_all_workers_get_the_smallest_number_of_blocks(layout: str) -> None:
    workers = get_kv_cache_configs(
        run_config(layout=layout), [layers(FULL, 2)] * 3, [40 * PAGE, 30 * PAGE, 50 * PAGE]
    )
    assert [worker.num_blocks for worker in workers] == [15, 15, 15]
    assert len({resolve_layout(worker).size_bytes for worker in workers}) == 1


def test_pipeline_stages_hold_their_own_layers() -> None:
    first, second = layers(FULL, 3, "a"), layers(FULL, 2, "b")
    one, two = get_kv_cache_configs(run_config(), [first, second], [60 * PAGE, 60 * PAGE])
    assert one.kv_cache_groups[0].layer_names == list(first)
    assert two.kv_cache_groups[0].layer_names == list(second)
    assert one.num_blocks == two.num_blocks == 20
    assert resolve_layout(two).size_bytes == 20 * 2 * PAGE
    mixed = {"a0": FULL, "a1": replace(FULL, head_size=16)}
    one, two = get_kv_cache_configs(
        run_config(), [mixed, {"a1": mixed["a1"]}], [60 * PAGE, 60 * PAGE]
    )
    assert list(two.kv_cache_groups[0].kv_cache_spec.kv_cache_specs) == ["a1"]  # type: ignore[attr-defined]


def test_a_stage_without_a_layer_of_a_packed_group() -> None:
    wide = replace(WINDOW, head_size=16, head_size_v=16)
    first, second = layers(FULL, 2, "f"), layers(wide, 2, "w")
    one, two = get_kv_cache_configs(
        run_config(layout="BLNHC"), [first, second], [100 * PAGE, 100 * PAGE]
    )
    assert [group.layer_names for group in one.kv_cache_groups] == [["f0", "f1"], []]
    assert [tensor.layers for tensor in one.kv_cache_tensors] == [["f0", "f1"]]
    assert [tensor.layers for tensor in two.kv_cache_tensors] == [["w0", "w1"]]
    assert one.num_blocks == two.num_blocks == 25
    assert resolve_layout(one).size_bytes == 25 * 2 * PAGE
    assert [view.group for view in resolve_layout(two).layers] == [1, 1]


def test_the_override_replaces_the_number_of_blocks() -> None:
    config = run_config(num_gpu_blocks_override=12)
    (worker,) = get_kv_cache_configs(config, [layers(FULL, 2)], [10**9])
    assert worker.num_blocks == 12
    small = run_config(num_gpu_blocks_override=5)
    with pytest.raises(InsufficientMemoryError, match=r"a max_model_len of 64 would fit"):
        get_kv_cache_configs(small, [layers(FULL, 2)], [10**9])
    with pytest.raises(ConfigError, match=r"num_gpu_blocks_override: .* got 0"):
        get_kv_cache_configs(run_config(num_gpu_blocks_override=0), [layers(FULL, 2)], [10**9])


def test_the_null_block_is_not_there_for_a_request() -> None:
    # 160 tokens are 10 blocks; the null block is the eleventh
    enough = 11 * 2 * PAGE
    (worker,) = get_kv_cache_configs(run_config(), [layers(FULL, 2)], [enough])
    assert worker.num_blocks == 11
    with pytest.raises(
        InsufficientMemoryError,
        match=rf"worker 0: available_memory: one request of max_model_len 160 needs {20 * PAGE} "
        rf"bytes, and of the {enough - 1} bytes given {enough - 1 - 2 * PAGE} are left beside the "
        r"null block; a max_model_len of 144 would fit",
    ):
        get_kv_cache_configs(run_config(), [layers(FULL, 2)], [enough - 1])
    with pytest.raises(InsufficientMemoryError, match=r"not even one token would fit"):
        get_kv_cache_configs(run_config(), [layers(FULL, 2)], [2 * PAGE])


def test_every_group_claims_blocks_of_its_own() -> None:
    specs = layers(FULL, 1, "f") | layers(WINDOW, 1, "w")
    # full: 10 blocks; window: 31 + 64 in flight = 95 tokens, 6 blocks and one more
    (worker,) = get_kv_cache_configs(run_config(), [specs], [18 * PAGE])
    assert worker.num_blocks == 18
    assert get_max_concurrency_for_kv_cache_config(run_config(), worker) == 18 / 17
    with pytest.raises(InsufficientMemoryError, match=rf"needs {17 * PAGE} bytes"):
        get_kv_cache_configs(run_config(), [specs], [17 * PAGE])


def test_auto_fit_shortens_the_length_and_writes_it_back() -> None:
    config = run_config(max_model_len=10_000)
    config.model_config.original_max_model_len = -1
    get_kv_cache_configs(config, [layers(FULL, 2)] * 2, [40 * PAGE, 24 * PAGE])
    assert config.model_config.max_model_len == 11 * 16
    capped = run_config(max_model_len=100)
    capped.model_config.original_max_model_len = -1
    get_kv_cache_configs(capped, [layers(FULL, 2)], [10**9])
    assert capped.model_config.max_model_len == 100


def test_auto_fit_that_fails_changes_nothing() -> None:
    config = run_config(max_model_len=10_000)
    config.model_config.original_max_model_len = -1
    with pytest.raises(InsufficientMemoryError, match=r"worker 1: .*not even one token would fit"):
        get_kv_cache_configs(config, [layers(FULL, 2)] * 2, [40 * PAGE, 3 * PAGE])
    assert config.model_config == ModelConfig(10_000, -1)


def test_estimates() -> None:
    config = run_config()
    assert max_memory_usage_bytes(config, [FULL, WINDOW]) == (10 + 7) * PAGE
    assert estimate_max_model_len(config, layers(FULL, 2), 4 * PAGE) == 32
    assert estimate_max_model_len(config, layers(FULL, 2), 4 * PAGE - 1) == 16
    assert estimate_max_model_len(config, layers(FULL, 2), 2 * PAGE - 1) == 0
    assert estimate_max_model_len(config, layers(FULL, 2), 10**9) == 160
    assert config.model_config.max_model_len == 160
    check_enough_kv_cache_memory(config, layers(FULL, 2), 22 * PAGE)
    check_enough_kv_cache_memory(config, {}, 0)
    with pytest.raises(InsufficientMemoryError, match=r"a max_model_len of 144 would fit"):
        check_enough_kv_cache_memory(config, layers(FULL, 2), 22 * PAGE - 1)


def test_workers_must_agree_and_hold_a_layer() -> None:
    config = run_config()
    with pytest.raises(SpecError, match=r"worker 1, layer 'l0': workers must agree"):
        get_kv_cache_configs(
            config, [layers(FULL, 1), layers(replace(FULL, head_size=16), 1)], [10**6] * 2
        )
    with pytest.raises(ConfigError, match=r"one entry for each of 2 workers.* got 1"):
        get_kv_cache_configs(config, [layers(FULL, 1)] * 2, [10**6])
    with pytest.raises(ConfigError, match=r"worker 1: expected at least one layer with a cache"):
        get_kv_cache_configs(config, [layers(FULL, 1), {}], [10**6] * 2)
    encoder = EncoderOnlyAttentionSpec(**VALUES)
    with pytest.raises(SpecError, match=r"layer 'l0': an encoder-only layer keeps no K/V"):
        get_kv_cache_configs(config, [layers(encoder, 1)], [10**6])
    with pytest.raises(UnresolvedLayoutError):
        get_kv_cache_configs(run_config(layout=None), [layers(FULL, 1)], [10**6])
    with pytest.raises(ConfigError, match=r"model_config.max_model_len: the config has none"):
        get_kv_cache_configs(
            RunConfig(None, CacheConfig(kv_cache_layout="LBNHC")),  # type: ignore[arg-type]
            [layers(FULL, 1)],
            [10**6],
        )


def test_a_model_without_layers_has_one_block() -> None:
    configs = get_kv_cache_configs(run_config(), [{}, {}], [0, 0])
    assert [config.num_blocks for config in configs] == [1, 1]
    assert get_kv_cache_config_from_groups(run_config(), [], 0).num_blocks == 1


def test_memory_below_a_block() -> None:
    group = KVCacheGroupSpec(["a"], FULL)
    with pytest.raises(InsufficientMemoryError, match=r"a block takes 1024 bytes, got 1023"):
        get_kv_cache_config_from_groups(run_config(), [group], 1023)


@pytest.mark.parametrize("layout", ["LBNHC", "BLNHC"])
def test_alignment_widens_blocks(layout: str) -> None:
    aligned = replace(FULL, block_stride_alignment=1536)
    (worker,) = get_kv_cache_configs(run_config(layout=layout), [layers(aligned, 2)], [10**6])
    pitch = 2 * 1536 if layout == "LBNHC" else 3072
    assert worker.num_blocks == 10**6 // pitch
    assert worker.kv_cache_tensors[0].block_stride == (1536 if layout == "LBNHC" else 3072)
    assert resolve_layout(worker).layers[1].offset == (
        1536 * worker.num_blocks if layout == "LBNHC" else 1024
    )
    kernel = replace(FULL, block_stride_alignment=MultipleOf(8))
    (worker,) = get_kv_cache_configs(run_config(layout=layout), [layers(kernel, 2)], [10**6])
    assert worker.num_blocks == 10**6 // (2 * PAGE)


def test_the_schedulers_config() -> None:
    mixed = {"a": FULL, "b": replace(FULL, head_size=16)}
    workers = get_kv_cache_configs(run_config(), [mixed] * 2, [100 * PAGE] * 2)
    scheduler = generate_scheduler_kv_cache_config(workers)
    assert scheduler.kv_cache_groups[0].kv_cache_spec == FULL
    assert scheduler.num_blocks == workers[0].num_blocks
    scheduler.kv_cache_groups[0].layer_names.append("z")
    scheduler.kv_cache_tensors[0].layers.append("z")
    assert "z" not in workers[0].kv_cache_groups[0].layer_names
    assert "z" not in workers[0].kv_cache_tensors[0].layers
    with pytest.raises(ConfigError, match=r"workers with one num_blocks, got \[3, 4\]"):
        generate_scheduler_kv_cache_config([KVCacheConfig(3), KVCacheConfig(4)])
    with pytest.raises(ConfigError, match=r"got \[\]"):
        generate_scheduler_kv_cache_config([])


def test_growing_memory_never_gives_fewer_blocks() -> None:
    counts = [
        get_kv_cache_configs(run_config(), [layers(FULL, 2)], [memory])[0].num_blocks
        for memory in range(22 * PAGE, 40 * PAGE, 700)
    ]
    assert counts == sorted(counts)
    assert counts[0] == 11


# Block sizes of scheduler and hashes


def groups_of(*sizes: int, **changes: Any) -> KVCacheConfig:
    return KVCacheConfig(
        4,
        [],
        [
            KVCacheGroupSpec([f"l{i}"], replace(FULL, block_size=size, **changes))
            for i, size in enumerate(sizes)
        ],
    )


def test_block_sizes_of_scheduler_and_hash() -> None:
    config = run_config(block_size=32)
    assert resolve_kv_cache_block_sizes(groups_of(32), config) == (32, 32)
    assert resolve_kv_cache_block_sizes(groups_of(16, 24), config) == (48, 8)
    config.parallel_config = ParallelConfig(decode_context_parallel_size=2)
    assert resolve_kv_cache_block_sizes(groups_of(32), config) == (64, 64)
    assert resolve_kv_cache_block_sizes(groups_of(16, 24), config) == (96, 16)
    assert resolve_kv_cache_block_sizes(groups_of(16, 24, dcp_sharded=False), config) == (48, 8)
    assert resolve_kv_cache_block_sizes(groups_of(32, dcp_sharded=False), config) == (32, 32)


def test_hashes_that_nobody_reads_and_units_that_do_not_divide() -> None:
    config = run_config(enable_prefix_caching=False)
    assert resolve_kv_cache_block_sizes(groups_of(16, 24), config) == (48, 48)
    config.kv_transfer_config = object()
    assert resolve_kv_cache_block_sizes(groups_of(16, 24), config) == (48, 8)
    finer = run_config(prefix_match_unit=4)
    assert resolve_kv_cache_block_sizes(groups_of(16, 24), finer) == (48, 4)
    with pytest.raises(ConfigError, match=r"every group's block size \[16, 24\], got 5"):
        resolve_kv_cache_block_sizes(groups_of(16, 24), run_config(prefix_match_unit=5))
    with pytest.raises(ConfigError, match=r"with one group, .* expected None or 16, got 4"):
        resolve_kv_cache_block_sizes(groups_of(16), finer)
    compressed = groups_of(16, 24, tokens_per_state=5)
    with pytest.raises(ConfigError, match=r"would cut stored states of \[5\] tokens"):
        resolve_kv_cache_block_sizes(compressed, run_config())
