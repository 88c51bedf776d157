"""What a run was asked to do, checked before anything is loaded or written."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from diffusion_runner.errors import RunError
from diffusion_runner.model.schedule import DEFAULT_GUIDANCE, DEFAULT_STEPS
from layout_core import DTYPES, DType, KVCacheLayout

DEFAULT_SEED = 0
DEFAULT_BLOCK_SIZE = 8
DEFAULT_BATCH_SIZE = 10
COMPILING_BACKEND = "jax_gpu"
KV_DTYPES = ("float32", "float16", "bfloat16")
DEFAULT_KV_DTYPE = DTYPES["float32"]

PICTURE_TOLERANCE = 1e-3
"""Largest difference of a pixel in [0, 1] between engines and layouts in float32.

The engines sum in different orders; over 25 steps this stays near 1e-5. A wrong stride or span
moves pixels by 0.1 and more, so 1e-3 parts the two by two orders of magnitude on both sides.
"""


@dataclass(frozen=True, slots=True)
class RunSettings:
    """One run.

    Args:
        prompts: one request for each prompt and repetition; not empty.
        count: pictures of each prompt; >= 1.
        backend: the engine's flag, see ``backends.load``.
        device: ``"cpu"``, ``"cuda"`` or ``None`` for the engine's own choice.
        layout: the physical layout that the run pins; ``None`` leaves it to the backend: LBNHC,
            or BLNHC where the backend indexes K/V by the block stride.
        steps: Euler steps; >= 1.
        guidance: classifier-free guidance scale; finite and >= 0. At most 1 needs one row for a
            request, more needs two.
        seed: of the initial noise; >= 0.
        block_size: tokens of a block; >= 1.
        batch_size: requests that run together; >= 1.
        prefix_reuse: read the prompt's K/V from its pages after the first step. ``False``
            recomputes it at every step (the pictures stay the same).
        prefix_caching: share full blocks of equal prompts between requests.
        kv_dtype: element type of the pool.
        pool_blocks: blocks of the pool, the null block included; ``None`` sizes it to the batch.
        compilation_cache: folder of JAX's persistent compilation cache, for a backend that
            compiles its loop; ``None`` leaves JAX as it is.
    """

    prompts: tuple[str, ...]
    count: int = 1
    backend: str = "torch_cuda"
    device: str | None = None
    layout: KVCacheLayout | None = None
    steps: int = DEFAULT_STEPS
    guidance: float = DEFAULT_GUIDANCE
    seed: int = DEFAULT_SEED
    block_size: int = DEFAULT_BLOCK_SIZE
    batch_size: int = DEFAULT_BATCH_SIZE
    prefix_reuse: bool = True
    prefix_caching: bool = True
    kv_dtype: DType = DEFAULT_KV_DTYPE
    pool_blocks: int | None = None
    compilation_cache: Path | None = None

    def __post_init__(self) -> None:
        if not self.prompts:
            raise RunError("prompts: expected at least one prompt, got none")
        for name, least in (
            ("count", 1),
            ("steps", 1),
            ("seed", 0),
            ("block_size", 1),
            ("batch_size", 1),
        ):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise RunError(f"{name}: expected an int >= {least}, got {value!r}")
        if not math.isfinite(self.guidance) or self.guidance < 0:
            raise RunError(f"guidance: expected a finite number >= 0, got {self.guidance}")
        if self.kv_dtype.name not in KV_DTYPES:
            raise RunError(f"kv_dtype: expected one of {', '.join(KV_DTYPES)}, got {self.kv_dtype}")
        if self.pool_blocks is not None and self.pool_blocks < 2:
            raise RunError(
                f"pool_blocks: expected >= 2 (block 0 is the null block), got {self.pool_blocks}"
            )
        if self.compilation_cache is not None and self.backend != COMPILING_BACKEND:
            raise RunError(
                f"compilation_cache: backend {self.backend!r} compiles no loop; expected "
                f"{COMPILING_BACKEND!r}"
            )

    @property
    def num_images(self) -> int:
        return len(self.prompts) * self.count
