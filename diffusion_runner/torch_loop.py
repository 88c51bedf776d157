"""The denoise loop in torch. ``jax_loop.py`` is the same loop as one compiled program."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diffusion_runner.loop import KvCache, LoopResult, Wave
from diffusion_runner.model import schedule
from diffusion_runner.model.config import DigitsConfig
from diffusion_runner.model.torch_model import Params, forward, load_params
from diffusion_runner.steps import StepInputs

_KV_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, eq=False)
class _Prepared:
    """One kind of step, on the device."""

    batch: Any
    token_ids: Tensor
    is_image: Tensor
    position_ids: Tensor
    image_positions: Tensor  #: [rows * image tokens] indices into the T packed tokens


class TorchLoop:
    """Runs waves of requests; holds the weights on the device."""

    def __init__(
        self, engine: Any, config: DigitsConfig, weights: Mapping[str, NDArray[np.float32]]
    ) -> None:
        self._engine = engine
        self._config = config
        self._device = torch.device(engine.device)
        self._params: Params = load_params(weights, self._device)

    @torch.inference_mode()
    def run(self, cache: KvCache, wave: Wave) -> LoopResult:
        """Denoise one wave; the pool in ``cache`` is written in place."""
        started = time.perf_counter()
        config = self._config
        first = self._prepare(cache, wave.first)
        later = first if wave.later is None else self._prepare(cache, wave.later)
        times = schedule.timesteps(wave.steps)
        sample = torch.from_numpy(wave.noise).to(self._device)  # [requests, P, patch_dim]
        requests, image_tokens, patch_dim = sample.shape
        pool = cache.pool

        for step in range(wave.steps):
            prepared = first if step == 0 else later
            patches = torch.zeros(len(prepared.token_ids), patch_dim, device=self._device)
            patches[prepared.image_positions] = sample.repeat_interleave(
                wave.rows_per_request, dim=0
            ).reshape(-1, patch_dim)
            velocity, pool = forward(
                self._params,
                config,
                prepared.token_ids,
                prepared.is_image,
                prepared.position_ids,
                patches,
                torch.full_like(patches[:, 0], times[step]),
                partial(self._attend, prepared.batch),
                pool,
            )
            rows = velocity[prepared.image_positions].reshape(
                requests, wave.rows_per_request, image_tokens, patch_dim
            )
            guided = (
                rows[:, 0]
                if wave.rows_per_request == 1
                else schedule.guide(rows[:, 1], rows[:, 0], wave.guidance)
            )
            sample = schedule.euler_step(sample, guided, times[step], times[step + 1])
        self._engine.synchronize(pool)
        cache.pool = pool
        return LoopResult(
            patches=sample.cpu().numpy(),
            seconds=time.perf_counter() - started,
            compile_seconds=0.0,
            kernel=first.batch.kernel,
        )

    def _attend(
        self, batch: Any, pool: Any, layer: int, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Any]:
        kv_dtype = _KV_DTYPES[pool.resolved.layers[0].dtype.name]  # the layers are equal
        output, pool = self._engine.forward_paged(
            pool, layer, query.to(kv_dtype), key.to(kv_dtype), value.to(kv_dtype), batch
        )
        return output.to(query.dtype), pool

    def _prepare(self, cache: KvCache, step: StepInputs) -> _Prepared:
        tokens = step.tokens
        return _Prepared(
            batch=self._engine.prepare(
                cache.resolved,
                step.rows,
                cache.tables,
                visibility=cache.visibility,
                num_heads=self._config.num_heads,
                spans=step.spans,
                bucket=step.bucket,
            ),
            token_ids=torch.from_numpy(tokens.token_ids).to(self._device),
            is_image=torch.from_numpy(tokens.is_image).to(self._device),
            position_ids=torch.from_numpy(tokens.position_ids).to(self._device),
            image_positions=torch.from_numpy(tokens.image_token_positions()).to(self._device),
        )
