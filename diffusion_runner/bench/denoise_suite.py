"""Suite ``denoise``: whole pictures of the digits model, and steps of a scaled-down large one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from diffusion_runner.bench.harness import Call, Comparison, compare
from diffusion_runner.bench.options import Bench
from diffusion_runner.bench.scaled_model import ScaledModel
from diffusion_runner.errors import RunError
from diffusion_runner.model.text import digit_prompt
from diffusion_runner.run import Runner
from diffusion_runner.settings import RunSettings

SUITE = "denoise"
LAYOUT = "LBNHC"
REUSE, RECOMPUTE = "prefix reused", "recomputed at every step"
STEP_AGREEMENT = 1e-3
"""Largest difference of hidden states between engines and ways, float32, numbers near 1."""


def run(bench: Bench) -> Iterator[Comparison]:
    """The digits, then the scaled model."""
    yield _digits(bench)
    yield _scaled(bench, ScaledModel(num_layers=1 if bench.options.quick else 4))


def _digits(bench: Bench) -> Comparison:
    quick = bench.options.quick
    prompts = tuple(digit_prompt(digit) for digit in range(10))
    calls: dict[str, Call] = {}
    for name, engine in bench.engines.items():
        runner = Runner(engine)
        for label, reuse in ((REUSE, True), (RECOMPUTE, False)):
            settings = RunSettings(
                prompts=prompts, backend=name, steps=2 if quick else 25, prefix_reuse=reuse
            )
            calls[f"{name}, {label}"] = _Generate(runner, settings)
    base = next(iter(calls))
    return compare(
        SUITE,
        "10 digits in one batch, 2 rows each",
        calls,
        base=base,
        limits=bench.options.limits,
        details={"steps": 2 if quick else 25, "dtype": "float32"},
    )


class _Generate:
    def __init__(self, runner: Runner, settings: RunSettings) -> None:
        self._runner, self._settings = runner, settings

    def __call__(self) -> None:
        self._runner.generate(self._settings)


def _scaled(bench: Bench, model: ScaledModel) -> Comparison:
    calls: dict[str, Call] = {}
    reference: Any = None
    for name, engine in bench.engines.items():
        make = _steps_of(name)
        for label, reuse in ((REUSE, True), (RECOMPUTE, False)):
            call = make(engine, model, LAYOUT, reuse=reuse)
            states = np.asarray(engine.to_numpy(call()))[-model.target :]
            reference = states if reference is None else reference
            error = float(np.abs(states - reference).max())
            if not error <= STEP_AGREEMENT:
                raise RunError(
                    f"{name}, {label}: the hidden states differ by {error:.3g} from those of the "
                    f"first candidate, at most {STEP_AGREEMENT:g}; it was not timed"
                )
            calls[f"{name}, {label}"] = call
    base = next(iter(calls))
    found = compare(SUITE, _title(model), calls, base=base, limits=bench.options.limits)
    bound = model.speedup(model.operations(reuse=False), model.operations(reuse=True))
    speedups = {
        name: model.speedup(
            found.timing(f"{name}, {RECOMPUTE}").seconds.median,
            found.timing(f"{name}, {REUSE}").seconds.median,
        )
        for name in bench.engines
    }
    details = {
        "prefix": model.prefix,
        "target": model.target,
        "num_layers": model.num_layers,
        "hidden": model.hidden,
        "steps": model.steps,
        "speedup_of_a_run": speedups,
        "bound_by_operations": bound,
    }
    return Comparison(found.suite, found.case, found.base, found.timings, details)


def _title(model: ScaledModel) -> str:
    return (
        f"one step, {model.prefix} reusable of {model.seq_len} tokens, {model.num_layers} layers "
        f"of {model.hidden}"
    )


def _steps_of(engine: str) -> Any:
    if engine == "torch_cuda":
        from diffusion_runner.bench import torch_step

        return torch_step.make_step
    if engine == "jax_gpu":
        from diffusion_runner.bench import jax_step

        return jax_step.make_step
    raise RunError(
        f"denoise: the scaled model is written for torch_cuda and jax_gpu, got {engine!r}"
    )
