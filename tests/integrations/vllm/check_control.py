"""The diffusion control plane on real configs and specs, beside vLLM's own sizing."""

from __future__ import annotations

import pickle
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from vllm.config import KVTransferConfig
from vllm.v1.kv_cache_interface import create_kv_cache_views

import integrations.vllm as ours
import layout_core
from layout_core import (
    InsufficientMemoryError,
    LayoutConflictError,
    UnknownLayoutError,
    UnsupportedError,
)
from tests.conformance import peers
from tests.conformance.control import NativeCase, native_cases
from tests.conformance.judge import Answer, judge, theirs
from tests.conformance.judge import ours as answer_of
from tests.conformance.sizing import (
    absent_layers,
    build_model,
    config_options,
    config_refusal,
    grouping_difference,
    memory_of,
    workers_of,
)
from tests.conformance.tally import EQUAL
from tests.integrations.vllm.check_convert import CustomSpec, run_random
from tests.integrations.vllm.real import (
    LAYOUTS,
    VERSION,
    VllmLayout,
    cache_of,
    config_of,
    contents,
    spec,
)

CONTRADICTS = "contradicts the attention backend"


class IndexesByBlock:
    @staticmethod
    def indexes_kv_by_block_stride() -> bool:
        return True


class FollowsAnyStride:
    indexes_kv_by_block_stride = None


# Resolution.


@pytest.mark.parametrize(
    ("by_block", "required", "layout"),
    [
        (False, None, VllmLayout.LBNHC),
        (True, None, VllmLayout.BLNHC),
        (None, None, VllmLayout.LBNHC),
        (True, VllmLayout.BHLNC, VllmLayout.BHLNC),
        (False, "LHBNC", VllmLayout.LHBNC),
        (None, "BLHNC", VllmLayout.BLHNC),
        (False, "NHD", VllmLayout.LBNHC),
    ],
)
def test_the_layout_is_pinned_as_vllm_wants_it(
    by_block: bool | None, required: Any, layout: VllmLayout
) -> None:
    config = config_of()
    found = ours.resolve_diffusion_kv_cache_layout(
        config, indexes_kv_by_block_stride=by_block, required_layout=required
    )
    assert found is layout
    assert type(config.cache_config.kv_cache_layout) is str
    assert config.cache_config.kv_cache_layout == layout.name
    assert config.cache_config.get_resolved_kv_cache_layout() is layout
    again = pickle.loads(pickle.dumps(config)).cache_config  # as it travels to a worker
    assert again.kv_cache_layout == layout.name
    assert (
        ours.resolve_diffusion_kv_cache_layout(
            config, indexes_kv_by_block_stride=layout.is_block_outermost
        )
        is layout
    )
    with pytest.raises(LayoutConflictError, match=CONTRADICTS):
        ours.resolve_diffusion_kv_cache_layout(
            config, indexes_kv_by_block_stride=not layout.is_block_outermost
        )
    assert config.cache_config.kv_cache_layout == layout.name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_requirement_against_the_backend_records_nothing(layout: VllmLayout) -> None:
    config = config_of()
    with pytest.raises(ValueError, match=CONTRADICTS):
        ours.resolve_diffusion_kv_cache_layout(
            config,
            indexes_kv_by_block_stride=not layout.is_block_outermost,
            required_layout=layout,
        )
    assert config.cache_config.kv_cache_layout is None
    with pytest.raises(UnknownLayoutError):
        ours.resolve_diffusion_kv_cache_layout(config, required_layout="ZIGZAG")
    assert config.cache_config.kv_cache_layout is None


def test_the_defaults_are_vllms_members() -> None:
    assert ours.DEFAULT_DIFFUSION_KV_CACHE_LAYOUT is VllmLayout.LBNHC
    assert ours.BLOCK_STRIDE_DIFFUSION_KV_CACHE_LAYOUT is VllmLayout.BLNHC


# Adoption and backends.


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_worker_adopts_what_came(layout: VllmLayout) -> None:
    cache = pickle.loads(pickle.dumps(cache_of({"a": spec(), "b": spec()}, layout)))
    worker = config_of()
    assert ours.adopt_kv_cache_layout(worker, cache) is layout
    assert worker.cache_config.get_resolved_kv_cache_layout() is layout
    assert ours.adopt_kv_cache_layout(worker, cache) is layout
    other = config_of(next(one for one in LAYOUTS if one is not layout))
    with pytest.raises(ValueError, match="disagrees with the layout"):
        ours.adopt_kv_cache_layout(other, cache)
    ours.assert_backend_layout_supported(worker, FollowsAnyStride)
    ours.assert_backend_layout_supported(config_of(), IndexesByBlock)
    if layout.is_block_outermost:
        ours.assert_backend_layout_supported(worker, IndexesByBlock)
    else:
        with pytest.raises(ValueError, match=CONTRADICTS):
            ours.assert_backend_layout_supported(worker, IndexesByBlock)


# One tensor.


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tensor_is_vllms_and_vllm_views_it(layout: VllmLayout) -> None:
    import torch

    tensor = ours.build_kv_cache_tensor(spec(), 5, ["a", "b"], layout=layout, offset=64)
    assert type(tensor) is type(cache_of({"a": spec()}, layout).kv_cache_tensors[0])
    assert tensor.size == 64 + 2 * 5 * 1024
    raw = torch.zeros(tensor.size, dtype=torch.int8)
    views = create_kv_cache_views(raw, spec(), 5, layout, tensor)
    places = [
        tensor.offset + layer * tensor.layer_stride + b * tensor.block_stride
        for layer in range(2)
        for b in range(5)
    ]
    found = [2 * view[b].storage_offset() for view in views for b in range(5)]
    assert found == places
    own = cache_of({"a": spec(), "b": spec()}, layout).kv_cache_tensors[0]
    assert (tensor.layer_stride, tensor.block_stride) == (own.layer_stride, own.block_stride)


# Sizing.


def test_native_configs_of_random_models_are_vllms_own() -> None:
    """Real specs and configs in, real configs out: equal to ``get_kv_cache_configs``.

    A difference must be one of those that the document names.
    """
    seen: Counter[str] = Counter()

    @settings(run_random, max_examples=500)
    @given(native_cases())
    def compare(case: NativeCase) -> None:
        sizing = case.config
        model = build_model(sizing.model)
        if isinstance(model, str):
            return
        mine, peer = model
        workers = workers_of(sizing, list(mine))
        memory = memory_of(sizing, mine, workers)
        specs = [{name: peer[name] for name in worker} for worker in workers]
        options = config_options(sizing)
        config = peers.vllm_config(**dict(options, layout=sizing.layout if case.pinned else None))
        made: list[Any] = []

        def build() -> Any:
            configs, scheduler = ours.build_native_kv_cache_configs(
                config,
                specs,
                memory,
                indexes_kv_by_block_stride=sizing.layout.is_block_outermost,
            )
            made[:] = [*configs, scheduler]
            return described(made, config)

        our = answer_of(build)
        if our.error is not None:
            wanted = sizing.layout.name if case.pinned else None
            assert config.cache_config.kv_cache_layout == wanted
            assert config.model_config.max_model_len == sizing.max_model_len
        mine_made = list(made)

        def size() -> Any:
            config = peers.vllm_config(**options)
            made[:] = peers.utils.get_kv_cache_configs(config, specs, list(memory))
            made.append(peers.utils.generate_scheduler_kv_cache_config(made))
            for each in made:
                each.kv_cache_layout = config.cache_config.kv_cache_layout
            return described(made, config)

        their = theirs(size)
        outcome = judge(
            "native configs",
            case,
            our,
            their,
            we_refuse=lambda: config_refusal(sizing, mine, our, their),
            we_differ=lambda: (
                absent_layers(words_of(their)) or grouping_difference(sizing, peer, our, their)
            ),
        )
        seen[outcome] += 1
        if outcome == EQUAL:
            for one, other in zip(mine_made, made, strict=True):
                assert contents(one) == contents(other)
            seen[sizing.layout.name] += 1

    compare()
    assert seen[EQUAL] >= 100, seen
    for layout in (VllmLayout.LBNHC, VllmLayout.BLNHC, VllmLayout.LBHNC):
        assert seen[layout.name] >= 5, seen


def described(made: list[Any], config: Any) -> dict[str, Any]:
    return {
        "workers": [peers.describe_config(one) for one in made],
        "layouts": [one.kv_cache_layout for one in made],
        "max_model_len": config.model_config.max_model_len,
    }


def words_of(their: Answer) -> Answer:
    """Their answer without the scheduler's config, which is the last."""
    if their.value is None:
        return their
    return Answer({"workers": their.value["workers"][:-1]})


def test_a_refusal_leaves_no_trace() -> None:
    config = config_of()
    specs = {"a": CustomSpec(16, num_kv_heads=2, head_size=8, dtype=spec().dtype)}
    with pytest.raises(UnsupportedError, match=r"worker_specs\[0\]\['a'\].*CustomSpec"):
        ours.build_native_kv_cache_configs(config, [specs], [1 << 20])
    with pytest.raises(InsufficientMemoryError):
        ours.build_native_kv_cache_configs(config, [{"a": spec()}], [2048])
    assert config.cache_config.kv_cache_layout is None
    assert config.model_config.max_model_len == 64


# KV connectors, by vLLM's factory.


def with_connector(name: str | None, module: str | None = None) -> Any:
    config = config_of()
    config.kv_transfer_config = KVTransferConfig(
        kv_connector=name,
        kv_role=None if name is None else "kv_both",
        kv_connector_module_path=module,
    )
    return config


HERE = "tests.integrations.vllm.connectors"


def test_the_factory_finds_the_class_and_its_layout_is_honoured() -> None:
    assert ours.find_connector_class(config_of()) is None
    assert ours.get_connector_required_kv_cache_layout(config_of()) is None
    assert ours.get_connector_required_kv_cache_layout(with_connector("AnyLayout", HERE)) is None
    config = with_connector("HeadMajor", HERE)
    assert ours.find_connector_class(config).__name__ == "HeadMajor"
    assert ours.get_connector_required_kv_cache_layout(config) is VllmLayout.LBHNC
    (worker,), scheduler = ours.build_native_kv_cache_configs(
        config, [{"a": spec(), "b": spec()}], [1 << 20]
    )
    assert worker.kv_cache_layout == scheduler.kv_cache_layout == "LBHNC"
    assert config.cache_config.kv_cache_layout == "LBHNC"


def test_a_connector_against_the_backend_raises() -> None:
    config = with_connector("BlockMajor", HERE)
    specs = [{"a": spec()}]
    with pytest.raises(LayoutConflictError, match=CONTRADICTS):
        ours.build_native_kv_cache_configs(config, specs, [1 << 20])
    assert config.cache_config.kv_cache_layout is None
    (worker,), _ = ours.build_native_kv_cache_configs(
        config, specs, [1 << 20], indexes_kv_by_block_stride=True
    )
    assert worker.kv_cache_layout == "BLHNC"


def test_connectors_that_are_wrong() -> None:
    with pytest.raises(UnknownLayoutError, match="connector Nonsense requires an unsupported"):
        ours.get_connector_required_kv_cache_layout(with_connector("Nonsense", HERE))
    with pytest.raises(ValueError, match="Unsupported connector type: NoSuchConnector"):
        ours.find_connector_class(with_connector("NoSuchConnector"))
    config = with_connector("HeadMajor", HERE)
    with pytest.raises(layout_core.ConfigError, match="its class is needed"):
        layout_core.get_connector_required_kv_cache_layout(config)  # the core has no factory


def test_connectors_of_vllms_own_agree_with_vllm() -> None:
    """Those that a CPU machine can import, against vLLM's own function."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.utils import get_kv_connector_cache_layout

    asked = 0
    for name in ("ExampleConnector", "OffloadingConnector", "SimpleCPUOffloadConnector"):
        if name not in KVConnectorFactory._registry:
            continue
        config = with_connector(name)
        theirs_says = get_kv_connector_cache_layout(config)
        mine = ours.get_connector_required_kv_cache_layout(config)
        assert (None if mine is None else mine.name) == theirs_says
        asked += 1
    assert asked == 3, VERSION
