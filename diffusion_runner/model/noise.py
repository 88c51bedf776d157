"""The starting noise. NumPy makes it for both engines, so both start from the same numbers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

DEFAULT_IMAGE_SIZE = 8


def initial_noise(
    seed: int, count: int, image_size: int = DEFAULT_IMAGE_SIZE
) -> NDArray[np.float32]:
    """Standard normal noise `[count, image_size, image_size]`.

    Image `i` depends on `seed` and `i` alone, so asking for more images changes none of the
    earlier ones.
    """
    if seed < 0:
        raise ValueError(f"seed must not be negative, got {seed}")
    if count < 0:
        raise ValueError(f"count must not be negative, got {count}")
    noise = np.empty((count, image_size, image_size), dtype=np.float32)
    for index in range(count):
        generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, index])))
        noise[index] = generator.standard_normal((image_size, image_size), dtype=np.float32)
    return noise
