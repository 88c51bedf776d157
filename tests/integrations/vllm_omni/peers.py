"""The real vLLM-Omni on a CPU: its worker backend, its adapter, its layers. Imports it.

Everything is vLLM-Omni's and vLLM's own but for three doubles: the block tables (see
``host_tables``); the platform's choice of a backend, which a CPU's platform does not make; and
the run's config, a namespace with the fields that are read, since the real one looks for the
files of a model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm_omni.diffusion.attention import layer as omni_layer
from vllm_omni.diffusion.attention import selector
from vllm_omni.diffusion.attention.backends.registry import DiffusionAttentionBackendEnum
from vllm_omni.diffusion.config import set_current_diffusion_config
from vllm_omni.diffusion.data import DiffusionParallelConfig
from vllm_omni.diffusion.diffusion_kv.config import DiffusionKVCacheMode
from vllm_omni.diffusion.diffusion_kv.initialization import build_native_kv_cache_configs
from vllm_omni.diffusion.diffusion_kv.manager import DiffusionKVCacheManager
from vllm_omni.diffusion.diffusion_kv.metadata import DiffusionKVMetadata
from vllm_omni.diffusion.diffusion_kv.model_runner_backend import DiffusionKVModelRunnerBackend
from vllm_omni.diffusion.diffusion_kv.paged_attention_adapter import DiffusionPagedAttentionRow
from vllm_omni.diffusion.diffusion_kv.request import DiffusionKVRequest
from vllm_omni.diffusion.forward_context import set_forward_context
from vllm_omni.diffusion.vllm_config import create_diffusion_vllm_config
from vllm_omni.platforms import current_omni_platform

from tests.integrations.vllm_omni.host_tables import HostBlockTables

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Shape:
    """What a model's layers are like."""

    layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 32
    block_size: int = 32
    causal: bool = False
    dtype: torch.dtype = torch.float32
    max_model_len: int = 256

    @property
    def names(self) -> list[str]:
        return [f"blocks.{index}.attn" for index in range(self.layers)]


def run_config(shape: Shape, **parallel: Any) -> SimpleNamespace:
    """What vLLM-Omni's code reads of an ``OmniDiffusionConfig``."""
    return SimpleNamespace(
        model="none",
        model_class_name=None,
        dtype=shape.dtype,
        max_model_len=shape.max_model_len,
        diffusion_kv_mode=DiffusionKVCacheMode.PAGED_SCHEDULER,
        diffusion_kv_max_rows_per_request=4,
        max_num_seqs=4,
        max_num_batched_tokens=1024,
        parallel_config=DiffusionParallelConfig(data_parallel_size=1, **parallel),
        additional_config={},
        quantization_config=None,
        profiler_config=None,
        tf_model_config=SimpleNamespace(model_type="none"),
        is_moe=False,
        enforce_eager=True,
        diffusion_attention_config=None,
        kv_transfer_config=None,
    )


@contextlib.contextmanager
def cpu_platform(member: str) -> Iterator[None]:
    """A platform that serves a CPU: its layers take a registry member, its tables the host's."""
    platform = type(current_omni_platform)

    def choose(cls: Any, selected_backend: str | None, **_: Any) -> str:
        name = (selected_backend or member).upper()
        return DiffusionAttentionBackendEnum[name].get_path()

    platform.get_diffusion_attn_backend_cls = classmethod(choose)
    platform.get_diffusion_kv_block_tables_cls = classmethod(lambda cls: HostBlockTables)
    selector._cached_get_backend_cls.cache_clear()
    try:
        yield
    finally:
        del platform.get_diffusion_attn_backend_cls
        del platform.get_diffusion_kv_block_tables_cls
        selector._cached_get_backend_cls.cache_clear()


class Worker:
    """One rank: layers, specs, and the worker backend of vLLM-Omni around them."""

    def __init__(self, shape: Shape, member: str, *, layout: str | None = None, **parallel: Any):
        self.shape = shape
        self.config = run_config(shape, **parallel)
        self.vllm_config: Any = create_diffusion_vllm_config(CPU, self.config)
        self.vllm_config.cache_config.block_size = shape.block_size
        self.vllm_config.cache_config.kv_cache_layout = layout
        with cpu_platform(member), set_current_diffusion_config(self.config):
            self.layers = {
                name: omni_layer.Attention(
                    shape.num_heads,
                    shape.head_size,
                    causal=shape.causal,
                    softmax_scale=shape.head_size**-0.5,
                    num_kv_heads=shape.num_kv_heads,
                    prefix=name,
                    paged_kv_cache_role="primary",
                )
                for name in shape.names
            }
            self.backend = DiffusionKVModelRunnerBackend(
                vllm_config=self.vllm_config, od_config=self.config, device=CPU
            )
            self.specs = self.backend.register_kv_cache_layers(
                {
                    name: (layer, layer.get_kv_cache_spec(self.vllm_config))
                    for name, layer in self.layers.items()
                }
            )

    def allocate(self, kv_cache_config: Any, member: str = "TORCH_SDPA") -> None:
        with cpu_platform(member):
            self.backend.initialize_kv_cache(kv_cache_config)
        # the CPU kernel's instruction set, which vLLM's builder tells vLLM's own layers alone
        adapter = self.backend.get_paged_attention_adapter()
        for group in (group for groups in adapter.attn_groups for group in groups):
            for name in group.layer_names:
                adapter.layers[name].isa = group.get_metadata_builder(0).isa

    @contextlib.contextmanager
    def step(self, rows: Sequence[DiffusionPagedAttentionRow]) -> Iterator[Any]:
        """An active step of vLLM-Omni: forward context, prepared batch, activation."""
        adapter = self.backend.get_paged_attention_adapter()
        with (
            cpu_platform("TORCH_SDPA"),
            set_forward_context(self.vllm_config, self.config),
            adapter.activate(adapter.prepare_batch(rows)),
        ):
            yield adapter


def control_plane(
    worker: Worker, num_blocks: int, *, outermost: bool = False
) -> tuple[list[Any], Any, DiffusionKVCacheManager]:
    """vLLM-Omni's: worker configs, the scheduler's, and its manager."""
    page = sum(spec.page_size_bytes for spec in worker.specs.values())
    configs, scheduler = build_native_kv_cache_configs(
        worker.vllm_config,
        [worker.specs],
        [page * num_blocks],
        indexes_kv_by_block_stride=outermost,
    )
    size = worker.shape.block_size
    manager = DiffusionKVCacheManager(
        scheduler,
        max_model_len=worker.shape.max_model_len,
        scheduler_block_size=size,
        hash_block_size=size,
    )
    return configs, scheduler, manager


def request(name: str, sequence: int, prefix: int, target: int, tail: int = 0) -> Any:
    return DiffusionKVRequest(
        f"{name}-{sequence}",
        sequence_id=sequence,
        prefix_len=prefix,
        target_len=target,
        seq_len=prefix + target + tail,
    )


def rows_of(metadata: DiffusionKVMetadata, *, denoise: bool) -> list[DiffusionPagedAttentionRow]:
    """The rows of a request's first step, or of a later one."""
    out = []
    for s in metadata.sequences:
        start = s.prefix_len if denoise else s.cached_prefix_len
        seq_len = s.prefix_len + s.target_len if denoise else s.seq_len
        out.append(
            DiffusionPagedAttentionRow(
                request_id=metadata.request_id,
                query_len=seq_len - start,
                seq_len=seq_len,
                kv_start_pos=start,
                sequence_id=s.sequence_id,
            )
        )
    return out


def spec(shape: Shape) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=shape.block_size,
        num_kv_heads=shape.num_kv_heads,
        head_size=shape.head_size,
        dtype=shape.dtype,
        non_causal=not shape.causal,
    )


def tokens(rng: np.random.Generator, count: int, heads: int, size: int, dtype: Any) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal((count, heads, size)).astype(np.float32)).to(dtype)
