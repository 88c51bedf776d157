"""The diffusion control plane: every row of the table, and that a refusal leaves no trace."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest

from layout_core import (
    BLOCK_STRIDE_DIFFUSION_KV_CACHE_LAYOUT,
    DEFAULT_DIFFUSION_KV_CACHE_LAYOUT,
    CacheConfig,
    FullAttentionSpec,
    KVCacheLayout,
    ModelConfig,
    RunConfig,
    adopt_kv_cache_layout,
    assert_backend_layout_supported,
    block_stride_demand,
    build_kv_cache_tensor,
    build_native_kv_cache_configs,
    get_connector_required_kv_cache_layout,
    resolve_diffusion_kv_cache_layout,
    resolve_layout,
    single_group_config,
)
from layout_core.errors import (
    ConfigError,
    IllegalCombinationError,
    InsufficientMemoryError,
    LayoutConflictError,
    UnknownLayoutError,
    UnresolvedLayoutError,
    UnsupportedError,
)

SPEC = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype="float16")
PAGE = SPEC.page_size_bytes
LAYOUTS = [layout.name for layout in KVCacheLayout]


def double(layout: str | None = None) -> Any:
    """A config double with a plain attribute, as vLLM's own has."""
    return SimpleNamespace(cache_config=SimpleNamespace(kv_cache_layout=layout))


def pinned(config: Any) -> str | None:
    layout: str | None = config.cache_config.kv_cache_layout
    return layout


def test_defaults() -> None:
    assert DEFAULT_DIFFUSION_KV_CACHE_LAYOUT is KVCacheLayout.LBNHC
    assert BLOCK_STRIDE_DIFFUSION_KV_CACHE_LAYOUT is KVCacheLayout.BLNHC


@pytest.mark.parametrize(
    ("indexes", "required", "expected"),
    [
        (False, None, "LBNHC"),
        (True, None, "BLNHC"),
        (None, None, "LBNHC"),
        (False, "LBHNC", "LBHNC"),
        (False, "HND", "LBHNC"),
        (True, "BHLNC", "BHLNC"),
        (None, "BHLNC", "BHLNC"),
        (None, KVCacheLayout.LHBNC, "LHBNC"),
    ],
)
def test_resolution_pins_and_returns(indexes: bool | None, required: Any, expected: str) -> None:
    for config in (double(), RunConfig(ModelConfig(16))):
        layout = resolve_diffusion_kv_cache_layout(
            config, indexes_kv_by_block_stride=indexes, required_layout=required
        )
        assert layout is KVCacheLayout[expected]
        assert pinned(config) == expected
        again = resolve_diffusion_kv_cache_layout(
            config, indexes_kv_by_block_stride=indexes, required_layout=required
        )
        assert again is layout
    for bare in (SimpleNamespace(), SimpleNamespace(cache_config=None)):
        assert (
            resolve_diffusion_kv_cache_layout(
                bare, indexes_kv_by_block_stride=indexes, required_layout=required
            ).name
            == expected
        )


@pytest.mark.parametrize(
    ("current", "indexes", "required"),
    [
        (None, False, "BLNHC"),
        (None, True, "LBNHC"),
        ("LBNHC", True, None),
        ("BLNHC", False, None),
        ("LBNHC", False, "LBHNC"),
        ("LBNHC", None, "BLNHC"),
        ("BLHNC", True, "BLNHC"),
    ],
)
def test_contradictions_raise_and_record_nothing(
    current: str | None, indexes: bool | None, required: str | None
) -> None:
    config = double(current)
    with pytest.raises(ValueError, match=r"contradicts the attention backend"):
        resolve_diffusion_kv_cache_layout(
            config, indexes_kv_by_block_stride=indexes, required_layout=required
        )
    assert pinned(config) == current


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_pinned_layout_wins_where_it_is_allowed(layout: str) -> None:
    config = double(layout)
    outermost = KVCacheLayout[layout].is_block_outermost
    assert (
        resolve_diffusion_kv_cache_layout(config, indexes_kv_by_block_stride=outermost).name
        == layout
    )
    assert resolve_diffusion_kv_cache_layout(config, indexes_kv_by_block_stride=None).name == layout


def test_unknown_names() -> None:
    config = double()
    with pytest.raises(UnknownLayoutError):
        resolve_diffusion_kv_cache_layout(config, required_layout="ZZZ")
    with pytest.raises(UnknownLayoutError):
        resolve_diffusion_kv_cache_layout(double("ZZZ"))
    assert pinned(config) is None


def test_a_resolved_layout_is_final() -> None:
    cache = CacheConfig()
    with pytest.raises(UnresolvedLayoutError, match=r"the layout is not resolved yet"):
        cache.get_resolved_kv_cache_layout()
    cache.kv_cache_layout = "NHD"
    assert cache.kv_cache_layout == "LBNHC"
    assert cache.get_resolved_kv_cache_layout() is KVCacheLayout.LBNHC
    cache.kv_cache_layout = "LBNHC"
    for other in ("BLNHC", None):
        with pytest.raises(LayoutConflictError, match=r"was resolved to LBNHC and is final"):
            cache.kv_cache_layout = other
    with pytest.raises(UnknownLayoutError):
        CacheConfig(kv_cache_layout="ZZZ")
    assert cache.kv_cache_layout == "LBNHC"


# Adoption


def carried(layout: str = "LBNHC", name: str | None = "same") -> Any:
    config = single_group_config(SPEC, 4, ["a", "b"], layout)
    return config if name == "same" else replace(config, kv_cache_layout=name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_adoption_copies_the_carried_name(layout: str) -> None:
    for worker in (double(), double(layout), RunConfig(ModelConfig(16))):
        assert adopt_kv_cache_layout(worker, carried(layout)).name == layout
        assert pinned(worker) == layout
    assert adopt_kv_cache_layout(SimpleNamespace(), carried(layout)).name == layout


def test_adoption_without_a_carried_name_takes_the_default() -> None:
    worker = double()
    assert adopt_kv_cache_layout(worker, SimpleNamespace()).name == "LBNHC"
    assert pinned(worker) == "LBNHC"
    assert adopt_kv_cache_layout(double("LBHNC"), SimpleNamespace()).name == "LBHNC"
    assert adopt_kv_cache_layout(double(), carried("LBNHC", None)).name == "LBNHC"
    worker = double("BLNHC")
    with pytest.raises(ValueError, match=r"disagrees with the layout"):
        adopt_kv_cache_layout(worker, SimpleNamespace(kv_cache_layout=None))
    assert pinned(worker) == "BLNHC"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_worker_pinned_otherwise_raises(layout: str) -> None:
    for other in set(LAYOUTS) - {layout}:
        worker = double(other)
        with pytest.raises(ValueError, match=rf"'{other}' disagrees with the layout .*'{layout}'"):
            adopt_kv_cache_layout(worker, carried(layout))
        assert pinned(worker) == other


def test_adoption_reads_aliases() -> None:
    assert adopt_kv_cache_layout(double("NHD"), carried("LBNHC")).name == "LBNHC"
    worker = double()
    adopt_kv_cache_layout(worker, carried("LBNHC", "NHD"))
    assert pinned(worker) == "LBNHC"


def test_an_edited_config_is_not_adopted() -> None:
    worker = double()
    edited = carried()
    edited.kv_cache_tensors[0].block_stride += 64
    with pytest.raises(ConfigError, match=r"block_stride: layout LBNHC, 4 blocks and the specs"):
        adopt_kv_cache_layout(worker, edited)
    with pytest.raises(ConfigError, match=r"stride: layout BLNHC"):
        adopt_kv_cache_layout(worker, carried("LBNHC", "BLNHC"))
    hosted = carried()
    hosted.kv_cache_tensors[0].host_resident = True
    with pytest.raises(
        UnsupportedError, match=r"kv_cache_tensors\[0\].host_resident: expected the default False"
    ):
        adopt_kv_cache_layout(worker, hosted)
    assert pinned(worker) is None


# Backends and connectors


def backend(answer: Any) -> Any:
    return SimpleNamespace(indexes_kv_by_block_stride=lambda: answer)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_backends_against_the_layout(layout: str) -> None:
    outermost = KVCacheLayout[layout].is_block_outermost
    for quiet in (
        None,
        object(),
        backend(outermost),
        backend(None),
        SimpleNamespace(indexes_kv_by_block_stride=None),
    ):
        config = double(layout)
        assert_backend_layout_supported(config, quiet)
        assert pinned(config) == layout
    with pytest.raises(ValueError, match=r"contradicts the attention backend"):
        assert_backend_layout_supported(double(layout), backend(not outermost))


def test_backends_before_resolution() -> None:
    for config in (double(), SimpleNamespace(), SimpleNamespace(cache_config=None)):
        assert_backend_layout_supported(config, backend(True))
    fresh = double()
    assert_backend_layout_supported(fresh, backend(True))
    assert pinned(fresh) is None


class ForeignLayout(Enum):
    BLHNC = (1, 0, 2, 3, 4)


def connector(answer: object) -> Any:
    return type(
        "SomeConnector",
        (),
        {"get_required_kvcache_layout": classmethod(lambda cls, config: answer)},
    )


def test_what_a_connector_requires() -> None:
    config = SimpleNamespace(kv_transfer_config=object())
    required = get_connector_required_kv_cache_layout
    assert required(SimpleNamespace()) is None
    assert required(SimpleNamespace(kv_transfer_config=None)) is None
    assert required(config, connector_cls=connector(None)) is None
    assert required(config, connector_cls=object) is None
    assert required(config, connector_cls=connector("HND")) is KVCacheLayout.LBHNC
    assert required(config, connector_cls=connector(ForeignLayout.BLHNC)) is KVCacheLayout.BLHNC
    for unknown in ("ZZZ", 3):
        with pytest.raises(ValueError, match=r"connector SomeConnector requires an unsupported"):
            required(config, connector_cls=connector(unknown))
    with pytest.raises(ConfigError, match=r"its class is needed to learn the layout"):
        required(config)


# Tensors


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("offset", [0, 4096])
def test_a_tensor_places_blocks_where_it_says(layout: str, offset: int) -> None:
    tensor = build_kv_cache_tensor(SPEC, 5, ["a", "b", "c"], layout=layout, offset=offset)
    assert tensor.layers == ["a", "b", "c"]
    assert tensor.size == offset + 15 * PAGE
    assert tensor.offset == offset
    starts = {
        offset + layer * tensor.layer_stride + block * tensor.block_stride
        for layer in range(3)
        for block in range(5)
    }
    assert len(starts) == 15  # no layer aliases another
    config = replace(
        single_group_config(SPEC, 5, ["a", "b", "c"], layout), kv_cache_tensors=[tensor]
    )
    for index, view in enumerate(resolve_layout(config).layers):
        for block in range(5):
            assert view.cell_offset(block, 0, 0) == (
                offset + index * tensor.layer_stride + block * tensor.block_stride
            )


def test_a_tensors_default_layout_and_refusals() -> None:
    assert build_kv_cache_tensor(SPEC, 5, ["a"]) == build_kv_cache_tensor(
        SPEC, 5, ["a"], layout="LBNHC"
    )
    for arguments, wording in (
        ((SPEC, 0, ["a"]), r"num_blocks: expected an int >= 1, got 0"),
        ((SPEC, 5, []), r"layers: expected distinct names, at least one, got \[\]"),
        ((SPEC, 5, ["a", "a"]), r"layers: expected distinct names"),
    ):
        with pytest.raises(ConfigError, match=wording):
            build_kv_cache_tensor(*arguments)
    with pytest.raises(ConfigError, match=r"offset: expected an int >= 0, got -1"):
        build_kv_cache_tensor(SPEC, 5, ["a"], offset=-1)
    padded = replace(SPEC, page_size_padded=PAGE + 64)
    with pytest.raises(IllegalCombinationError, match=r"layout LHBNC: cannot pad"):
        build_kv_cache_tensor(padded, 5, ["a"], layout="LHBNC")


# Everything at once


def run_config(length: int = 160, **cache: Any) -> RunConfig:
    return RunConfig(ModelConfig(length), CacheConfig(**cache))


@pytest.mark.parametrize(("indexes", "layout"), [(False, "LBNHC"), (True, "BLNHC")])
def test_native_configs(indexes: bool, layout: str) -> None:
    config = run_config()
    specs = {"a": SPEC, "b": SPEC}
    workers, scheduler = build_native_kv_cache_configs(
        config, [specs, specs], [60 * PAGE, 40 * PAGE], indexes_kv_by_block_stride=indexes
    )
    assert [worker.num_blocks for worker in workers] == [20, 20]
    assert {c.kv_cache_layout for c in (*workers, scheduler)} == {layout}
    assert pinned(config) == layout
    for worker in workers:
        assert adopt_kv_cache_layout(double(), worker).name == layout
        assert resolve_layout(worker).size_bytes == 40 * PAGE


def test_native_configs_fit_the_length_and_leave_no_trace_of_a_failure() -> None:
    config = run_config(10_000)
    config.model_config.original_max_model_len = -1
    build_native_kv_cache_configs(config, [{"a": SPEC}], [12 * PAGE])
    assert config.model_config.max_model_len == 11 * 16
    failing = run_config(10_000)
    with pytest.raises(InsufficientMemoryError, match=r"a max_model_len of 176 would fit"):
        build_native_kv_cache_configs(failing, [{"a": SPEC}], [12 * PAGE])
    assert pinned(failing) is None
    assert failing.model_config.max_model_len == 10_000
    with pytest.raises(LayoutConflictError, match=r"contradicts the attention backend"):
        build_native_kv_cache_configs(
            run_config(), [{"a": SPEC}], [12 * PAGE], connector_cls=connector("BLHNC")
        )


# vLLM's own specs, by attribute


@dataclass(frozen=True, kw_only=True)
class _VllmFullAttentionSpec:
    """vLLM's class of the same name, as far as attributes go."""

    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: Any
    head_size_v: int
    page_size_padded: int | None = None
    non_causal: bool = False
    bounded_replay: bool = False


class _TorchFloat16:
    def __str__(self) -> str:
        return "torch.float16"


_VllmFullAttentionSpec.__name__ = "FullAttentionSpec"
FOREIGN = _VllmFullAttentionSpec(
    block_size=16, num_kv_heads=2, head_size=8, head_size_v=8, dtype=_TorchFloat16()
)


def test_foreign_specs_become_ours() -> None:
    assert build_kv_cache_tensor(FOREIGN, 5, ["a"]) == build_kv_cache_tensor(SPEC, 5, ["a"])
    workers, _ = build_native_kv_cache_configs(run_config(), [{"a": FOREIGN}], [20 * PAGE])
    assert workers[0].kv_cache_groups[0].kv_cache_spec == SPEC

    class CustomSpec(_VllmFullAttentionSpec):
        """A platform's own subclass is its nearest known base."""

    custom = CustomSpec(block_size=16, num_kv_heads=2, head_size=8, head_size_v=8, dtype="half")
    assert build_kv_cache_tensor(custom, 5, ["a"]) == build_kv_cache_tensor(SPEC, 5, ["a"])


def test_foreign_specs_that_say_more_are_refused_by_name() -> None:
    with pytest.raises(
        UnsupportedError, match=r"bounded_replay: FullAttentionSpec sets it to True"
    ):
        build_kv_cache_tensor(replace(FOREIGN, bounded_replay=True), 5, ["a"])

    class MambaSpec:
        block_size = 16

    with pytest.raises(UnsupportedError, match=r"expected one of FullAttentionSpec.*got MambaSpec"):
        build_native_kv_cache_configs(run_config(), [{"m": MambaSpec()}], [20 * PAGE])


def test_a_foreign_config_is_adopted_and_resolved() -> None:
    ours = single_group_config(SPEC, 4, ["a", "b"], "BLNHC")
    tensor = ours.kv_cache_tensors[0]
    foreign = SimpleNamespace(
        num_blocks=4,
        kv_cache_tensors=[
            SimpleNamespace(**vars(tensor), host_resident=False),
        ],
        kv_cache_groups=[
            SimpleNamespace(
                layer_names=["a", "b"], kv_cache_spec=FOREIGN, role=SimpleNamespace(value="default")
            )
        ],
        kv_cache_layout="BLNHC",
        hash_block_size=16,
        hisparse_host_num_blocks=None,
    )
    worker = double()
    assert adopt_kv_cache_layout(worker, foreign).name == "BLNHC"
    assert resolve_layout(foreign) == resolve_layout(ours)  # type: ignore[arg-type]
    for change, wording in (
        ({"hisparse_host_num_blocks": 3}, r"config.hisparse_host_num_blocks: .* got 3"),
        (
            {"kv_cache_groups": [SimpleNamespace(role=SimpleNamespace(value="hisparse_source"))]},
            r"kv_cache_groups\[0\].role: expected the default 'default'",
        ),
    ):
        changed = SimpleNamespace(**(vars(foreign) | change))
        with pytest.raises(UnsupportedError, match=wording):
            adopt_kv_cache_layout(double(), changed)


def test_the_demand_of_several_workers() -> None:
    silent = SimpleNamespace(indexes_kv_by_block_stride=None)
    assert block_stride_demand([]) is None
    assert block_stride_demand([None, silent, backend(None), object()]) is None
    assert block_stride_demand([silent, backend(True), backend(True)]) is True
    assert block_stride_demand([backend(False), silent]) is False
    yes = SimpleNamespace(indexes_kv_by_block_stride=lambda: True, get_name=lambda: "YES")
    no = SimpleNamespace(indexes_kv_by_block_stride=False, get_name=lambda: "NO")
    with pytest.raises(
        LayoutConflictError,
        match=r"YES demands a layout with B outermost, NO a layout without B outermost",
    ):
        block_stride_demand([no, silent, yes])
