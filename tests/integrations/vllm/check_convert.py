"""Layouts, specs, tensors, groups and configs, to ours and back to the real vLLM's."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings

import layout_core
from integrations.vllm import from_vllm, to_vllm
from layout_core import KVCacheLayout, LayoutError, MultipleOf, UnsupportedError
from tests.conformance import peers
from tests.conformance.cases import SPEC_KINDS, SpecCase, spec_cases
from tests.conformance.sizing import (
    ConfigCase,
    build_model,
    config_cases,
    config_options,
    memory_of,
    workers_of,
)
from tests.integrations.vllm.real import LAYOUTS, VERSION, contents, interface, spec

ALL_KINDS = (*SPEC_KINDS, "EncoderOnlyAttentionSpec")

run_random = settings(
    deadline=None,
    database=None,
    derandomize=True,
    max_examples=400,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)


def test_layouts_both_ways() -> None:
    assert [from_vllm(layout).name for layout in LAYOUTS] == [layout.name for layout in LAYOUTS]
    assert [to_vllm(layout) for layout in KVCacheLayout] == list(LAYOUTS)
    for layout in KVCacheLayout:
        assert from_vllm(to_vllm(layout)) is layout


def test_random_specs_of_theirs_come_back_equal() -> None:
    """Every field and the class, over all kinds; ours may refuse, by a ``LayoutError``."""
    seen: Counter[str] = Counter()

    @run_random
    @given(spec_cases(ALL_KINDS))
    def there_and_back(case: SpecCase) -> None:
        try:
            theirs = peers.build_spec(case)
            assert theirs.page_size_bytes > 0  # vLLM checks the padding here
        except peers.REFUSALS:
            return
        try:
            ours = from_vllm(theirs)
        except LayoutError:
            seen["refused"] += 1
            return
        back = to_vllm(ours)
        assert contents(back) == contents(theirs)
        assert ours.page_size_bytes == back.page_size_bytes == theirs.page_size_bytes
        seen[case.kind] += 1

    there_and_back()
    assert sum(seen.values()) >= 250, seen
    assert min(seen[kind] for kind in ALL_KINDS) >= 8, seen
    assert seen["refused"] <= 40, seen


def test_random_specs_of_ours_come_back_equal() -> None:
    """``dcp_sharded=None`` means the version's rule, which 0.32 writes down."""
    seen: Counter[str] = Counter()

    @run_random
    @given(spec_cases(ALL_KINDS))
    def there_and_back(case: SpecCase) -> None:
        try:
            ours = case.ours()
        except LayoutError:
            return
        lacking: set[str] = set()
        if VERSION < (0, 32):
            if ours.block_stride_alignment is not None:
                lacking.add("block_stride_alignment")
            if ours.dcp_sharded is False:
                lacking.add("dcp_sharded")
        try:
            theirs = to_vllm(ours)
        except UnsupportedError as error:
            named = any(f"spec.{name}: vLLM" in str(error) for name in lacking)
            derived = "turns" in str(error)  # the padding that vLLM makes of an alignment
            if not (named or derived):
                raise
            seen["refused"] += 1
            return
        assert not lacking
        expected = replace(ours, dcp_sharded=True if VERSION >= (0, 32) else None)
        if VERSION >= (0, 32) and ours.dcp_sharded is False:
            expected = ours
        assert from_vllm(theirs) == expected
        seen["equal"] += 1

    there_and_back()
    assert seen["equal"] >= 200, seen


@pytest.mark.parametrize("layout", LAYOUTS)
def test_configs_of_theirs_come_back_equal(layout: Any) -> None:
    """vLLM's own sizing of random models, with what an engine core writes on top of it."""
    seen: Counter[str] = Counter()

    @settings(run_random, max_examples=60)
    @given(config_cases())
    def there_and_back(case: ConfigCase) -> None:
        case = replace(case, layout=from_vllm(layout))
        model = build_model(case.model)
        if isinstance(model, str):
            return
        mine, peer = model
        workers = workers_of(case, list(mine))
        memory = memory_of(case, mine, workers)
        config = peers.vllm_config(**config_options(case))
        try:
            made = peers.utils.get_kv_cache_configs(
                config, [{name: peer[name] for name in names} for names in workers], memory
            )
        except peers.REFUSALS:
            return
        draw = random.Random(repr(case))  # of the case alone, so that a failure comes again
        for theirs in made:
            _decorate(theirs, layout, draw)
            ours = from_vllm(theirs)
            back = to_vllm(ours)
            held = {name for group in theirs.kv_cache_groups for name in group.layer_names}
            # of a packed group that this stage holds no layer of: documented
            theirs.kv_cache_tensors = [
                tensor for tensor in theirs.kv_cache_tensors if not held.isdisjoint(tensor.layers)
            ]
            assert contents(back) == contents(theirs)
            assert from_vllm(back) == ours
            for tensor, copy in zip(theirs.kv_cache_tensors, back.kv_cache_tensors, strict=True):
                assert contents(to_vllm(from_vllm(tensor))) == contents(copy)
                assert copy.layers is not tensor.layers
            for group, copy in zip(theirs.kv_cache_groups, back.kv_cache_groups, strict=True):
                assert contents(to_vllm(from_vllm(group))) == contents(copy)
            seen["configs"] += 1
            seen["several groups"] += len(theirs.kv_cache_groups) > 1

    there_and_back()
    assert seen["configs"] >= 5, seen


def _decorate(config: Any, layout: Any, draw: random.Random) -> None:
    config.kv_cache_layout = layout.name
    config.prefix_cache_retention_interval = draw.choice((None, 64))
    if VERSION >= (0, 32):
        config.hash_block_size = draw.choice((None, 16))
        config.cache_hit_alignment_tokens = draw.choice((None, 32))
        config.kv_tp_replicas = draw.choice((1, 2))
    for group in config.kv_cache_groups:
        group.is_eagle_group = draw.random() < 0.2
        group.enable_kv_transfer = draw.random() < 0.8


def test_an_alias_of_ours_is_canonical_at_theirs() -> None:
    ours = layout_core.single_group_config(from_vllm(spec()), 4, ["a"], "NHD")
    ours.kv_cache_layout = "NHD"
    assert to_vllm(ours).kv_cache_layout == "LBNHC"


# Refused by name.


class CustomSpec(interface.FullAttentionSpec):
    """A platform's own spec, which overrides nothing."""


class NarrowSpec(interface.FullAttentionSpec):
    """One that overrides how many blocks a request needs."""

    def max_num_blocks_per_req(self, vllm_config: Any, max_len: int) -> int:
        return 1


def of_mamba() -> Any:
    return interface.MambaSpec(block_size=16, shapes=((2, 2),), dtypes=(torch.float32,))


def unknown_things() -> list[tuple[Any, str]]:
    """What the version at hand can say and we cannot, with what the refusal names."""
    tensor = interface.KVCacheTensor(1024, ["a"], 1024, 1024)
    group = interface.KVCacheGroupSpec(["a"], spec())
    found: list[tuple[Any, str]] = [
        (of_mamba(), r"got vllm\.v1\.kv_cache_interface\.MambaSpec"),
        (spec("CircularBufferSpec"), "CircularBufferSpec"),
        (CustomSpec(16, num_kv_heads=2, head_size=8, dtype=torch.half), "CustomSpec"),
        (interface.KVCacheGroupSpec(["m"], of_mamba()), r"group\.kv_cache_spec.*MambaSpec"),
        (
            interface.KVCacheConfig(4, [], [interface.KVCacheGroupSpec(["m"], of_mamba())]),
            r"config\.kv_cache_groups\[0\]\.kv_cache_spec.*MambaSpec",
        ),
        (
            interface.UniformTypeKVCacheSpecs(16, kv_cache_specs={"m": of_mamba()}),
            r"spec of layer 'm'.*MambaSpec",
        ),
        (object(), "expected vLLM's KVCacheLayout"),
        ("LBNHC", "expected vLLM's KVCacheLayout"),
    ]
    if VERSION >= (0, 30):
        role = interface.KVCacheGroupRole.HISPARSE_SOURCE
        found += [
            (replace(tensor, host_resident=True), r"tensor\.host_resident"),
            (replace(group, host_resident=True), r"group\.host_resident"),
            (replace(group, role=role), r"group\.role"),
            (
                interface.KVCacheConfig(4, [], [], hisparse_shared_host_pool=True),
                r"config\.hisparse_shared_host_pool",
            ),
            (
                spec("MLAAttentionSpec", num_kv_heads=1, is_index_group_leader=True),
                r"spec\.is_index_group_leader: MLAAttentionSpec sets it to True",
            ),
        ]
    if VERSION == (0, 30):
        found += [
            (spec("KpoolTailSpec", sliding_window=4), "KpoolTailSpec"),
            (
                spec("MLAAttentionSpec", num_kv_heads=1, storage_block_size=8),
                r"spec\.storage_block_size",
            ),
        ]
    if VERSION >= (0, 32):
        window = spec("SlidingWindowMLASpec", num_kv_heads=1, sliding_window=4)
        found.append((replace(window, bounded_replay=True), r"spec\.bounded_replay"))
    return found


def test_what_we_cannot_say_is_refused_by_name() -> None:
    things = unknown_things()
    for thing, named in things:
        with pytest.raises(UnsupportedError, match=named):
            from_vllm(thing)
    assert len(things) == {(0, 29): 8, (0, 30): 15, (0, 32): 14}[VERSION]


def test_a_subclass_with_a_rule_of_its_own_is_refused_by_the_core_too() -> None:
    narrow = NarrowSpec(16, num_kv_heads=2, head_size=8, dtype=torch.half)
    with pytest.raises(UnsupportedError, match="NarrowSpec overrides max_num_blocks_per_req of F"):
        layout_core.as_spec(narrow)
    plain = CustomSpec(16, num_kv_heads=2, head_size=8, dtype=torch.half)
    assert layout_core.as_spec(plain) == from_vllm(spec())


def test_what_the_version_cannot_say_is_refused_by_name() -> None:
    ours = from_vllm(spec())
    config = layout_core.single_group_config(ours, 4, ["a"], "LBNHC")
    wanted: list[tuple[Any, str]] = [
        (replace(ours, block_stride_alignment=256), r"spec\.block_stride_alignment: vLLM 0"),
        (replace(ours, block_stride_alignment=MultipleOf(8)), r"block_stride_alignment.*got Mult"),
        (replace(ours, dcp_sharded=False), r"spec\.dcp_sharded: vLLM 0.*got False"),
        (replace(ours, max_tp_shards=2), r"spec\.max_tp_shards"),
        (replace(config, hash_block_size=16), r"config\.hash_block_size: vLLM 0.*got 16"),
        (replace(config, cache_hit_alignment_tokens=16), r"config\.cache_hit_alignment_tokens"),
        (replace(config, kv_tp_replicas=2), r"config\.kv_tp_replicas.*expected 1, got 2"),
    ]
    for thing, named in wanted:
        if VERSION >= (0, 32):
            assert from_vllm(to_vllm(thing)) == thing
        else:
            with pytest.raises(UnsupportedError, match=named):
                to_vllm(thing)
    late = replace(ours, kv_quant_mode=layout_core.KVQuantMode.ULTRAQUANT_4BIT)
    if VERSION < (0, 32):
        with pytest.raises(UnsupportedError, match=r"kv_quant_mode: vLLM.* has no mode ULTRA"):
            to_vllm(late)
    else:
        assert from_vllm(to_vllm(late)).kv_quant_mode is layout_core.KVQuantMode.ULTRAQUANT_4BIT
    with pytest.raises(UnsupportedError, match="expected a KVCacheLayout, KVCacheConfig"):
        to_vllm(spec())


def test_a_change_that_vllm_makes_to_our_values_is_not_handed_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Rounded(interface.FullAttentionSpec):
        def __post_init__(self) -> None:
            super().__post_init__()
            object.__setattr__(self, "head_size", 64)

    ours = from_vllm(spec())
    monkeypatch.setattr(interface, "FullAttentionSpec", Rounded)
    with pytest.raises(UnsupportedError, match=r"spec\.head_size: vLLM .* turns 8 into 64"):
        to_vllm(ours)
