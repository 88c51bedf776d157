"""From a backend's demand to pictures: a control plane here, two workers in other processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

import backends
import integrations.vllm as ours
from block_manager import DiffusionKVCacheManager, DiffusionKVMetadata, DiffusionKVRequest
from diffusion_runner.model.reference import generate_dense
from diffusion_runner.model.weights import load_weights
from diffusion_runner.settings import PICTURE_TOLERANCE
from layout_core import (
    AdoptionError,
    FullAttentionSpec,
    LayoutConflictError,
    block_stride_demand,
    collect_replies,
    resolve_layout,
    single_group_config,
)
from tests.integrations.vllm.real import VllmLayout, contents, copy_of
from tests.integrations.vllm.workers import (
    BLOCK_SIZE,
    GUIDANCE,
    PROMPTS,
    RANKS,
    SEED,
    STEPS,
    Drawn,
    Job,
    Report,
    draw,
    prompts_of,
    work,
)

BLOCKS = 64
SECONDS = 300


@contextmanager
def workers(configs: list[Any]) -> Iterator[list[Connection]]:
    """A process for each config, and the control plane's ends of their pipes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.integrations.vllm.workers"])  # vLLM is slow to import
    left, right = context.Pipe()
    ends, processes = [], []
    for rank, config in enumerate(configs):
        end, theirs = context.Pipe()
        process = context.Process(
            target=work, args=(rank, config, theirs, (left, right)[rank]), daemon=True
        )
        process.start()
        theirs.close()  # so that a worker that dies is an end of file here
        ends.append(end)
        processes.append(process)
    left.close()
    right.close()
    try:
        yield ends
        for process in processes:
            process.join(SECONDS)
            assert process.exitcode == 0
    finally:
        for process in processes:
            if process.is_alive():
                process.terminate()
            process.join()


def receive(end: Connection) -> Any:
    """The next message; a silent worker is an error, not a wait without end."""
    assert end.poll(SECONDS), "a worker did not answer"
    return end.recv()


def sized(config: Any, reports: list[Report]) -> tuple[list[Any], Any]:
    """The control plane: what the backends demand, one layout, all configs."""
    demand = block_stride_demand([report.backend for report in reports])
    memory = BLOCKS * sum(spec.page_size_bytes for spec in reports[0].specs.values())
    return ours.build_native_kv_cache_configs(
        config,
        [report.specs for report in reports],
        [memory] * RANKS,
        indexes_kv_by_block_stride=demand,
    )


def admitted(scheduler_config: Any, max_model_len: int) -> tuple[DiffusionKVMetadata, ...]:
    """All requests, admitted by the scheduler's block manager."""
    model, _ = load_weights()
    manager = DiffusionKVCacheManager(
        ours.from_vllm(scheduler_config),
        max_model_len=max_model_len,
        scheduler_block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
    )
    image = model.num_image_tokens
    reserved = []
    for index, rows in enumerate(prompts_of(model)):
        metadata = manager.reserve_request(
            f"picture-{index}",
            [
                DiffusionKVRequest(
                    f"picture-{index}/{sequence}",
                    sequence_id=sequence,
                    prefix_len=len(prompt),
                    target_len=image,
                    seq_len=len(prompt) + image,
                    cache_token_ids=prompt,
                    full_spans=((len(prompt), len(prompt) + image),),
                )
                for sequence, prompt in enumerate(rows)
            ],
        )
        assert metadata is not None
        reserved.append(metadata)
    return tuple(reserved)


def test_pictures_of_two_ranks_under_a_block_outermost_layout(real_config: Any) -> None:
    control = copy_of(real_config)
    with workers([copy_of(real_config) for _ in range(RANKS)]) as ends:
        reports: list[Report] = [receive(end) for end in ends]
        configs, scheduler = sized(control, reports)
        assert control.cache_config.get_resolved_kv_cache_layout() is VllmLayout.BLNHC
        for end, config in zip(ends, configs, strict=True):
            end.send(config)
        replies = [receive(end) for end in ends]
        collect_replies(replies, RANKS, "BLNHC")
        length = control.model_config.max_model_len
        job = Job(scheduler, length, admitted(scheduler, length))
        for end in ends:
            end.send(job)
        drawn: list[Drawn] = [receive(end) for end in ends]

    model, _ = load_weights()
    assert [worker.rank for worker in drawn] == [0, 1]
    np.testing.assert_array_equal(drawn[0].pictures, drawn[1].pictures)
    dense = generate_dense(list(PROMPTS), SEED, STEPS, GUIDANCE)
    assert drawn[0].pictures.shape == dense.shape
    assert float(np.abs(drawn[0].pictures - dense).max()) <= PICTURE_TOLERANCE
    assert dense.std() > 0.1  # a picture, not a grey field

    page = BLOCK_SIZE * 2 * model.head_size  # elements of one head's page
    tokens = sum(sequence.seq_len for metadata in job.requests for sequence in metadata.sequences)
    for worker in drawn:
        assert worker.allocations == 1
        # what vLLM's layers hold: a block of all layers is one run, and every token was written
        assert {stride[0] for stride in worker.strides.values()} == {model.num_layers * page}
        assert list(worker.cells_written.values()) == [tokens] * model.num_layers

    one = one_process(job)
    assert float(np.abs(drawn[0].pictures - one).max()) <= PICTURE_TOLERANCE


def one_process(job: Job) -> np.ndarray:
    """The same requests in this process alone: all heads, no vLLM, another layout."""
    model, _ = load_weights()
    spec = FullAttentionSpec(
        BLOCK_SIZE,
        num_kv_heads=model.num_kv_heads,
        head_size=model.head_size,
        dtype="float32",  # type: ignore[arg-type]
    )
    names = [f"layers.{index}.attention" for index in range(model.num_layers)]
    config = single_group_config(spec, BLOCKS, names, "LBHNC")
    engine = backends.load("torch_cuda", device="cpu")
    pool = engine.allocate(resolve_layout(config))
    return draw(engine, pool, config, job.max_model_len, job.requests)


def test_a_worker_with_another_layout_raises_before_it_allocates(real_config: Any) -> None:
    stray = copy_of(real_config)
    stray.cache_config.kv_cache_layout = "LBNHC"
    control = copy_of(real_config)
    with workers([copy_of(real_config), stray]) as ends:
        reports: list[Report] = [receive(end) for end in ends]
        assert contents(reports[0].specs) == contents(reports[1].specs)
        configs, _ = sized(control, reports)
        for end, config in zip(ends, configs, strict=True):
            end.send(config)
        replies = [receive(end) for end in ends]
        with pytest.raises(AdoptionError, match=r"1 of 2 did not adopt layout BLNHC: rank 1: Lay"):
            collect_replies(replies, RANKS, "BLNHC")
        assert replies[1].error is not None
        assert LayoutConflictError.__name__ in replies[1].error
        assert "'LBNHC' disagrees with the layout" in replies[1].error
        assert receive(ends[1]) == 0  # pools that it had allocated
        ends[0].send(None)  # the other has adopted, and is told that there is nothing to draw
