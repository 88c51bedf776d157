"""Faults planted into our side: a check that misses its fault is blind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import integrations.vllm.control as control
import integrations.vllm.convert as convert
import integrations.vllm.kv_cache as kv_cache
from tests.integrations.vllm import check_control, check_convert, check_kv_cache, connectors
from tests.integrations.vllm.real import VllmLayout


def _swap_heads_and_tokens(resolved: Any) -> Any:
    layers = tuple(
        replace(view, strides=(view.strides[0], view.strides[2], view.strides[1], 1))
        for view in resolved.layers
    )
    return replace(resolved, layers=layers)


def _without_transfer(config: Any) -> Any:
    for group in config.kv_cache_groups:
        group.enable_kv_transfer = True
    return config


def _one_block_less(native: Any) -> Any:
    scheduler = native.scheduler_config
    return replace(native, scheduler_config=replace(scheduler, num_blocks=scheduler.num_blocks - 1))


def _another_connector(cls: Any) -> Any:
    return connectors.AnyLayout


FAULTS: dict[str, tuple[Any, str, Callable[[Any], Any], Callable[[], None]]] = {
    "a spec's causality lost": (
        convert,
        "as_spec",
        lambda spec: replace(spec, non_causal=False) if hasattr(spec, "non_causal") else spec,
        check_convert.test_random_specs_of_theirs_come_back_equal,
    ),
    "a group's transfer flag lost": (
        convert,
        "as_config",
        _without_transfer,
        lambda: check_convert.test_configs_of_theirs_come_back_equal(VllmLayout.LBNHC),
    ),
    "heads and tokens swapped in a view": (
        kv_cache,
        "resolve_layout",
        _swap_heads_and_tokens,
        lambda: check_kv_cache.test_one_group_in_each_layout(VllmLayout.LBNHC, 16),
    ),
    "the scheduler one block short": (
        control.diffusion,
        "plan_native_kv_cache_configs",
        _one_block_less,
        check_control.test_native_configs_of_random_models_are_vllms_own,
    ),
    "our enum where vLLM expects its own": (
        control,
        "to_vllm",
        convert.from_vllm,
        lambda: check_control.test_the_layout_is_pinned_as_vllm_wants_it(
            True, None, VllmLayout.BLNHC
        ),
    ),
    "another connector than the configured one": (
        control,
        "find_connector_class",
        _another_connector,
        check_control.test_a_connector_against_the_backend_raises,
    ),
}
"""What is wrong -> the module, the function, what becomes of its result, who must notice."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name, change, check = FAULTS[fault]
    real = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args, **kwargs: change(real(*args, **kwargs)))
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check()
