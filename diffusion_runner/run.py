"""A run from prompts to pictures: admit, denoise in waves, publish, free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

import backends
from block_manager import DiffusionKVCacheManager, DiffusionKVRequest, RowTable, cfg_rows
from diffusion_runner.cache import CachePlan, blocks_of, plan_cache
from diffusion_runner.errors import RunError
from diffusion_runner.loop import KvCache, Wave, make_loop
from diffusion_runner.model.noise import initial_noise
from diffusion_runner.model.patches import patchify, to_pixels, unpatchify
from diffusion_runner.model.text import encode_prompt
from diffusion_runner.model.weights import load_weights
from diffusion_runner.pictures import save_grid
from diffusion_runner.settings import RunSettings
from diffusion_runner.steps import CfgRow, first_step, full_step, later_step, rows_of
from layout_core import KVCacheLayout, Visibility, check_backend_available

# the prompt is causal, and the image is a full span on top of it
VISIBILITY = Visibility(causal=True)
EMPTY_PROMPT = ""


@dataclass(frozen=True, eq=False)
class RunResult:
    """Pictures and what they took.

    ``images`` is ``[count * prompts, height, width]`` in [0, 1]: all prompts, then all prompts
    again for the next repetition.
    """

    settings: RunSettings
    layout: KVCacheLayout  #: as resolved
    images: NDArray[np.float32]
    device: str
    kernel: str
    seconds: float  #: denoising, compilation apart
    compile_seconds: float
    pool_bytes: int
    num_blocks: int
    rows_per_request: int
    query_tokens: int  #: computed over all steps
    query_tokens_without_reuse: int
    prefix_tokens: int  #: prompt tokens of all rows
    prefix_hit_tokens: int  #: of which pages of earlier requests held this many


def progress_bar(console: Console) -> Progress:
    """A bar that vanishes when done; it shows nothing where output is no terminal."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


class Runner:
    """An engine with the digits model loaded; runs as many settings as one likes."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._attention = engine.attention_backend()
        self._config, weights = load_weights()
        check_backend_available(  # before the model is built
            self._attention, engine.device.partition(":")[0], [self._config.head_size]
        )
        self._loop = make_loop(engine, self._config, weights)

    def generate(self, settings: RunSettings, *, progress: Progress | None = None) -> RunResult:
        """Draw all pictures of a run.

        Raises:
            RunError: a prompt over the model's limit, or a pool too small for one request.
            LayoutError: what the layout core refuses.
        """
        config = self._config
        # guidance of at most 1 needs no empty prompt beside the real one
        per_request = cfg_rows(settings.guidance)
        empty = tuple(encode_prompt(EMPTY_PROMPT, config))
        requests = [
            (tuple(encode_prompt(prompt, config)), empty)[:per_request]
            for _ in range(settings.count)
            for prompt in settings.prompts
        ]
        plan = self._plan(settings, requests)
        manager = DiffusionKVCacheManager(
            plan.scheduler_config,
            max_model_len=plan.max_seq_len,
            scheduler_block_size=settings.block_size,
            hash_block_size=settings.block_size,
            enable_prefix_caching=settings.prefix_caching and settings.prefix_reuse,
        )
        tables = RowTable(plan.scheduler_config, max_model_len=plan.max_seq_len)
        cache = KvCache(plan.resolved, self._engine.allocate(plan.resolved), tables, VISIBILITY)
        noise = patchify(initial_noise(settings.seed, settings.num_images), config)

        task = None if progress is None else progress.add_task("drawing", total=len(requests))
        images: list[NDArray[np.float32]] = []
        seconds = compile_seconds = 0.0
        computed = without_reuse = prefix_tokens = hit_tokens = 0
        kernel = ""
        start = 0
        while start < len(requests):
            rows = self._admit(manager, tables, requests, start, settings)
            admitted = len(rows) // per_request
            stop = start + admitted
            full = sum(row.seq_len(config) for row in rows)
            wave = Wave(
                first=(first_step if settings.prefix_reuse else full_step)(
                    rows, config, settings.block_size
                ),
                later=(
                    later_step(rows, config, settings.block_size) if settings.prefix_reuse else None
                ),
                noise=noise[start:stop],
                rows_per_request=per_request,
                steps=settings.steps,
                guidance=settings.guidance,
            )
            result = self._loop.run(cache, wave)
            finished = [_request_id(index) for index in range(start, stop)]
            tables.remove(finished)
            for request_id in finished:
                manager.publish_request(request_id)  # its prompt can be shared from now on
                manager.free_request(request_id)
            images.append(unpatchify(result.patches, config))
            seconds += result.seconds
            compile_seconds += result.compile_seconds
            computed += wave.num_query_tokens
            without_reuse += full * settings.steps
            prefix_tokens += sum(len(row.prompt_tokens) for row in rows)
            hit_tokens += sum(row.cached_prefix_len for row in rows)
            kernel = result.kernel
            if progress is not None and task is not None:
                progress.advance(task, admitted)
            start = stop
        return RunResult(
            settings=settings,
            layout=plan.resolved.layout,
            images=to_pixels(np.concatenate(images)),
            device=self._engine.device,
            kernel=kernel,
            seconds=seconds,
            compile_seconds=compile_seconds,
            pool_bytes=plan.resolved.size_bytes,
            num_blocks=plan.resolved.num_blocks,
            rows_per_request=per_request,
            query_tokens=computed,
            query_tokens_without_reuse=without_reuse,
            prefix_tokens=prefix_tokens,
            prefix_hit_tokens=hit_tokens,
        )

    def _plan(
        self, settings: RunSettings, requests: Sequence[tuple[tuple[int, ...], ...]]
    ) -> CachePlan:
        """A pool for the largest wave, or of the size that was asked for."""
        image = self._config.num_image_tokens
        needs = [
            sum(blocks_of(len(prompt) + image, settings.block_size) for prompt in rows)
            for rows in requests
        ]
        size = settings.batch_size
        largest_wave = max(sum(needs[i : i + size]) for i in range(0, len(needs), size))
        return plan_cache(
            self._config,
            attention_backend=self._attention,
            layout=settings.layout,
            block_size=settings.block_size,
            kv_dtype=settings.kv_dtype,
            max_seq_len=max(len(prompt) for rows in requests for prompt in rows) + image,
            num_blocks=settings.pool_blocks or largest_wave + 1,
            largest_request_blocks=max(needs),
        )

    def _admit(
        self,
        manager: DiffusionKVCacheManager,
        tables: RowTable,
        requests: Sequence[tuple[tuple[int, ...], ...]],
        start: int,
        settings: RunSettings,
    ) -> list[CfgRow]:
        """Reserve and install the next requests, as many as fit and at most a batch."""
        image = self._config.num_image_tokens
        rows: list[CfgRow] = []
        for index in range(start, min(start + settings.batch_size, len(requests))):
            prompts = requests[index]
            metadata = manager.reserve_request(
                _request_id(index),
                [
                    DiffusionKVRequest(
                        f"{_request_id(index)}/{sequence}",
                        sequence_id=sequence,
                        prefix_len=len(prompt),
                        target_len=image,
                        seq_len=len(prompt) + image,
                        cache_token_ids=prompt,
                        full_spans=((len(prompt), len(prompt) + image),),
                    )
                    for sequence, prompt in enumerate(prompts)
                ],
            )
            if metadata is None:  # not now: the pool is full until this wave is freed
                break
            tables.install(metadata)
            rows.extend(rows_of(metadata, prompts))
        if not rows:
            raise RunError("pool_blocks: an idle pool refused a request that it was sized for")
        return rows


def _request_id(index: int) -> str:
    return f"picture-{index}"


def generate(settings: RunSettings, *, console: Console) -> RunResult:
    """Load the engine of ``settings`` and draw."""
    engine = backends.load(settings.backend, device=settings.device)
    if settings.compilation_cache is not None:
        _use_compilation_cache(settings.compilation_cache)
    runner = Runner(engine)
    with progress_bar(console) as progress:
        return runner.generate(settings, progress=progress)


def _use_compilation_cache(folder: Path) -> None:
    from backends.jax_gpu.caching import use_compilation_cache

    try:
        use_compilation_cache(folder)
    except OSError as error:
        raise RunError(f"compilation_cache: cannot make {folder}: {error.strerror}") from error


def save_pictures(result: RunResult, path: Path) -> None:
    """A grid with one line for each prompt."""
    settings = result.settings
    by_prompt = [result.images[i :: len(settings.prompts)] for i in range(len(settings.prompts))]
    save_grid(
        path,
        by_prompt,
        [repr(prompt) if prompt else "(empty prompt)" for prompt in settings.prompts],
        title=f"{settings.backend}, {result.layout.name}, kernel {result.kernel}",
    )
