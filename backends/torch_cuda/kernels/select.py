"""Which kernel serves a batch, and what moves its bytes: the written rules.

On a CUDA device, for ``kernel="auto"``:

1. ``gather`` where all of this holds: nothing of the step is padded to a bucket (which asks for
   fixed shapes, and so for a captured graph); every row is one call, without a mask; and
   gathering costs less than reading pages loses, see :func:`against_gather`.
2. else ``triton``.
3. else, where the case is one that Triton's kernels do not serve (float64), ``sdpa``.

On the CPU: ``sdpa``.

A case is refused for what it is (device, dtypes, head sizes), never for a package that is not
there: on a CUDA device Triton is needed, and an engine for one is not made without it. A kernel
asked for by name either serves or raises. Kernels of third parties (the entry-point group
:data:`ENTRY_POINT_GROUP`) run where they are asked for by name, and never by ``auto``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Final

import torch

from backends.torch_cuda.kernels.base import Chip, Kernel, KernelCase
from backends.torch_cuda.kernels.sdpa import SdpaKernel
from backends.torch_cuda.kernels.segments import Mode, segment_row
from backends.torch_cuda.moves import IndexedMoves, Moves
from layout_core.errors import UnsupportedError
from layout_core.packages import check_installed

AUTO: Final = "auto"

ENTRY_POINT_GROUP: Final = "pagestride.torch_cuda.kernels"
"""An entry's name is the kernel's, its value a :class:`~.base.Kernel` or a class of one."""

CUDA_KERNELS: Final = ("gather", "triton")
"""Built-in kernels that are there on CUDA devices alone."""

GATHER: Final = "gather"

GATHER_COST: Final = 350.0
"""Gathering costs this over ``queries * group`` of the attention's time (H200, bfloat16,
head size 128; by memory traffic against matrix products): each key is moved once, and is used by
``queries * group`` rows of the product."""

PAGED_LOSS: Final = ((128, 0.01), (1, 0.20))
"""``(tokens of a block at least, share of the attention's time that reading pages loses)``, as
published for paged FlashAttention-4 on that GPU; not measured with this project's kernels."""


def chip_of(device: torch.device) -> Chip:
    """The chip of a CUDA device."""
    properties = torch.cuda.get_device_properties(device)
    return Chip((properties.major, properties.minor), properties.multi_processor_count)


@dataclass(frozen=True, slots=True)
class Toolkit:
    """What an engine works with on its device."""

    device: torch.device
    kernels: tuple[Kernel, ...]  #: built in, in order of preference
    moves: Moves


def toolkit_for(device: torch.device, chip: Chip | None = None) -> Toolkit:
    """The kernels of a device.

    Args:
        device: where they run.
        chip: what they are chosen for; ``None``: what the device is.

    Raises:
        MissingPackageError: a CUDA device, and Triton is not installed.
    """
    if device.type == "cpu":
        return Toolkit(device, (SdpaKernel(),), IndexedMoves())
    check_installed(f"torch_cuda on {device}", ("triton",), "triton")
    # imported here: the CPU needs no Triton
    from backends.torch_cuda.kernels.gather import GatherKernel
    from backends.torch_cuda.kernels.triton import TritonKernel, TritonMoves

    kernel = TritonKernel(chip_of(device) if chip is None else chip)
    return Toolkit(device, (GatherKernel(), kernel, SdpaKernel()), TritonMoves())


def third_party_names() -> tuple[str, ...]:
    """Names of registered kernels, in alphabetical order. Reads metadata, imports nothing."""
    return tuple(sorted({entry.name for entry in metadata.entry_points(group=ENTRY_POINT_GROUP)}))


def kernel_names(toolkit: Toolkit) -> tuple[str, ...]:
    """The names that ``kernel=`` accepts beside ``auto``: built in, then third parties'."""
    ours = tuple(kernel.name for kernel in toolkit.kernels)
    return (*ours, *(name for name in third_party_names() if name not in ours))


def select_kernel(name: str, case: KernelCase, toolkit: Toolkit) -> Kernel:
    """The kernel of a name, or the one that the rule takes for ``auto``.

    Raises:
        UnsupportedError: no such kernel (lists the valid names), or it cannot serve the case
            (says why).
    """
    refusals: list[str] = []
    for kernel in _candidates(name, case, toolkit):
        reason = kernel.refuse(case)
        if reason is None:
            return kernel
        refusals.append(f"{kernel.name}: {reason}")
    if not refusals:
        raise UnsupportedError(
            f"kernel: torch_cuda on {toolkit.device} expects one of "
            f"{', '.join((AUTO, *kernel_names(toolkit)))}, got {name!r}{_elsewhere(name, toolkit)}"
        )
    raise UnsupportedError(f"kernel: {name!r} cannot serve this batch ({'; '.join(refusals)})")


def _candidates(name: str, case: KernelCase, toolkit: Toolkit) -> Iterator[Kernel]:
    if name == AUTO:
        for kernel in toolkit.kernels:
            if kernel.name != GATHER or against_gather(case) is None:
                yield kernel
        return
    for kernel in toolkit.kernels:
        if kernel.name == name:
            yield kernel
            return
    if name in third_party_names():
        yield load_third_party(name)


def _elsewhere(name: str, toolkit: Toolkit) -> str:
    if name in CUDA_KERNELS and toolkit.device.type != "cuda":
        return f"; {name!r} runs on CUDA devices alone"
    return ""


def load_third_party(name: str) -> Kernel:
    """The kernel that a third party registered under a name; imports its module.

    Raises:
        UnsupportedError: registered more than once with unlike values.
    """
    entries = [e for e in metadata.entry_points(group=ENTRY_POINT_GROUP) if e.name == name]
    values = sorted({entry.value for entry in entries})
    if len(values) > 1:
        raise UnsupportedError(f"kernel {name!r} is registered more than once: {', '.join(values)}")
    loaded = entries[0].load()
    kernel: Kernel = loaded() if isinstance(loaded, type) else loaded
    return kernel


def against_gather(case: KernelCase) -> str | None:
    """Why pages are better read where they are; ``None`` where copying them is faster.

    Copying costs :data:`GATHER_COST` ``/ (queries * group)`` of a row's attention, reading pages
    :data:`PAGED_LOSS` of it: for pages below 128 tokens the copy wins from 1,750 queries times
    heads of a group on. A row that takes several calls, or a mask, stays with the paged kernel,
    which does it in one.
    """
    step = case.step
    if step.bucket is not None:
        return "the step is padded to a bucket, and its calls would follow the rows"
    group = min(case.num_heads // view.num_kv_heads for view in case.layers)
    loss = next(lost for tokens, lost in PAGED_LOSS if step.block_size >= tokens)
    enough = int(GATHER_COST / (loss * group)) + 1
    served = False
    for index in range(step.num_rows):
        start, end = step.cu_seqlens[index], step.cu_seqlens[index + 1]
        if start == end:
            continue
        if end - start < enough:
            return (
                f"row {index} has {end - start} queries; with {group} heads a group and blocks of "
                f"{step.block_size} tokens, copying pages is faster from {enough} on"
            )
        segments = segment_row(step.lo[start:end], step.hi[start:end])
        if len(segments) != 1 or segments[0].mode is Mode.MASKED:
            return f"row {index} takes more than one call, or a mask"
        served = True
    return None if served else "no row has a query"


def explain(case: KernelCase, toolkit: Toolkit) -> list[tuple[str, str | None]]:
    """For each kernel by name why ``auto`` does not take it, in order; ``None``: it does.

    Third parties' kernels are not loaded for it.
    """
    chosen: str | None = None
    out: list[tuple[str, str | None]] = []
    for kernel in toolkit.kernels:
        reason = kernel.refuse(case)
        if reason is None and kernel.name == GATHER:
            reason = against_gather(case)
        if reason is None and chosen is not None:
            reason = f"it would serve; {chosen} comes first"
        if reason is None:
            chosen = kernel.name
        out.append((kernel.name, reason))
    there = {name for name, _ in out}
    out.extend((name, "runs on CUDA devices alone") for name in CUDA_KERNELS if name not in there)
    out.extend((name, "a third party's: by name alone") for name in third_party_names())
    return out
