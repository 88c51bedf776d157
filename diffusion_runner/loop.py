"""What a denoise loop gets and gives, whichever framework runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from diffusion_runner.model.config import DigitsConfig
from diffusion_runner.steps import StepInputs
from layout_core import BlockTables, ResolvedLayout, Visibility


@dataclass(eq=False)
class KvCache:
    """A worker's paged cache: the plan, the pool that executes it and who owns which block."""

    resolved: ResolvedLayout
    pool: Any  #: the engine's own; JAX replaces it at every write
    tables: BlockTables
    visibility: Visibility


@dataclass(frozen=True, eq=False)
class Wave:
    """Requests that are denoised together.

    ``noise`` is ``[requests, image tokens, patch_dim]`` float32. Rows are request after
    request; with two rows each, the prompt comes first and the empty prompt second.
    """

    first: StepInputs
    later: StepInputs | None  #: ``None``: every step is like the first (no prefix reuse)
    noise: NDArray[np.float32]
    rows_per_request: int
    steps: int
    guidance: float

    @property
    def num_query_tokens(self) -> int:
        """Query tokens computed over all steps."""
        later = self.first if self.later is None else self.later
        return self.first.num_query_tokens + (self.steps - 1) * later.num_query_tokens


@dataclass(frozen=True, eq=False)
class LoopResult:
    """Denoised patches ``[requests, image tokens, patch_dim]`` and what it took."""

    patches: NDArray[np.float32]
    seconds: float  #: of the loop, compilation apart
    compile_seconds: float
    kernel: str


class Loop(Protocol):
    """A denoise loop bound to an engine and to the model's weights."""

    def run(self, cache: KvCache, wave: Wave) -> LoopResult: ...


def make_loop(
    engine: Any, config: DigitsConfig, weights: Mapping[str, NDArray[np.float32]]
) -> Loop:
    """The loop for an engine's framework; only that framework is imported."""
    makers: dict[str, Callable[[], Loop]] = {
        "torch_cuda": lambda: _torch_loop(engine, config, weights),
        "jax_gpu": lambda: _jax_loop(engine, config, weights),
    }
    if engine.name not in makers:
        from diffusion_runner.errors import RunError

        raise RunError(
            f"backend: the digits runner has a model for {', '.join(makers)}, "
            f"and none for {engine.name!r}"
        )
    return makers[engine.name]()


def _torch_loop(
    engine: Any, config: DigitsConfig, weights: Mapping[str, NDArray[np.float32]]
) -> Loop:
    from diffusion_runner.torch_loop import TorchLoop

    return TorchLoop(engine, config, weights)


def _jax_loop(
    engine: Any, config: DigitsConfig, weights: Mapping[str, NDArray[np.float32]]
) -> Loop:
    from diffusion_runner.jax_loop import JaxLoop

    return JaxLoop(engine, config, weights)
