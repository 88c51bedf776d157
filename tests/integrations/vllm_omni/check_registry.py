"""In and out of vLLM-Omni's registry, and what is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata as packages
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_omni.diffusion.attention import selector
from vllm_omni.diffusion.attention.backends.registry import (
    _DIFFUSION_ATTN_OVERRIDES,
    DiffusionAttentionBackendEnum,
)
from vllm_omni.diffusion.attention.backends.sdpa import SDPABackend
from vllm_omni.diffusion.data import AttentionConfig, DiffusionParallelConfig
from vllm_omni.platforms import current_omni_platform

from backends import registry as our_registry
from integrations.vllm_omni import (
    OmniJaxBackend,
    OmniTorchBackend,
    attach,
    install,
    rank_local_spec,
    registry,
    remove,
    ulysses_degree,
)
from layout_core import FullAttentionSpec
from layout_core.errors import (
    BlockTableError,
    ConfigError,
    LayoutConflictError,
    MissingPackageError,
    PoolError,
    StaleBatchError,
    TensorError,
    UnknownBackendError,
    UnsupportedError,
)
from tests.integrations.vllm_omni import peers, scenario
from tests.integrations.vllm_omni.scenario import Case

SDPA = DiffusionAttentionBackendEnum.TORCH_SDPA


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Every test leaves the registry as vLLM-Omni ships it."""
    yield
    assert not _DIFFUSION_ATTN_OVERRIDES


def test_each_engine_takes_a_member_and_gives_it_back() -> None:
    assert SDPA.get_class() is SDPABackend
    first = install("torch_cuda")
    assert SDPA.get_class() is OmniTorchBackend
    second = install("jax_gpu")
    assert SDPA.get_class() is OmniJaxBackend
    with pytest.raises(ConfigError, match="remove what was installed later first"):
        remove(first)
    remove(second)
    assert SDPA.get_class() is OmniTorchBackend
    remove(first)
    assert SDPA.get_class() is SDPABackend
    assert not SDPA.is_overridden()
    with pytest.raises(ConfigError, match="TORCH_SDPA means"):
        remove(first)


def test_any_member_can_be_taken() -> None:
    for member in DiffusionAttentionBackendEnum.__members__:
        installed = install("torch_cuda", member=member)
        assert DiffusionAttentionBackendEnum[member].get_class() is OmniTorchBackend
        remove(installed)


def test_the_selector_gives_it_to_a_role() -> None:
    """Through vLLM-Omni's attention config, its cache of classes, and its capability query."""
    config = AttentionConfig(default={"backend": "TORCH_SDPA"})
    with peers.cpu_platform("FLASH_ATTN"):
        before, _ = selector.get_attn_backend_for_role("self", 32, config)
        assert before is SDPABackend
        installed = install("torch_cuda")
        try:
            chosen, spec = selector.get_attn_backend_for_role("self", 32, config)
            assert chosen is OmniTorchBackend
            assert spec is not None
            assert selector.get_attn_backend_for_capability("self", config) is OmniTorchBackend
            current_omni_platform.validate_diffusion_attn_backend("TORCH_SDPA")
        finally:
            remove(installed)
        after, _ = selector.get_attn_backend_for_role("self", 32, config)
        assert after is SDPABackend


def test_what_cannot_be_installed_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownBackendError, match="backend: expected one of torch_cuda, jax_gpu"):
        install("triton")
    with pytest.raises(ConfigError, match="member: expected one of FLASH_ATTN, TORCH_SDPA, "):
        install("torch_cuda", member="SDPA")
    missing = our_registry.BuiltIn("backends.jax_gpu", ("no_such_jax",), "jax")
    monkeypatch.setitem(our_registry.BUILT_IN, "jax_gpu", missing)
    with pytest.raises(MissingPackageError, match=r"no_such_jax.*pip install 'pagestride\[jax\]'"):
        install("jax_gpu")
    monkeypatch.setattr(packages, "version", lambda name: "0.31.0")
    with pytest.raises(UnsupportedError, match=r"vllm_omni: expected version 0\.30, got 0\.31\.0"):
        install("torch_cuda")


# Sequence parallelism.


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"ring_degree": 2}, "parallel_config.ring_degree: ring attention is not served"),
        ({"ring_degree": 2, "ulysses_degree": 2}, "parallel_config.ring_degree"),
        ({"allgather_degree": 2}, "parallel_config.allgather_degree: all-gather of K/V"),
        (
            {"ulysses_degree": 2, "ulysses_mode": "advanced_uaa"},
            "parallel_config.ulysses_mode: expected 'strict', got 'advanced_uaa'",
        ),
    ],
)
def test_parallelism_is_refused_by_name(parallel: dict[str, Any], message: str) -> None:
    config = DiffusionParallelConfig(data_parallel_size=1, **parallel)
    with pytest.raises(UnsupportedError, match=message):
        ulysses_degree(config)
    for backend in ("torch_cuda", "jax_gpu"):
        installed = install(backend)
        try:
            with pytest.raises(UnsupportedError, match=f"backend PAGESTRIDE_.*{message}"):
                peers.Worker(peers.Shape(), "TORCH_SDPA", **parallel)
        finally:
            remove(installed)


def test_a_forward_under_another_parallelism_is_refused_too() -> None:
    """The model was built without, and runs under a config with ring attention."""
    installed = install("torch_cuda")
    try:
        request = scenario.start(Case())
        request.worker.config.parallel_config.ring_degree = 2
        with (
            pytest.raises(UnsupportedError, match="ring_degree"),
            request.worker.step(peers.rows_of(request.metadata, denoise=False)) as adapter,
        ):
            call(adapter, request)
    finally:
        remove(installed)


def test_heads_of_one_rank() -> None:
    assert ulysses_degree(None) == 1
    assert ulysses_degree(DiffusionParallelConfig(data_parallel_size=1, ulysses_degree=2)) == 2
    ours = FullAttentionSpec(block_size=16, num_kv_heads=4, head_size=8, dtype="float32")
    for spec in (ours, peers.spec(peers.Shape(num_kv_heads=4))):
        assert rank_local_spec(spec, 4).num_kv_heads == 1
        assert rank_local_spec(spec, 2).page_size_bytes * 2 == spec.page_size_bytes
        with pytest.raises(UnsupportedError, match="expected a divisor of the 4 KV heads, got 3"):
            rank_local_spec(spec, 3)


# Paged calls that cannot be served.


def call(adapter: Any, request: scenario.Request, name: str = "blocks.0.attn") -> Any:
    """One paged call with zeros, past the layer's own forward."""
    shape = request.worker.shape
    total = sum(row.query_len for row in adapter._active_batch.rows)
    q = torch.zeros(total, shape.num_heads, shape.head_size)
    k = torch.zeros(total, shape.num_kv_heads, shape.head_size)
    context = adapter.prepare_layer_context(name, q, k, k)
    return request.worker.layers[name].attention.forward_paged(context)


@pytest.fixture(params=["torch_cuda", "jax_gpu"])
def served(request: pytest.FixtureRequest) -> Iterator[scenario.Request]:
    installed = install(request.param)
    try:
        yield scenario.start(Case())
    finally:
        remove(installed)


def refuse(served: scenario.Request, kind: type[Exception], message: str) -> None:
    rows = peers.rows_of(served.metadata, denoise=False)
    with served.worker.step(rows) as adapter, pytest.raises(kind, match=message):
        call(adapter, served)


def test_windows_are_refused(served: scenario.Request) -> None:
    layer = served.worker.backend._kv_cache_layer_adapters["blocks.0.attn"]
    layer.spec = SimpleNamespace(**{**vars(layer.spec), "sliding_window": 8, "non_causal": True})
    refuse(served, UnsupportedError, "layer 'blocks.0.attn': sliding_window: .*, got 8")


def test_undivided_heads_are_refused(served: scenario.Request) -> None:
    worker = served.worker
    with worker.step(peers.rows_of(served.metadata, denoise=False)) as adapter:
        layer = adapter.layers["blocks.0.attn"]
        layer.num_kv_heads, layer.num_heads = 1, 2
        message = "it has 1 KV heads on this rank, the plan 2"
        q, k = torch.zeros(113, 2, 32), torch.zeros(113, 1, 32)
        context = adapter.prepare_layer_context("blocks.0.attn", q, k, k)
        with pytest.raises(TensorError, match=message):
            worker.layers["blocks.0.attn"].attention.forward_paged(context)


def test_decode_context_parallelism_is_refused(served: scenario.Request) -> None:
    with served.worker.step(peers.rows_of(served.metadata, denoise=False)) as adapter:
        adapter.block_tables.cp_size = 2
        with pytest.raises(UnsupportedError, match="decode_context_parallel_size"):
            call(adapter, served)


def test_a_worker_of_another_layout_is_refused(served: scenario.Request) -> None:
    served.worker.vllm_config.cache_config.kv_cache_layout = "BLNHC"
    refuse(served, LayoutConflictError, "'BLNHC' disagrees with the layout")


def test_an_edited_config_is_refused(served: scenario.Request) -> None:
    adapter = served.worker.backend.get_paged_attention_adapter()
    adapter.kv_cache_config.kv_cache_tensors[0].layer_stride -= 64
    refuse(served, ConfigError, r"kv_cache_tensors\[0\]\.layer_stride")


def test_rows_that_change_in_a_step_make_it_stale(served: scenario.Request) -> None:
    with served.worker.step(peers.rows_of(served.metadata, denoise=False)) as adapter:
        call(adapter, served)
        adapter._prepare_generation += 1
        with pytest.raises(StaleBatchError, match="prepared under version"):
            call(adapter, served, "blocks.1.attn")


def test_an_adapter_that_says_no_blocks_is_refused(served: scenario.Request) -> None:
    adapter = served.worker.backend.get_paged_attention_adapter()
    resolve = adapter.resolve_row
    with served.worker.step(peers.rows_of(served.metadata, denoise=False)) as adapter:
        adapter.resolve_row = lambda *identity: SimpleNamespace(
            **{**vars(resolve(*identity)), "block_ids": ()}
        )
        with pytest.raises(BlockTableError, match="blocks of 0 groups, expected those of group 0"):
            call(adapter, served)


def test_a_context_needs_its_adapter(served: scenario.Request) -> None:
    adapter = served.worker.backend.get_paged_attention_adapter()
    batch = adapter.prepare_batch(peers.rows_of(served.metadata, denoise=False))
    with adapter.activate(batch):  # without vLLM-Omni's forward context
        with pytest.raises(ConfigError, match=r"no adapter is active; call inside .* or attach"):
            call(adapter, served)
        attach(adapter)
        assert call(adapter, served).shape == (113, 4, 32)
        q, k = torch.zeros(113, 4, 32), torch.zeros(113, 2, 32)
        late = adapter.prepare_layer_context("blocks.0.attn", q, k, k)
    with pytest.raises(ConfigError, match="no batch is active"):
        served.worker.layers["blocks.0.attn"].attention.forward_paged(late)
    late.layer._pagestride.layers["blocks.0.attn"] = object()
    with pytest.raises(PoolError, match="it is not the active adapter's layer"):
        served.worker.layers["blocks.0.attn"].attention.forward_paged(late)


@pytest.fixture
def torch_served() -> Iterator[scenario.Request]:
    installed = install("torch_cuda")
    try:
        yield scenario.start(Case())
    finally:
        remove(installed)


def test_a_bound_cache_that_is_elsewhere_is_refused(torch_served: scenario.Request) -> None:
    layers = torch_served.worker.backend.get_paged_attention_adapter().layers
    layer = layers["blocks.1.attn"]
    bound = layer.kv_cache
    for wrong, message in (
        (None, "no cache is bound to it"),
        (bound.clone(), "its cache lies in another allocation"),
        (layers["blocks.0.attn"].kv_cache, "its cache lies at byte 0 with shape"),
        (bound.transpose(1, 2), r"shape \(33, 32, 2, 256\)"),
        (
            bound.as_strided(bound.shape, (*bound.stride()[:2], 32, 1), bound.storage_offset()),
            "and strides",
        ),
    ):
        layer.kv_cache = wrong
        refuse(torch_served, PoolError, f"layer 'blocks.1.attn': .*{message}")
    layer.kv_cache = bound
    with torch_served.worker.step(peers.rows_of(torch_served.metadata, denoise=False)) as adapter:
        call(adapter, torch_served)


def test_connectors_are_refused_where_the_pool_is_not_the_bound_cache() -> None:
    installed = install("jax_gpu")
    try:
        served = scenario.start(Case())
        served.worker.vllm_config.kv_transfer_config = SimpleNamespace(kv_connector="NixlConnector")
        refuse(served, UnsupportedError, "kv_transfer_config: the JAX engine owns its pool, .*Nixl")
    finally:
        remove(installed)
    assert registry.BACKENDS.keys() == our_registry.BUILT_IN.keys()
