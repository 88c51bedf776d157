"""Another library's records become ours without loss, or are refused by name."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from layout_core import MultipleOf, UniformTypeKVCacheSpecs, UnsupportedError, as_config, as_spec
from layout_core.foreign import as_group, as_tensor


@dataclass(frozen=True, kw_only=True)
class FullAttentionSpec:
    """Stands for vLLM's class of that name."""

    block_size: int = 16
    num_kv_heads: int = 2
    head_size: int = 8
    dtype: str = "float16"


class PlainSpec(FullAttentionSpec):
    """A platform's own, which says nothing else than its base."""

    tag = "of the platform"

    def _cached(self) -> int:
        return 1


class RingSpec(PlainSpec):
    """One that needs another number of blocks than its base."""

    @property
    def prefix_cacheable(self) -> bool:
        return False

    def max_num_blocks_per_req(self, config: Any, max_len: int) -> int:
        return 1


@dataclass(frozen=True)
class Alignment:
    """Stands for vLLM's ``MultipleOf``."""

    base: int


@dataclass
class Wrapper:
    """Stands for vLLM's ``UniformTypeKVCacheSpecs``."""

    block_size: int
    kv_cache_specs: dict[str, Any]
    block_stride_alignment: Any = None
    new_field: int = 0


Wrapper.__name__ = "UniformTypeKVCacheSpecs"


@dataclass
class Tensor:
    size: int = 1024
    layers: list[str] = field(default_factory=lambda: ["a"])
    layer_stride: int = 1024
    block_stride: int = 1024
    offset: int = 0
    host_resident: bool = False
    mirrored: bool = False


@dataclass
class Group:
    layer_names: list[str] = field(default_factory=lambda: ["a"])
    kv_cache_spec: Any = field(default_factory=FullAttentionSpec)
    is_eagle_group: bool = True
    tier: int | None = None


@dataclass
class Config:
    num_blocks: int = 1
    kv_cache_tensors: list[Any] = field(default_factory=lambda: [Tensor()])
    kv_cache_groups: list[Any] = field(default_factory=lambda: [Group()])
    shards: int = 1


def test_a_subclass_that_overrides_nothing_is_its_base() -> None:
    assert as_spec(PlainSpec()) == as_spec(FullAttentionSpec())


def test_a_subclass_that_overrides_something_is_refused_by_name() -> None:
    with pytest.raises(
        UnsupportedError,
        match=r"here: RingSpec overrides max_num_blocks_per_req, prefix_cacheable of FullAtt",
    ):
        as_spec(RingSpec(), where="here")


def test_a_wrapper_carries_its_alignment_and_what_it_wraps() -> None:
    spec = as_spec(Wrapper(16, {"a": FullAttentionSpec()}, Alignment(64)))
    assert isinstance(spec, UniformTypeKVCacheSpecs)
    assert spec.block_stride_alignment == MultipleOf(64)
    with pytest.raises(UnsupportedError, match=r"spec\.new_field: .* sets it to 3"):
        as_spec(Wrapper(16, {"a": FullAttentionSpec()}, new_field=3))
    with pytest.raises(UnsupportedError, match=r"spec of layer 'r': RingSpec overrides"):
        as_spec(Wrapper(16, {"r": RingSpec()}))


def test_records_are_copied() -> None:
    tensor, group = Tensor(), Group()
    ours, own_group = as_tensor(tensor), as_group(group)
    assert (ours.size, ours.layers, ours.offset) == (1024, ["a"], 0)
    assert ours.layers is not tensor.layers
    assert own_group.layer_names is not group.layer_names
    assert own_group.is_eagle_group
    assert own_group.enable_kv_transfer  # theirs has no such field


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (Config(shards=2), r"config\.shards: Config sets it to 2, and it is not known here"),
        (
            Config(kv_cache_tensors=[Tensor(), Tensor(mirrored=True)]),
            r"config\.kv_cache_tensors\[1\]\.mirrored",
        ),
        (Config(kv_cache_groups=[Group(tier=1)]), r"config\.kv_cache_groups\[0\]\.tier"),
        (
            Config(kv_cache_tensors=[replace(Tensor(), host_resident=True)]),
            r"config\.kv_cache_tensors\[0\]\.host_resident: expected the default False",
        ),
        (
            Config(kv_cache_groups=[Group(kv_cache_spec=RingSpec())]),
            r"config\.kv_cache_groups\[0\]\.kv_cache_spec: RingSpec overrides",
        ),
    ],
)
def test_a_field_that_is_set_and_not_known_is_refused_by_name(config: Config, named: str) -> None:
    with pytest.raises(UnsupportedError, match=named):
        as_config(config)


def test_fields_at_their_default_are_left_out() -> None:
    ours = as_config(Config())
    assert ours.num_blocks == 1
    assert ours.kv_cache_groups[0].kv_cache_spec == as_spec(FullAttentionSpec())
