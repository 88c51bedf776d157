"""Which kernel serves a batch, and what moves its bytes: the written rule.

On a GPU ``auto`` takes ``triton``, and ``xla`` where the case is one that ``triton`` does not
serve; on the CPU ``xla``. Cells are moved by the first kernel of the device.

A case is refused for what it is (device, dtypes, head sizes), never for a package that is not
there: an engine for a GPU needs ``jax_triton`` and is not made without it. A kernel asked for by
name either serves or raises: nothing else runs in its place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import jax

from backends.jax_gpu.kernels.base import BoundWork, Kernel, KernelCase
from backends.jax_gpu.kernels.plain import XlaKernel
from layout_core.errors import UnsupportedError
from layout_core.packages import check_installed

AUTO: Final = "auto"

GPU_KERNELS: Final = ("triton",)
"""Kernels that are there on GPUs alone."""


@dataclass(frozen=True, slots=True)
class Toolkit:
    """What an engine works with on its device."""

    platform: str  #: as JAX names it
    kernels: tuple[Kernel, ...]  #: in the order in which ``auto`` tries them

    @property
    def moves(self) -> Kernel:
        """What writes at slots and copies blocks outside of a step."""
        return self.kernels[0]


def toolkit_for(device: jax.Device) -> Toolkit:
    """The kernels of a device.

    Raises:
        MissingPackageError: a GPU, and ``jax_triton`` or Triton is not installed.
    """
    if device.platform != "gpu":
        return Toolkit(device.platform, (XlaKernel(),))
    check_installed(f"jax_gpu on {device}", ("jax_triton", "triton"), "jax-triton")
    # imported here: the CPU needs no Triton
    from backends.jax_gpu.kernels.triton import TritonKernel, chip_of

    return Toolkit(device.platform, (TritonKernel(chip_of(device)), XlaKernel()))


def kernel_names(toolkit: Toolkit) -> tuple[str, ...]:
    """Names that :func:`select_kernel` knows beside ``auto``."""
    return tuple(kernel.name for kernel in toolkit.kernels)


def select_kernel(name: str, case: KernelCase, toolkit: Toolkit) -> BoundWork:
    """The kernel for a request, ``auto`` or a name, and what it chose for the case.

    Raises:
        UnsupportedError: no such kernel (lists the valid names), or it cannot serve the case
            (says why).
    """
    refusals: list[str] = []
    for kernel in toolkit.kernels:
        if name not in (AUTO, kernel.name):
            continue
        reason = kernel.refuse(case)
        if reason is None:
            return BoundWork(kernel, kernel.plan(case))
        refusals.append(f"{kernel.name}: {reason}")
    if not refusals:
        elsewhere = "; it runs on GPUs alone" if name in GPU_KERNELS else ""
        raise UnsupportedError(
            f"kernel: jax_gpu on {toolkit.platform} expects one of "
            f"{', '.join((AUTO, *kernel_names(toolkit)))}, got {name!r}{elsewhere}"
        )
    raise UnsupportedError(f"kernel: {name!r} cannot serve this batch ({'; '.join(refusals)})")
