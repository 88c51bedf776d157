"""A run over three processes: a control plane, and two ranks that hold half of the heads each.

The digits model draws. Its attention layers are vLLM's own, bound to the pool of our torch
engine; the ranks exchange their halves of each layer's output, as tensor parallelism does.
What crosses the pipes are vLLM's own objects and the block manager's, pickled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.worker.gpu import attn_utils

import backends
import integrations.vllm as ours
from backends.torch_cuda import allocator
from block_manager import DiffusionKVMetadata, RowTable
from diffusion_runner.loop import KvCache, Wave
from diffusion_runner.model.noise import initial_noise
from diffusion_runner.model.patches import patchify, to_pixels, unpatchify
from diffusion_runner.model.text import encode_prompt
from diffusion_runner.model.weights import load_weights
from diffusion_runner.steps import first_step, later_step, rows_of
from diffusion_runner.torch_loop import TorchLoop
from layout_core import LayoutError, Visibility, WorkerReply
from tests.integrations.vllm.check_kv_cache import call

RANKS = 2
BLOCK_SIZE = 8
STEPS = 4
GUIDANCE = 2.0
SEED = 3
PROMPTS = ("a handwritten seven", "the digit three 3", "7")


class BlockStrideBackend:
    """Stands for a backend whose kernels index K/V by the block stride."""

    @staticmethod
    def indexes_kv_by_block_stride() -> bool:
        return True


@dataclass(frozen=True)
class Report:
    """What a worker says before it knows of any layout: its layers, and its backend."""

    rank: int
    specs: dict[str, Any]  #: vLLM's
    backend: type


@dataclass(frozen=True)
class Drawn:
    """What a worker drew, and where its K/V lies."""

    rank: int
    pictures: NDArray[np.float32]
    allocations: int
    strides: dict[str, tuple[int, ...]]  #: of the views that vLLM's layers hold, in elements
    cells_written: dict[str, int]  #: of each of these views, cells that are not zero


@dataclass(frozen=True)
class Job:
    """What the control plane sends once every worker has adopted."""

    scheduler_config: Any  #: vLLM's
    max_model_len: int
    requests: tuple[DiffusionKVMetadata, ...]


def prompts_of(config: Any) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """For each request, the tokens of its two rows: the prompt's, and the empty prompt's."""
    empty = tuple(encode_prompt("", config))
    return [(tuple(encode_prompt(prompt, config)), empty) for prompt in PROMPTS]


def draw(
    engine: Any,
    pool: Any,
    scheduler_config: Any,
    max_model_len: int,
    requests: Sequence[DiffusionKVMetadata],
) -> NDArray[np.float32]:
    """The pictures of all requests, as one wave."""
    config, weights = load_weights()
    tables = RowTable(scheduler_config, max_model_len=max_model_len)
    rows: list[Any] = []
    for metadata, prompts in zip(requests, prompts_of(config), strict=True):
        tables.install(metadata)
        rows.extend(rows_of(metadata, prompts))
    wave = Wave(
        first=first_step(rows, config, BLOCK_SIZE),
        later=later_step(rows, config, BLOCK_SIZE),
        noise=patchify(initial_noise(SEED, len(PROMPTS)), config),
        rows_per_request=2,
        steps=STEPS,
        guidance=GUIDANCE,
    )
    cache = KvCache(pool.resolved, pool, tables, Visibility(causal=True))
    result = TorchLoop(engine, config, weights).run(cache, wave)
    return to_pixels(unpatchify(result.patches, config))


class HalfOfTheHeads:
    """An engine as a model with all heads sees it, on a rank that holds half of them."""

    name = "torch_cuda"

    def __init__(self, engine: Any, rank: int, other: Connection) -> None:
        self._engine, self._rank, self._other = engine, rank, other

    @property
    def device(self) -> str:
        return str(self._engine.device)

    def prepare(self, *args: Any, num_heads: int, **options: Any) -> Any:
        return self._engine.prepare(*args, num_heads=num_heads // RANKS, **options)

    def forward_paged(
        self, pool: Any, layer: int, query: Any, key: Any, value: Any, batch: Any
    ) -> tuple[Any, Any]:
        own = (self._mine(array) for array in (query, key, value))
        output, pool = self._engine.forward_paged(pool, layer, *own, batch)
        halves = [output, self._exchange(output)]
        return torch.cat(halves if self._rank == 0 else halves[::-1], dim=1), pool

    def synchronize(self, pool: Any) -> None:
        self._engine.synchronize(pool)

    def _mine(self, array: torch.Tensor) -> torch.Tensor:
        return array.chunk(RANKS, dim=1)[self._rank].contiguous()

    def _exchange(self, output: torch.Tensor) -> torch.Tensor:
        data = output.numpy().tobytes()
        if self._rank == 0:  # one speaks first, so that full pipes cannot block both
            self._other.send_bytes(data)
        got = self._other.recv_bytes()
        if self._rank != 0:
            self._other.send_bytes(data)
        return torch.frombuffer(bytearray(got), dtype=output.dtype).view_as(output)


def work(rank: int, vllm_config: Any, control: Connection, other: Connection) -> None:
    """A worker: report, adopt, allocate, draw. A refusal is sent and ends it."""
    torch.set_num_threads(1)
    allocations = _count_allocations()
    layers = _attention_layers(vllm_config)
    control.send(Report(rank, attn_utils.get_kv_cache_spec(vllm_config), BlockStrideBackend))
    cache = control.recv()
    try:
        layout = ours.adopt_kv_cache_layout(vllm_config, cache)
        ours.assert_backend_layout_supported(vllm_config, BlockStrideBackend)
    except LayoutError as error:
        control.send(WorkerReply(rank, None, f"{type(error).__name__}: {error}"))
        control.send(len(allocations))
        return
    control.send(WorkerReply(rank, layout.name))
    job: Job | None = control.recv()
    if job is None:
        return
    made, _ = call(ours.init_kv_cache, vllm_config, layers, cache, [BLOCK_SIZE])
    engine = HalfOfTheHeads(backends.load("torch_cuda", device="cpu"), rank, other)
    pictures = draw(engine, made.pool, job.scheduler_config, job.max_model_len, job.requests)  # type: ignore[attr-defined]
    views = {name: layer.kv_cache for name, layer in layers.items()}
    control.send(
        Drawn(
            rank,
            pictures,
            len(allocations),
            {name: view.stride() for name, view in views.items()},
            {name: int((view != 0).any(-1).sum()) for name, view in views.items()},
        )
    )


def _attention_layers(vllm_config: Any) -> dict[str, Any]:
    """vLLM's own layers with this rank's heads, registered in its config."""
    model, _ = load_weights()
    with set_current_vllm_config(vllm_config):
        for index in range(model.num_layers):
            Attention(
                model.num_heads // RANKS,
                model.head_size,
                model.head_size**-0.5,
                num_kv_heads=model.num_kv_heads // RANKS,
                cache_config=vllm_config.cache_config,
                prefix=f"layers.{index}.attention",
            )
    layers: dict[str, Any] = vllm_config.compilation_config.static_forward_context
    return layers


def _count_allocations() -> list[int]:
    """Sizes of the pools that this process allocates from now on."""
    sizes: list[int] = []
    real = allocator.allocate

    def counting(resolved: Any, device: Any) -> Any:
        sizes.append(resolved.size_bytes)
        return real(resolved, device)

    allocator.allocate = counting
    return sizes
