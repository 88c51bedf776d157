"""Which layout a model gets, and who must agree with it."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from hypothesis import strategies as st
from vllm.v1.attention.backends import utils as their_backends

import layout_core
from layout_core import KVCacheLayout
from tests.conformance import peers
from tests.conformance.cases import SpecCase, layouts, rarely
from tests.conformance.judge import judge, ours, theirs
from tests.conformance.sizing import build_model, config_for_us, models
from tests.conformance.tally import EQUAL, Disagreement, Tally

ALIASES = ("NHD", "HND")


@dataclass(frozen=True)
class ResolutionCase:
    """Backends of the workers, specs, and who else wants what."""

    backends: tuple[tuple[KVCacheLayout, ...] | None, ...]  # what each declares
    ranks: int
    odd_rank: bool  # whether the last worker reports another order
    model: tuple[tuple[str, SpecCase], ...]
    pinned: KVCacheLayout | None
    requested: str | None
    preferred: str | None
    foreign: bool


@st.composite
def resolution_cases(draw: st.DrawFn) -> ResolutionCase:
    order = st.permutations(list(KVCacheLayout))
    backends: list[tuple[KVCacheLayout, ...] | None] = []
    for _ in range(draw(st.sampled_from((1, 0, 2, 3)))):
        if rarely(draw, 4):
            backends.append(None)
        elif backends and backends[-1] and rarely(draw, 4):
            backends.append(backends[-1])
        else:
            backends.append(tuple(draw(order)[: draw(st.integers(1, 6))]))
    names = (*KVCacheLayout.__members__, *ALIASES)
    name = st.sampled_from(names)
    return ResolutionCase(
        backends=tuple(backends),
        ranks=draw(st.integers(1, 3)),
        odd_rank=rarely(draw, 10),
        model=() if rarely(draw, 3) else draw(models()),
        pinned=draw(layouts) if rarely(draw, 8) else None,
        requested=draw(name) if rarely(draw, 3) else "nonsense" if rarely(draw, 15) else None,
        preferred=draw(name) if rarely(draw, 3) else None,
        foreign=draw(st.booleans()),
    )


def compare_resolution(case: ResolutionCase, tally: Tally) -> str:
    """``get_supported_kv_cache_layouts``, then ``resolve_kv_cache_layout`` over the ranks."""
    model = build_model(case.model)
    if isinstance(model, str):
        return model
    _, peer = model

    def declare(wrap: Any) -> list[Any]:
        return [
            SimpleNamespace(
                supported_kv_cache_layouts=lambda declared=declared: (
                    None if declared is None else tuple(map(wrap, declared))
                )
            )
            for declared in case.backends
        ]

    our = ours(
        lambda: [
            layout.name
            for layout in layout_core.get_supported_kv_cache_layouts(declare(lambda x: x))
        ]
    )
    their = theirs(
        lambda: [
            layout.name
            for layout in their_backends.get_supported_kv_cache_layouts(declare(peers.layout_of))
        ]
    )
    outcome = judge("supported layouts", case, our, their)
    if outcome != EQUAL:
        return outcome
    reported = [list(their.value) for _ in range(case.ranks)]
    if case.odd_rank:
        reported[-1] = reported[-1][::-1]
    options: dict[str, Any] = {"layout": case.pinned}
    our_config = config_for_us(case.foreign, options)

    def resolve() -> tuple[str, str]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", layout_core.LayoutPreferenceWarning)
            layout = layout_core.resolve_kv_cache_layout(
                our_config,
                reported,
                list(peer.values()),
                requested=case.requested,
                preferred=case.preferred,
            )
        return layout.name, our_config.cache_config.kv_cache_layout

    our = ours(resolve)
    left = our_config.cache_config.kv_cache_layout
    wanted = None if case.pinned is None else case.pinned.name
    if our.error is not None and left != wanted:
        raise Disagreement(f"a refused {case} recorded {left}")
    their = theirs(lambda: _their_resolution(case, reported, list(peer.values()), options))

    def requested_too_late() -> str | None:
        if case.pinned is None or case.requested is None:
            return None
        return "request-over-recorded-layout"

    outcome = judge("layout", case, our, their, we_refuse=requested_too_late)
    if outcome == EQUAL:
        tally.labels[f"layout {our.value[0]}"] += 1
        for name in ("pinned", "requested", "preferred"):
            if getattr(case, name) is not None:
                tally.labels[name] += 1
        if len({(s.num_heads, s.num_states, s.page_size_bytes) for s in peer.values()}) > 1:
            tally.labels["mixed shapes"] += 1
    return outcome


def _their_resolution(
    case: ResolutionCase, reported: list[list[str]], specs: list[Any], options: dict[str, Any]
) -> tuple[str, str]:
    """vLLM reads the request from the environment, and a connector's wish from its class."""
    config = peers.vllm_config(**options)
    before = their_backends.get_kv_connector_cache_layout
    if case.requested is not None:
        os.environ["VLLM_KV_CACHE_LAYOUT"] = case.requested
    their_backends.get_kv_connector_cache_layout = lambda *_: case.preferred
    try:
        layout = their_backends.resolve_kv_cache_layout(config, reported, specs)
    finally:
        os.environ.pop("VLLM_KV_CACHE_LAYOUT", None)
        their_backends.get_kv_connector_cache_layout = before
    return layout.name, config.cache_config.kv_cache_layout


# A worker adopts what the control plane resolved.


@dataclass(frozen=True)
class AdoptionCase:
    pinned: KVCacheLayout | None
    carried: str | None
    foreign: bool


def adoption_cases() -> list[AdoptionCase]:
    """Every pinned layout with every carried name."""
    names = (*KVCacheLayout.__members__, *ALIASES, "nonsense")
    return [
        AdoptionCase(pinned, carried, foreign)
        for pinned in (None, *KVCacheLayout)
        for carried in names
        for foreign in (False, True)
    ]


def compare_adoption(case: AdoptionCase, tally: Tally) -> str:
    """``adopt_kv_cache_layout`` and vLLM's ``record_kv_cache_layout``."""
    options: dict[str, Any] = {"layout": case.pinned}
    our_config = config_for_us(case.foreign, options)
    carried = SimpleNamespace(kv_cache_layout=case.carried, kv_cache_groups=[])

    def adopt() -> str:
        layout_core.adopt_kv_cache_layout(our_config, carried)
        return str(our_config.cache_config.kv_cache_layout)

    def record() -> str:
        config = peers.vllm_config(**options)
        their_backends.record_kv_cache_layout(config.cache_config, case.carried)
        return str(config.cache_config.kv_cache_layout)

    outcome = judge("adoption", case, ours(adopt), theirs(record))
    if outcome == EQUAL:
        tally.labels["already pinned" if case.pinned else "adopted"] += 1
    return outcome
