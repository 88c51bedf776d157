"""The way from noise to image: time steps, the Euler rule, classifier-free guidance.

Time runs from 0 (noise) to 1 (image). On the way a training image is
`x(t) = (1 - t) * noise + t * image`, and the model predicts the velocity `image - noise`.

Plain arithmetic: the functions work on numbers and on NumPy, torch and JAX arrays alike.
"""

from __future__ import annotations

import math
from typing import Any

DEFAULT_STEPS = 25
DEFAULT_GUIDANCE = 2.0

Array = Any  # a number, or an array of NumPy, torch or JAX: this module imports none of them


def timesteps(num_steps: int) -> list[float]:
    """`num_steps + 1` times, evenly spaced from 0.0 to 1.0, both included.

    Step `i` calls the model at `times[i]` and moves the sample to `times[i + 1]`.
    """
    if num_steps < 1:
        raise ValueError(f"the number of steps must be at least 1, got {num_steps}")
    return [step / num_steps for step in range(num_steps + 1)]


def euler_step(sample: Array, velocity: Array, time: float, next_time: float) -> Array:
    """The sample at `next_time`: it moves along the velocity for as long as the step lasts."""
    return sample + velocity * (next_time - time)


def guide(unconditional: Array, conditional: Array, guidance: float) -> Array:
    """Classifier-free guidance: from the empty prompt's velocity towards, and past, the prompt's.

    0 ignores the prompt, 1 is the prompt's own velocity, more exaggerates it.
    """
    difference = conditional - unconditional
    return unconditional + guidance * difference


def check_guidance(guidance: float) -> float:
    """`guidance` if it is finite; NaN and infinities raise."""
    if not math.isfinite(guidance):
        raise ValueError(f"guidance must be a finite number, got {guidance}")
    return guidance
