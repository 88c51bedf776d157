"""Strict Ulysses over two real ranks (gloo): heads divided, padded tokens never written.

vLLM-Omni's own all-to-all around its own layer, worker and adapter, and our backend inside.
"""

from __future__ import annotations

import multiprocessing
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from vllm_omni.diffusion.attention.parallel.ulysses import UlyssesParallelAttention
from vllm_omni.diffusion.forward_context import get_forward_context

from integrations.vllm_omni import install, remove
from tests import oracle
from tests.integrations.vllm_omni import peers, scenario
from tests.integrations.vllm_omni.scenario import Case
from tests.tolerances import assert_close

RANKS = 2
PREFIX, TARGET = 33, 20  # 53 tokens: one padded token on two ranks
CASE = Case(causal=True)


def serve(rank: int, backend: str, meeting: str, answers: Any) -> None:
    """One rank; answers ``None``, or what went wrong."""
    try:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS
        )
        run_rank(rank, backend)
        dist.barrier()
        answers.put((rank, None))
    except BaseException:
        answers.put((rank, traceback.format_exc()))


def run_rank(rank: int, backend: str) -> None:
    installed = install(backend)
    shape = CASE.shape
    worker = peers.Worker(shape, "TORCH_SDPA", layout=CASE.layout, ulysses_degree=RANKS)
    group = SimpleNamespace(
        ulysses_group=dist.group.WORLD,
        ulysses_world_size=RANKS,
        ulysses_rank=rank,
        ring_world_size=1,
    )
    for layer in worker.layers.values():
        layer.parallel_strategy = UlyssesParallelAttention(group, 2, 1, use_sync=False)
    assert [spec.num_kv_heads for spec in worker.specs.values()] == [1, 1], "heads are divided"
    configs, _, manager = peers.control_plane(worker, 9)
    worker.allocate(configs[0])
    metadata = manager.reserve_request("r", [peers.request("r", 0, PREFIX, TARGET)])
    assert metadata is not None
    worker.backend.install_diffusion_kv_metadata(metadata)
    request = scenario.Request(worker, metadata, manager, {}, {})
    rng = np.random.default_rng(0)  # the same on both ranks
    keys: dict[str, np.ndarray] = {}
    values: dict[str, np.ndarray] = {}
    for denoise in (False, True):
        (row,) = peers.rows_of(metadata, denoise=denoise)
        padding = -row.query_len % RANKS
        mask = oracle.visible(
            row.query_len, row.seq_len, kv_start_pos=row.kv_start_pos, causal=CASE.causal
        )
        with worker.step([row]):
            get_forward_context().sp_padding_size = padding
            for name, layer in worker.layers.items():
                whole = [
                    peers.tokens(rng, row.query_len, heads, shape.head_size, torch.float32)
                    for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
                ]
                for store, part in ((keys, whole[1]), (values, whole[2])):
                    store.setdefault(name, np.zeros((row.seq_len, *part.shape[1:]), np.float32))
                    store[name][row.kv_start_pos :] = part.numpy()
                # padded tokens hold what must not be read, nor written
                shards = [
                    torch.nn.functional.pad(x, (0, 0, 0, 0, 0, padding), value=torch.nan).chunk(
                        RANKS
                    )[rank][None]
                    for x in whole
                ]
                out = layer(*shards)[0]
                expected, _ = oracle.dense_attention(
                    whole[0].numpy(), keys[name], values[name], mask
                )
                expected = np.pad(expected, ((0, padding), (0, 0), (0, 0)))
                mine = np.split(expected, RANKS)[rank]
                assert_close(out.numpy(), mine, "attention", "float32", f"rank {rank} {name}")
    own = slice(rank, rank + 1)  # the KV head of this rank
    for name in worker.layers:
        request.keys[name, 0] = keys[name][:, own]
        request.values[name, 0] = values[name][:, own]
    our = scenario.worker_of(request, backend)
    if backend == "torch_cuda":
        scenario.check_cells(request, CASE, scenario.bound_cells(request))
    assert not np.isnan(np.frombuffer(our.engine.pool_bytes(our.pool), np.float32)).any()
    assert our.resolved.layers[0].num_kv_heads == 1
    remove(installed)


@pytest.mark.parametrize("backend", ["torch_cuda", "jax_gpu"])
def test_two_ranks_share_the_heads(backend: str, tmp_path: Path) -> None:
    # not from this process, where JAX may have started threads; imports are paid once
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    answers = context.Queue()
    ranks = [
        context.Process(target=serve, args=(rank, backend, str(tmp_path / "meet"), answers))
        for rank in range(RANKS)
    ]
    for each in ranks:
        each.start()
    replies = dict(answers.get(timeout=240) for _ in ranks)
    for each in ranks:
        each.join(timeout=30)
    assert replies == {0: None, 1: None}, "\n".join(str(x) for x in replies.values() if x)
