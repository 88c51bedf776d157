"""The diffusion control plane with vLLM's own config and specs, and configs that travel.

``build_native_kv_cache_configs`` against vLLM's sizing under the same layout; then a worker of
ours adopts vLLM's config, carries it as JSON and by pickle, and refuses it once it is edited.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from hypothesis import strategies as st

import layout_core
from layout_core import KVCacheConfig, KVCacheLayout, LayoutError
from layout_core.foreign import as_config
from tests.conformance import peers
from tests.conformance.cases import rarely
from tests.conformance.judge import judge, ours, theirs
from tests.conformance.sizing import (
    ConfigCase,
    absent_layers,
    build_model,
    config_cases,
    config_options,
    config_refusal,
    grouping_difference,
    memory_of,
    workers_of,
)
from tests.conformance.tally import EQUAL, Disagreement, Tally

EDITS = ("block_stride", "layer_stride", "size", "offset")


@dataclass(frozen=True)
class NativeCase:
    config: ConfigCase  # its layout is what must come out
    pinned: bool  # whether the layout stands on the config beforehand
    edited: str  # the field that is edited after the worker adopted


@st.composite
def native_cases(draw: st.DrawFn) -> NativeCase:
    pinned = rarely(draw, 2)
    config = draw(config_cases())
    if not pinned:
        implied = (
            layout_core.BLOCK_STRIDE_DIFFUSION_KV_CACHE_LAYOUT
            if config.layout.is_block_outermost
            else layout_core.DEFAULT_DIFFUSION_KV_CACHE_LAYOUT
        )
        config = replace(config, layout=implied)
    return NativeCase(config, pinned, draw(st.sampled_from(EDITS)))


def compare_native(case: NativeCase, tally: Tally) -> str:
    """All of the above."""
    sizing = case.config
    model = build_model(sizing.model)
    if isinstance(model, str):
        return model
    mine, peer = model
    workers = workers_of(sizing, list(mine))
    memory = memory_of(sizing, mine, workers)
    worker_specs = [{name: peer[name] for name in worker} for worker in workers]
    options = config_options(sizing)
    ours_options = dict(options, layout=sizing.layout if case.pinned else None)
    our_config = peers.vllm_config(**ours_options)

    def build() -> dict[str, object]:
        configs, scheduler = layout_core.build_native_kv_cache_configs(
            our_config,
            worker_specs,
            memory,
            indexes_kv_by_block_stride=sizing.layout.is_block_outermost,
        )
        return {
            "workers": [peers.describe_config(c) for c in configs],
            "layouts": [c.kv_cache_layout for c in (*configs, scheduler)],
            "scheduler": peers.describe_config(scheduler),
            "max_model_len": our_config.model_config.max_model_len,
            "pinned": our_config.cache_config.kv_cache_layout,
        }

    made: list[Any] = []

    def size() -> dict[str, object]:
        config = peers.vllm_config(**options)
        made[:] = peers.utils.get_kv_cache_configs(config, worker_specs, list(memory))
        scheduler = peers.utils.generate_scheduler_kv_cache_config(made)
        for each in (*made, scheduler):
            each.kv_cache_layout = config.cache_config.kv_cache_layout  # as its engine core does
        return {
            "workers": [peers.describe_config(c) for c in made],
            "layouts": [c.kv_cache_layout for c in (*made, scheduler)],
            "scheduler": peers.describe_config(scheduler),
            "max_model_len": config.model_config.max_model_len,
            "pinned": config.cache_config.kv_cache_layout,
        }

    our = ours(build)
    left = our_config.cache_config.kv_cache_layout
    if our.error is not None and left != (sizing.layout.name if case.pinned else None):
        raise Disagreement(f"a refused {case} pinned {left}")
    their = theirs(size)
    outcome = judge(
        "native configs",
        case,
        our,
        their,
        we_refuse=lambda: config_refusal(sizing, mine, our, their),
        we_differ=lambda: absent_layers(their) or grouping_difference(sizing, peer, our, their),
    )
    if outcome != EQUAL:
        return outcome
    tally.labels["pinned before" if case.pinned else "implied"] += 1
    tally.labels[f"edited {case.edited}"] += 1
    for rank, config in enumerate(made):
        _travel(f"worker {rank} of {case}", config, sizing.layout, case.edited)
    return EQUAL


def _travel(where: str, config: Any, layout: KVCacheLayout, edited: str) -> None:
    """vLLM's config through our worker, as it is and edited."""
    worker = SimpleNamespace(cache_config=SimpleNamespace(kv_cache_layout=None))
    if layout_core.adopt_kv_cache_layout(worker, config) is not layout:
        raise Disagreement(f"{where}: adopted {worker.cache_config.kv_cache_layout}")
    taken = as_config(config)
    if KVCacheConfig.from_json(taken.to_json()) != taken:
        raise Disagreement(f"{where}: changed by JSON")
    if pickle.loads(pickle.dumps(taken)) != taken:
        raise Disagreement(f"{where}: changed by pickle")
    layout_core.resolve_layout(taken)
    tensor = config.kv_cache_tensors[-1]
    setattr(tensor, edited, getattr(tensor, edited) + 1)
    again = SimpleNamespace(cache_config=SimpleNamespace(kv_cache_layout=None))
    try:
        layout_core.adopt_kv_cache_layout(again, config)
    except LayoutError:
        if again.cache_config.kv_cache_layout is not None:
            raise Disagreement(f"{where}: a refused config was adopted") from None
    else:
        raise Disagreement(f"{where}: adopted with {edited} edited")
