"""Which kernel serves a batch: the written rule behind ``kernel="auto"``.

Rule: the kernels are tried in the order of :data:`KERNELS`, and the first that does not refuse
the case is taken. A case is refused for what it is (device, dtypes, head sizes), never for a
package that failed to import. A kernel asked for by name either serves or raises.
"""

from __future__ import annotations

from typing import Final

from backends.torch_cuda.kernels.base import Kernel, KernelCase
from backends.torch_cuda.kernels.sdpa import SdpaKernel
from layout_core.errors import UnsupportedError

AUTO: Final = "auto"

KERNELS: Final[tuple[Kernel, ...]] = (SdpaKernel(),)
"""In order of preference."""


def kernel_names() -> tuple[str, ...]:
    """The names that ``kernel=`` accepts beside ``auto``."""
    return tuple(kernel.name for kernel in KERNELS)


def select_kernel(name: str, case: KernelCase) -> Kernel:
    """The kernel of a name, or the first that serves the case for ``auto``.

    Raises:
        UnsupportedError: no such kernel (lists the valid names), or it cannot serve the case
            (says why).
    """
    refusals: list[str] = []
    known = False
    for kernel in KERNELS:
        if name not in (AUTO, kernel.name):
            continue
        known = True
        reason = kernel.refuse(case)
        if reason is None:
            return kernel
        refusals.append(f"{kernel.name}: {reason}")
    if not known:
        raise UnsupportedError(
            f"kernel: torch_cuda expects one of {', '.join((AUTO, *kernel_names()))}, got {name!r}"
        )
    raise UnsupportedError(f"kernel: {name!r} cannot serve this batch ({'; '.join(refusals)})")
