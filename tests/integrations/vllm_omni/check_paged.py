"""Paged calls of the real worker through our backends."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm_omni.diffusion.attention.backends.flash_attn import FlashAttentionImpl

import backends
from block_manager import RowTable
from integrations.vllm_omni import install, paged, remove
from layout_core import PagedAttentionContext, PoolCell, Visibility, plan_step, resolve_layout
from layout_core.foreign import as_config
from tests import oracle
from tests.integrations.vllm_omni import peers, scenario
from tests.integrations.vllm_omni.scenario import Case
from tests.tolerances import Mismatch, assert_close, assert_same_bytes

LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
BACKENDS = ("torch_cuda", "jax_gpu")

CASES = [
    *(Case(layout=layout) for layout in LAYOUTS),
    Case(causal=True, layout="BLNHC"),
    Case(causal=True, spans=True),
    Case(spans=True, layout="BHLNC", form="batched"),
    Case(form="batched", layout="LHBNC"),
    Case(form="flat", kv_heads=1),
    Case(block_size=64, kv_heads=4, causal=True, layout="LBHNC"),
    Case(dtype=torch.bfloat16, causal=True),
    Case(dtype=torch.float16, layout="BLHNC"),
]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    installed = install(request.param)
    yield request.param
    remove(installed)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_request_is_what_the_oracle_says(backend: str, case: Case) -> None:
    request = scenario.run(case)
    name = request.worker.layers["blocks.0.attn"].attn_backend.get_name()
    assert name == {"torch_cuda": "PAGESTRIDE_TORCH", "jax_gpu": "PAGESTRIDE_JAX"}[backend]
    worker = scenario.worker_of(request, backend)
    assert worker.resolved.layout.name == case.layout
    if backend == "torch_cuda":  # the bound cache is the pool
        scenario.check_cells(request, case, scenario.bound_cells(request))
        assert worker.pool.storage.data_ptr() == _bound_storage(request).data_ptr()
    else:
        assert not any(
            cache.any() for cache in request.worker.backend.kv_caches_by_layer.values()
        ), "the JAX engine owns its pool"


def _bound_storage(request: scenario.Request) -> torch.UntypedStorage:
    return request.worker.backend.kv_caches[0].untyped_storage()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_engines_leave_the_same_bytes(layout: str) -> None:
    pools = []
    for backend in BACKENDS:
        installed = install(backend)
        try:
            worker = scenario.worker_of(scenario.run(Case(layout=layout)), backend)
        finally:
            remove(installed)
        pools.append(worker.engine.pool_bytes(worker.pool))
    assert_same_bytes(pools[1], pools[0], layout)
    assert any(pools[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_random_requests(backend: str) -> None:
    rng = random.Random(11)
    installed = install(backend)
    try:
        for seed in range({"torch_cuda": 60, "jax_gpu": 2}[backend]):
            case = scenario.random_case(rng, LAYOUTS)
            request = scenario.run(case, seed=seed)
            if backend == "torch_cuda":
                scenario.check_cells(request, case, scenario.bound_cells(request))
    finally:
        remove(installed)


@pytest.mark.parametrize("seed", range(8))
def test_outputs_are_those_of_vllm_omnis_own_backend(seed: int) -> None:
    """Its FLASH_ATTN, which on a CPU runs vLLM's CPU kernel over the same adapter.

    Not with spans: its segments are prepared together, and the CPU kernel's builder keeps one
    scratch for all.
    """
    case = replace(scenario.random_case(random.Random(seed), ("LBHNC",)), spans=False)
    theirs, ours = [], []
    for outputs, member in ((theirs, "FLASH_ATTN"), (ours, "TORCH_SDPA")):
        installed = install("torch_cuda")
        try:
            rng = np.random.default_rng(seed)
            request = scenario.start(case, member)
            is_ours = not isinstance(
                request.worker.layers["blocks.0.attn"].attention, FlashAttentionImpl
            )
            assert is_ours == (member == "TORCH_SDPA")
            for denoise in (False, True):
                outputs += scenario.step(request, case, rng, denoise=denoise)
        finally:
            remove(installed)
    for mine, peer in zip(ours, theirs, strict=True):
        assert_close(scenario.as_numpy(mine), scenario.as_numpy(peer), "engines", "float32")


def test_slots_are_those_that_vllm_computed(backend: str) -> None:
    request = scenario.start(Case())
    rng = np.random.default_rng(1)
    shape = request.worker.shape
    rows = peers.rows_of(request.metadata, denoise=False)
    total = sum(row.query_len for row in rows)
    with request.worker.step(rows) as adapter:
        q = peers.tokens(rng, total, shape.num_heads, shape.head_size, torch.float32)
        k = peers.tokens(rng, total, shape.num_kv_heads, shape.head_size, torch.float32)
        context = adapter.prepare_layer_context("blocks.1.attn", q, k, k)
        request.worker.layers["blocks.1.attn"].attention.forward_paged(context)
        worker = scenario.worker_of(request, backend)
        plan = plan_step(
            worker.resolved,
            [paged.row_of(row) for row in rows],
            worker.tables,
            visibility=Visibility(causal=False),
        )
        assert list(plan.slots) == context.slot_mapping.tolist()


def test_blocks_that_vllm_splits_for_its_kernel(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan follows its kernel blocks, as the bound cache does."""
    monkeypatch.setattr(CPUAttentionBackend, "get_supported_kernel_block_sizes", lambda: [32])
    case = Case(block_size=64, causal=True, spans=True)
    request = scenario.run(case)
    view = scenario.worker_of(request, backend).resolved.layers[0]
    assert (view.block_size, view.blocks_per_manager_block) == (32, 2)
    assert request.worker.backend.kv_caches[0].shape[:3] == (66, 2, 32)


def test_one_batch_serves_all_layers_of_a_step(backend: str) -> None:
    request = scenario.run(Case())
    assert len(scenario.worker_of(request, backend)._batches) == 1


def test_two_requests_one_of_them_removed(backend: str) -> None:
    """A row that took over another's blocks reads nothing of it."""
    case = Case()
    request = scenario.run(case)
    request.worker.backend.remove_diffusion_kv_requests(["r"])
    request.manager.free_request("r")
    again = request.manager.reserve_request("s", [peers.request("s", 0, 50, scenario.TARGET)])
    request.worker.backend.install_diffusion_kv_metadata(again)
    request.metadata, request.keys, request.values = again, {}, {}
    rng = np.random.default_rng(5)
    for denoise in (False, True):
        scenario.step(request, case, rng, denoise=denoise)


def test_a_context_of_our_own_is_served_too(backend: str) -> None:
    """Without an adapter: the arguments of the engine's function."""
    request = scenario.start(Case())
    impl = request.worker.layers["blocks.0.attn"].attention
    configs, scheduler, _ = peers.control_plane(request.worker, 33)
    resolved = resolve_layout(as_config(configs[0]))
    table = RowTable(as_config(scheduler), max_model_len=256)
    table.install(request.metadata)
    rows = [paged.row_of(row) for row in peers.rows_of(request.metadata, denoise=False)]
    engine = backends.load(backend)
    batch = engine.prepare(resolved, rows, table, visibility=Visibility(causal=False), num_heads=4)
    rng, total = np.random.default_rng(0), sum(row.query_len for row in rows)
    q, k, v = (rng.standard_normal((total, h, 32)).astype(np.float32) for h in (4, 2, 2))
    cell = PoolCell(engine.allocate(resolved))
    arrays = [engine.from_numpy(x) for x in (q, k, v)]
    output = impl.forward_paged(PagedAttentionContext(cell, "blocks.0.attn", *arrays, batch))
    first = slice(0, rows[0].query_len)
    expected, _ = oracle.dense_attention(
        q[first], k[first], v[first], np.ones((rows[0].query_len,) * 2, bool)
    )
    assert_close(engine.to_numpy(output)[first], expected, "attention", "float32")


def test_oracle_comparison_can_fail(backend: str) -> None:
    request = scenario.start(Case())
    for layer in request.worker.backend._kv_cache_layer_adapters.values():
        layer.softmax_scale *= 1.05
    with pytest.raises(Mismatch, match="outside the tolerance"):
        scenario.step(request, Case(), np.random.default_rng(0), denoise=False)
