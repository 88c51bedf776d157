"""Planted faults in the integration: each must turn a check red."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from integrations.vllm_omni import (
    OmniTorchBackend,
    OmniTorchImpl,
    install,
    layout,
    metadata,
    paged,
    remove,
    torch_backend,
)
from layout_core import KVCacheLayout, LayoutError, Visibility
from tests.integrations.vllm_omni import (
    check_dense,
    check_layout,
    check_registry,
    check_rows,
    scenario,
)
from tests.integrations.vllm_omni.scenario import Case

Patch = pytest.MonkeyPatch


@contextmanager
def installed(backend: str = "torch_cuda") -> Iterator[None]:
    record = install(backend)
    try:
        yield
    finally:
        remove(record)


def run_paged(case: Case, backend: str = "torch_cuda") -> None:
    with installed(backend):
        request = scenario.run(case)
        if backend == "torch_cuda":
            scenario.check_cells(request, case, scenario.bound_cells(request))


# The faults: each changes one thing in the integration.


def rows_read_as_each_others(patch: Patch) -> None:
    real = paged.AdapterTables.block_ids

    def other(self: Any, row: Any, group: int) -> array[int]:
        return real(self, replace(row, sequence_id=1 - row.sequence_id), group)

    patch.setattr(paged.AdapterTables, "block_ids", other)


def block_off_by_one(patch: Patch) -> None:
    real = paged.AdapterTables.block_ids
    patch.setattr(
        paged.AdapterTables,
        "block_ids",
        lambda self, row, group: array("i", [b + 1 for b in real(self, row, group)]),
    )


def causality_forgotten(patch: Patch) -> None:
    patch.setattr(paged, "_visibility", lambda layer: Visibility(causal=False))


def start_forgotten(patch: Patch) -> None:
    real = paged.row_of
    patch.setattr(paged, "row_of", lambda row: replace(real(row), kv_start_pos=0))


def batch_kept_over_steps(patch: Patch) -> None:
    real = paged.PagedWorker._batch

    def keep(self: Any, context: Any) -> Any:
        if self._batches:
            return next(iter(self._batches.values()))
        return real(self, context)

    patch.setattr(paged.PagedWorker, "_batch", keep)


def around(name: str, change: Callable[[Any], dict[str, Any]]) -> Callable[[Patch], None]:
    """A fault that hands the worker a context with some attributes changed."""

    def plant(patch: Patch) -> None:
        real = paged.PagedWorker.forward

        def forward(self: Any, context: Any) -> torch.Tensor:
            return real(self, replace(context, **change(context)))

        patch.setattr(paged.PagedWorker, "forward", forward)

    plant.__name__ = name
    return plant


def layers_exchanged(patch: Patch) -> None:
    """Both layers write and read the cells of the first."""
    real = paged.PagedWorker.forward

    def forward(self: Any, context: Any) -> torch.Tensor:
        self.engine = FirstLayer(self.engine)
        return real(self, context)

    patch.setattr(paged.PagedWorker, "forward", forward)


class FirstLayer:
    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def forward_paged(self, pool: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
        return self._engine.forward_paged(pool, "blocks.0.attn", *args, **kwargs)


def spans_shifted(patch: Patch) -> None:
    def change(context: Any) -> dict[str, Any]:
        plan = context.piecewise_plan
        moved = tuple(tuple((a, b - 1) for a, b in row) for row in plan.spans)
        return {"piecewise_plan": replace(plan, spans=moved)}

    around("", change)(patch)


def scale_of_the_head_size(patch: Patch) -> None:
    real = OmniTorchImpl._dense

    def dense(self: Any, *args: Any) -> torch.Tensor:
        self.softmax_scale = self.head_size**-0.5
        return real(self, *args)

    patch.setattr(OmniTorchImpl, "_dense", dense)


def metadata_dropped(patch: Patch) -> None:
    patch.setattr(torch_backend, "as_attention_metadata", lambda given, *_: None)


def ranges_lost(patch: Patch) -> None:
    real = metadata.as_attention_metadata

    def lose(given: Any, *args: Any) -> Any:
        taken = real(given, *args)
        return None if taken is None else replace(taken, query_ranges=None)

    patch.setattr(torch_backend, "as_attention_metadata", lose)


def float_kept(patch: Patch) -> None:
    patch.setattr(metadata, "UNQUANTISED", "never said")


def bound_cache_not_compared(patch: Patch) -> None:
    patch.setattr(torch_backend, "_check_bound", lambda view, cache: None)


def pool_of_its_own(patch: Patch) -> None:
    patch.setattr(torch_backend, "bound_pool", lambda engine, plan, _: engine.allocate(plan))


def selector_keeps_its_cache(patch: Patch) -> None:
    from vllm_omni.diffusion.attention import selector

    cached = selector._cached_get_backend_cls
    patch.setattr(
        "integrations.vllm_omni.registry.selector",
        SimpleNamespace(_cached_get_backend_cls=SimpleNamespace(cache_clear=lambda: None)),
    )
    assert cached is selector._cached_get_backend_cls


def default_layout_exchanged(patch: Patch) -> None:
    patch.setattr("layout_core.diffusion.DEFAULT_DIFFUSION_KV_CACHE_LAYOUT", KVCacheLayout.LBHNC)


def offset_counted_in_the_size(patch: Patch) -> None:
    from integrations.vllm import control

    patch.setattr(layout, "build_kv_cache_tensor", control.build_kv_cache_tensor)


def demand_inverted(patch: Patch) -> None:
    real = layout.resolve_diffusion_kv_cache_layout

    def resolve(config: Any, *, indexes_kv_by_block_stride: Any = False, **rest: Any) -> Any:
        return real(config, indexes_kv_by_block_stride=not indexes_kv_by_block_stride, **rest)

    patch.setattr(layout, "resolve_diffusion_kv_cache_layout", resolve)


def stale_payload_taken(patch: Patch) -> None:
    patch.setattr("block_manager.RowTable._check_not_stale", lambda *_: None)


def heads_of_a_rank_not_checked(patch: Patch) -> None:
    patch.setattr(torch_backend, "check_local_heads", lambda impl, query: None)


def ring_overlooked(patch: Patch) -> None:
    patch.setattr("integrations.vllm_omni.impl.ulysses_degree", lambda config: 1)


def exchanged(context: Any) -> dict[str, Any]:
    indices = context.output_scatter_indices  # None where every row is as long as the longest
    return {} if indices is None else {"output_scatter_indices": indices.flip(0)}


PAGED = Case()
SPANS = Case(causal=True, spans=True)
PADDED = Case(form="batched")

FAULTS: dict[Callable[[Patch], None], Callable[[], None]] = {
    rows_read_as_each_others: lambda: run_paged(PAGED),
    block_off_by_one: lambda: run_paged(PAGED),
    causality_forgotten: lambda: run_paged(Case(causal=True)),
    start_forgotten: lambda: run_paged(PAGED),
    batch_kept_over_steps: lambda: run_paged(PAGED),
    layers_exchanged: lambda: run_paged(PAGED),
    spans_shifted: lambda: run_paged(SPANS),
    around("value_as_key", lambda c: {"key_write": c.value_write}): lambda: run_paged(PAGED),
    around("heads_reversed", lambda c: {"query": c.query.flip(1)}): lambda: run_paged(PAGED),
    around("tokens_reversed", lambda c: {"value_write": c.value_write.flip(0)}): lambda: run_paged(
        PAGED
    ),
    around("outputs_exchanged", exchanged): lambda: run_paged(PADDED),
    pool_of_its_own: lambda: run_paged(PAGED),
    scale_of_the_head_size: lambda: check_dense.test_dense_calls_are_those_of_its_sdpa_backend(
        OmniTorchBackend, False, None
    ),
    metadata_dropped: lambda: check_dense.test_dense_calls_are_those_of_its_sdpa_backend(
        OmniTorchBackend, False, "keys"
    ),
    ranges_lost: lambda: check_dense.test_spans_are_those_of_its_piecewise_attention(
        OmniTorchBackend, (check_dense.QueryRange(0, 5, 2), check_dense.QueryRange(5, 14, 12))
    ),
    float_kept: lambda: check_dense.test_a_layer_left_unquantised_says_float(OmniTorchBackend),
    heads_of_a_rank_not_checked: lambda: check_dense.test_the_heads_of_one_ulysses_rank(
        OmniTorchBackend
    ),
    bound_cache_not_compared: lambda: elsewhere(),
    selector_keeps_its_cache: check_registry.test_the_selector_gives_it_to_a_role,
    ring_overlooked: lambda: check_registry.test_parallelism_is_refused_by_name(
        {"ring_degree": 2}, "parallel_config.ring_degree: ring attention is not served"
    ),
    default_layout_exchanged: check_layout.test_resolution_agrees,
    demand_inverted: check_layout.test_resolution_agrees,
    offset_counted_in_the_size: check_layout.test_tensors_agree,
    stale_payload_taken: check_rows.test_both_worker_sides_take_and_refuse_the_same_payloads,
}


def elsewhere() -> None:
    with installed():
        check_registry.test_a_bound_cache_that_is_elsewhere_is_refused(scenario.start(Case()))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_caught(fault: Callable[[Patch], None], monkeypatch: Patch) -> None:
    fault(monkeypatch)
    with pytest.raises((AssertionError, LayoutError, pytest.fail.Exception)):
        FAULTS[fault]()
    monkeypatch.undo()


def test_the_checks_pass_without_a_fault() -> None:
    for case in (PAGED, SPANS, PADDED):
        run_paged(case)
    for check in dict.fromkeys(FAULTS.values()):
        check()
    assert len(FAULTS) >= 20
