"""Images to patches and back, and pixels to the model's range and back (NumPy)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from diffusion_runner.model.config import DigitsConfig

Array = NDArray[np.float32]


def patchify(images: Array, config: DigitsConfig) -> Array:
    """`[R, image_size, image_size]` to `[R, num_image_tokens, patch_dim]`.

    Patches go row by row over the image; the pixels of a patch go row by row too.
    """
    size, patch = config.image_size, config.patch_size
    if images.ndim != 3 or images.shape[1:] != (size, size):
        raise ValueError(f"images must be [R, {size}, {size}], got {list(images.shape)}")
    side = size // patch
    split = images.reshape(-1, side, patch, side, patch)
    return np.ascontiguousarray(
        split.transpose(0, 1, 3, 2, 4).reshape(-1, config.num_image_tokens, config.patch_dim)
    )


def unpatchify(patches: Array, config: DigitsConfig) -> Array:
    """`[R, num_image_tokens, patch_dim]` to `[R, image_size, image_size]`."""
    tokens, dim = config.num_image_tokens, config.patch_dim
    if patches.ndim != 3 or patches.shape[1:] != (tokens, dim):
        raise ValueError(f"patches must be [R, {tokens}, {dim}], got {list(patches.shape)}")
    side, patch = config.image_size // config.patch_size, config.patch_size
    split = patches.reshape(-1, side, side, patch, patch)
    return np.ascontiguousarray(
        split.transpose(0, 1, 3, 2, 4).reshape(-1, config.image_size, config.image_size)
    )


def to_model_range(pixels: Array) -> Array:
    """Pixels in [0, 1] (0 is the background) to the model's [-1, 1]."""
    values: Array = (pixels * 2.0 - 1.0).astype(np.float32)
    return values


def to_pixels(values: Array) -> Array:
    """The model's values (about [-1, 1]) to pixels, clipped to [0, 1]."""
    pixels: Array = np.clip((values + 1.0) * 0.5, 0.0, 1.0).astype(np.float32)
    return pixels
