"""Runners with the real weights, one for each engine, shared by the module's tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import backends
from diffusion_runner.run import Runner

ENGINES = ("torch_cuda", "jax_gpu")


@pytest.fixture(scope="session")
def runner_of() -> Callable[[str], Runner]:
    made: dict[str, Runner] = {}

    def get(name: str) -> Runner:
        if name not in made:
            made[name] = Runner(backends.load(name, device="cpu"))
        return made[name]

    return get
