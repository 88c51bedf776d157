"""What the engine's attention backend says reaches the control plane, and is held against it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

import backends
from diffusion_runner import cache
from diffusion_runner.cache import CachePlan, plan_cache
from diffusion_runner.model.config import DigitsConfig
from diffusion_runner.run import Runner
from layout_core import (
    DType,
    KVCacheLayout,
    LayoutConflictError,
    MissingPackageError,
    PlatformError,
    UnsupportedError,
)
from tests.runner.conftest import ENGINES


def backend_that_says(base: Any, demand: bool | None) -> Any:
    class Backend(base):  # type: ignore[misc]
        @staticmethod
        def get_name() -> str:
            return "FAKE"

        @classmethod
        def indexes_kv_by_block_stride(cls) -> bool | None:
            return demand

    return Backend


@pytest.fixture
def base() -> Any:
    return backends.load("torch_cuda").attention_backend()


def plan(backend: Any, layout: KVCacheLayout | None) -> CachePlan:
    return plan_cache(
        DigitsConfig(),
        attention_backend=backend,
        layout=layout,
        block_size=8,
        kv_dtype=DType.parse("float32"),
        max_seq_len=24,
        num_blocks=9,
        largest_request_blocks=3,
    )


@pytest.mark.parametrize(("demand", "layout"), [(True, "BLNHC"), (False, "LBNHC"), (None, "LBNHC")])
def test_the_backend_selects_the_layout(base: Any, demand: bool | None, layout: str) -> None:
    made = plan(backend_that_says(base, demand), None)
    assert made.scheduler_config.kv_cache_layout == layout
    assert made.resolved.layout is KVCacheLayout[layout]


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("layout", KVCacheLayout, ids=str)
def test_our_engines_say_nothing_and_follow_any_layout(name: str, layout: KVCacheLayout) -> None:
    assert plan(backends.load(name).attention_backend(), layout).resolved.layout is layout


@pytest.mark.parametrize("layout", KVCacheLayout, ids=str)
def test_a_contradiction_raises_at_resolution(base: Any, layout: KVCacheLayout) -> None:
    backend = backend_that_says(base, not layout.is_block_outermost)
    with pytest.raises(LayoutConflictError, match="contradicts the attention backend"):
        plan(backend, layout)
    assert plan(backend_that_says(base, layout.is_block_outermost), layout).resolved


@pytest.mark.parametrize(("demand", "carried"), [(True, "LBNHC"), (False, "BLNHC")])
def test_a_contradiction_raises_at_adoption(
    base: Any, monkeypatch: pytest.MonkeyPatch, demand: bool, carried: str
) -> None:
    """A control plane that did not ask sends a layout that the worker's backend cannot follow."""
    monkeypatch.setattr(cache, "block_stride_demand", lambda _: None)
    with pytest.raises(LayoutConflictError, match=f"pinned {carried} contradicts the attention"):
        plan(backend_that_says(base, demand), KVCacheLayout[carried])


def test_the_runner_asks_its_engine(base: Any) -> None:
    engine = backends.load("torch_cuda")
    runner = Runner(engine)
    runner._attention = backend_that_says(base, True)
    from diffusion_runner.settings import RunSettings

    settings = RunSettings(prompts=("7",), steps=1)
    assert runner.generate(settings).layout is KVCacheLayout.BLNHC
    with pytest.raises(LayoutConflictError, match="LBNHC contradicts the attention backend"):
        runner.generate(replace(settings, layout=KVCacheLayout.LBNHC))


def test_an_unavailable_backend_stops_the_runner_before_a_model_is_built(
    base: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def built(*arguments: Any) -> Any:
        raise AssertionError("the model was built")

    monkeypatch.setattr("diffusion_runner.run.make_loop", built)

    def runner(device: str = "cpu", **changes: Any) -> Runner:
        backend = type("Fake", (base,), {"get_name": staticmethod(lambda: "FAKE"), **changes})
        return Runner(SimpleNamespace(attention_backend=lambda: backend, device=device))

    with pytest.raises(AssertionError, match="the model was built"):
        runner()
    with pytest.raises(UnsupportedError, match=r"FAKE: supports_head_size\(32\) is False.* 64"):
        runner(get_supported_head_sizes=staticmethod(lambda: [64]))
    with pytest.raises(PlatformError, match="FAKE: platform 'xpu' is not in supported_platforms"):
        runner("xpu:1")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        MissingPackageError, match=r"FAKE needs torch, .* pip install 'pagestride\[torch\]'"
    ):
        runner()
