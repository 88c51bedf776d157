"""Which kernel runs: one written rule.

``auto`` takes the first kernel of :data:`KERNELS` that serves the device. A kernel that is
asked for by name and cannot serve raises: nothing else runs in its place.
"""

from __future__ import annotations

from typing import Final

from layout_core.errors import UnsupportedError

KERNELS: Final[dict[str, tuple[str, ...]]] = {"xla": ("cpu", "gpu")}
"""Kernel name -> platforms it serves as JAX names them, in the order in which auto tries."""


def kernel_names() -> tuple[str, ...]:
    """Names that :func:`select_kernel` knows beside ``auto``."""
    return tuple(KERNELS)


def select_kernel(kernel: str, platform: str) -> str:
    """The kernel for a request, ``auto`` or a name.

    Raises:
        UnsupportedError: no such kernel, or it does not serve this platform.
    """
    if kernel == "auto":
        for name, platforms in KERNELS.items():
            if platform in platforms:
                return name
        raise UnsupportedError(
            f"kernel: 'auto' found none for platform {platform!r}; there are {', '.join(KERNELS)}"
        )
    if kernel not in KERNELS:
        raise UnsupportedError(
            f"kernel: expected 'auto' or one of {', '.join(KERNELS)}, got {kernel!r}"
        )
    if platform not in KERNELS[kernel]:
        raise UnsupportedError(
            f"kernel: {kernel!r} serves {', '.join(KERNELS[kernel])}, the device is {platform!r}"
        )
    return kernel
