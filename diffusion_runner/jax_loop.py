"""The denoise loop in JAX: all steps and layers are one compiled program, the pool donated.

``torch_loop.py`` is the same loop, step by step. The program can be exported and loaded, so that
a worker traces nothing: :meth:`JaxLoop.export`, :meth:`JaxLoop.load`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from backends.jax_gpu.compiled import check_donation
from backends.jax_gpu.donation import run_donated
from backends.jax_gpu.export import ExportedProgram, export_program, load_program
from diffusion_runner.loop import KvCache, LoopResult, Wave
from diffusion_runner.model import schedule
from diffusion_runner.model.config import DigitsConfig
from diffusion_runner.model.jax_model import forward, load_params
from diffusion_runner.steps import StepInputs


class _Prepared(NamedTuple):
    """One kind of step, on the device; a pytree."""

    batch: Any
    token_ids: jax.Array
    is_image: jax.Array
    position_ids: jax.Array
    image_positions: jax.Array  #: [rows * image tokens] indices into the T packed tokens


def _program_name(rows_per_request: int) -> str:
    """What an exported loop is called: all that it fixes beside its arguments."""
    return f"denoise, {rows_per_request} rows for each request"


class JaxLoop:
    """Runs waves of requests; holds the weights on the device and the compiled programs."""

    def __init__(
        self, engine: Any, config: DigitsConfig, weights: Mapping[str, NDArray[np.float32]]
    ) -> None:
        self._engine = engine
        self._config = config
        self._params = load_params(weights)
        self._programs: dict[Any, Any] = {}
        self._loaded: list[ExportedProgram] = []

    @property
    def programs(self) -> tuple[Any, ...]:
        """The compiled programs, for :mod:`backends.jax_gpu.compiled`."""
        return tuple(self._programs.values())

    def run(self, cache: KvCache, wave: Wave) -> LoopResult:
        """Denoise one wave; the pool in ``cache`` is consumed and replaced.

        Raises:
            PoolError: the program would copy the pool, or did, since a view of it is alive.
        """
        plan = cache.pool.plan
        pool, arguments = self._arguments(cache, wave)
        program, compile_seconds = self._compile(wave.rows_per_request, pool, arguments)
        started = time.perf_counter()
        sample, pool = run_donated("the denoise loop", program, pool, *arguments)
        self._engine.synchronize(pool)
        cache.pool = pool.placed_as(plan)
        return LoopResult(
            patches=np.asarray(sample),
            seconds=time.perf_counter() - started,
            compile_seconds=compile_seconds,
            kernel=arguments[1].batch.kernel,
        )

    def export(
        self, cache: KvCache, wave: Wave, *, platforms: Sequence[str] | None = None
    ) -> bytes:
        """The program for waves of this shape, in all layouts; see :func:`export_program`.

        The weights are arguments and no part of it. Nothing is compiled or consumed.
        """
        pool, arguments = self._arguments(cache, wave)
        name = _program_name(wave.rows_per_request)
        denoise = partial(self._denoise, wave.rows_per_request)
        return export_program(name, denoise, pool, *arguments, platforms=platforms)

    def load(self, data: bytes) -> None:
        """Run waves of the shape of an exported program with it, instead of tracing one.

        Raises:
            PoolError: see :func:`load_program`.
        """
        self._loaded.append(load_program(data))

    def _arguments(self, cache: KvCache, wave: Wave) -> tuple[Any, tuple[Any, ...]]:
        """The pool and all else that :meth:`_denoise` takes."""
        first = self._prepare(cache, wave.first)
        later = first if wave.later is None else self._prepare(cache, wave.later)
        return (
            cache.pool.portable(),  # one program for all layouts
            (
                self._params,
                first,
                later,
                jnp.asarray(wave.noise),
                np.asarray(schedule.timesteps(wave.steps), dtype=np.float32),
                np.float32(wave.guidance),
            ),
        )

    def _compile(
        self, rows_per_request: int, pool: Any, arguments: tuple[Any, ...]
    ) -> tuple[Any, float]:
        """The program for these shapes, compiled ahead so that its time is seen apart."""
        leaves, structure = jax.tree.flatten((pool, *arguments))
        key = (rows_per_request, structure, tuple((x.shape, x.dtype) for x in leaves))
        started = time.perf_counter()
        if key not in self._programs:
            name = _program_name(rows_per_request)
            for program in self._loaded:
                if program.name == name and program.serves(pool, *arguments):
                    check_donation(program.compile(pool, *arguments), pool)
                    return program, time.perf_counter() - started
            jitted = jax.jit(partial(self._denoise, rows_per_request), donate_argnums=0)
            compiled = jitted.lower(pool, *arguments).compile()
            check_donation(compiled, pool)
            self._programs[key] = compiled
        return self._programs[key], time.perf_counter() - started

    def _denoise(
        self,
        rows_per_request: int,
        pool: Any,
        params: Any,
        first: _Prepared,
        later: _Prepared,
        noise: jax.Array,
        times: jax.Array,
        guidance: jax.Array,
    ) -> tuple[jax.Array, Any]:
        """All steps: the first apart, since its rows are longer, the others in one scan."""

        def step(
            prepared: _Prepared, sample: jax.Array, pool: Any, now: jax.Array, then: jax.Array
        ) -> tuple[jax.Array, Any]:
            requests, image_tokens, patch_dim = sample.shape
            rows = jnp.repeat(sample, rows_per_request, axis=0).reshape(-1, patch_dim)
            patches = jnp.zeros((len(prepared.token_ids), patch_dim), jnp.float32)
            patches = patches.at[prepared.image_positions].set(rows)
            velocity, pool = forward(
                params,
                self._config,
                prepared.token_ids,
                prepared.is_image,
                prepared.position_ids,
                patches,
                jnp.full(len(prepared.token_ids), now),
                partial(self._attend, prepared.batch),
                pool,
            )
            by_row = velocity[prepared.image_positions].reshape(
                requests, rows_per_request, image_tokens, patch_dim
            )
            guided = (
                by_row[:, 0]
                if rows_per_request == 1
                else schedule.guide(by_row[:, 1], by_row[:, 0], guidance)
            )
            return schedule.euler_step(sample, guided, now, then), pool

        sample, pool = step(first, noise, pool, times[0], times[1])

        def body(carry: tuple[jax.Array, Any], at: tuple[jax.Array, jax.Array]) -> Any:
            return step(later, *carry, *at), None

        (sample, pool), _ = jax.lax.scan(body, (sample, pool), (times[1:-1], times[2:]))
        return sample, pool

    def _attend(
        self,
        batch: Any,
        pool: Any,
        layer: jax.Array,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
    ) -> tuple[jax.Array, Any]:
        kv_dtype = jnp.dtype(pool.plan.cells[0].dtype)  # the layers are equal
        output, pool = self._engine.forward_paged(
            pool,
            layer,
            query.astype(kv_dtype),
            key.astype(kv_dtype),
            value.astype(kv_dtype),
            batch,
        )
        return output.astype(query.dtype), pool

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
            ).portable(),
            token_ids=jnp.asarray(tokens.token_ids),
            is_image=jnp.asarray(tokens.is_image),
            position_ids=jnp.asarray(tokens.position_ids),
            image_positions=jnp.asarray(tokens.image_token_positions()),
        )
