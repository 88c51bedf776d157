"""Specs merged into one, and specs that are of one type; quantisation modes by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

import layout_core
from layout_core import KVCacheLayout
from tests.conformance import peers
from tests.conformance.cases import SpecCase
from tests.conformance.judge import judge, ours, theirs
from tests.conformance.sizing import build_model, grouping_difference, models
from tests.conformance.tally import EQUAL, Tally


@dataclass(frozen=True)
class MergeCase:
    """Layers to be merged; the two other fields are those that every model case has."""

    model: tuple[tuple[str, SpecCase], ...]
    layout: KVCacheLayout = KVCacheLayout.LBNHC
    disable_hybrid: bool = False


@st.composite
def merge_cases(draw: st.DrawFn) -> MergeCase:
    model = draw(models())
    if draw(st.booleans()):  # more of those that can merge
        kind = model[0][1].kind
        model = tuple((name, spec) for name, spec in model if spec.kind == kind)
    return MergeCase(model)


def compare_merges(case: MergeCase, tally: Tally) -> str:
    """``merge`` of the first spec's class, and ``UniformTypeKVCacheSpecs.from_specs``."""
    model = build_model(case.model)
    if isinstance(model, str):
        return model
    mine, peer = model

    def merge(specs: dict[str, Any]) -> dict[str, object]:
        listed = list(specs.values())
        return peers.describe(type(listed[0]).merge(listed))

    our, their = ours(lambda: merge(mine)), theirs(lambda: merge(peer))
    outcome = judge(
        "merge",
        case,
        our,
        their,
        we_differ=lambda: grouping_difference(case, peer, our, their),
    )
    if outcome == EQUAL and len(set(case.model)) > 1:
        tally.labels["merged"] += 1

    def one_type(cls: Any, specs: dict[str, Any]) -> dict[str, object] | None:
        made = cls.from_specs(specs)
        return None if made is None else peers.describe(made)

    uniform = judge(
        "one type",
        case,
        ours(lambda: one_type(layout_core.UniformTypeKVCacheSpecs, mine)),
        theirs(lambda: one_type(peers.interface.UniformTypeKVCacheSpecs, peer)),
    )
    return uniform if outcome == EQUAL else outcome


CACHE_DTYPES = [
    "auto",
    "bfloat16",
    "float16",
    "fp8",
    "fp8_e4m3",
    "fp8_e5m2",
    "fp8_inc",
    "fp8_ds_mla",
    "int8_per_token_head",
    "int4_per_token_head",
    "fp8_per_token_head",
    "nvfp4",
    "nvfp4_anything",
    "turboquant_k8v4",
    "turboquant_4bit_nc",
    "turboquant_k3v4_nc",
    "turboquant_3bit_nc",
]


def quant_cases() -> list[str]:
    """All cache dtypes that both versions know by name."""
    return CACHE_DTYPES


def compare_quant(case: str, tally: Tally) -> str:
    """``get_kv_quant_mode``."""
    return judge(
        "mode",
        case,
        ours(lambda: int(layout_core.get_kv_quant_mode(case))),
        theirs(lambda: int(peers.interface.get_kv_quant_mode(case))),
    )
