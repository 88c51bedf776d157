"""What a bench was asked to do, checked before anything is loaded."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from typing import Any

from diffusion_runner.bench.harness import Limits
from diffusion_runner.errors import RunError
from layout_core import KVCacheLayout

DTYPES = ("float32", "float16", "bfloat16")
TABLES = ("shuffled", "ascending")
QUICK_LIMITS = Limits(rounds=5, seconds=0.5, least=3, warmup=1, settle=0)


@dataclass(frozen=True, slots=True)
class Options:
    """One run of the bench.

    Args:
        engines: flags of the engines; not empty.
        device: of the engines; ``None``: their own choice.
        dtypes: element types, of :data:`DTYPES`.
        layouts: names of layouts.
        threads: of torch's CPU kernels; JAX takes the cores.
        shuffled: block tables in random order, or ascending.
        quick: small sizes and few rounds, to see that it runs; no figures to publish.
        limits: how long each case is measured.
    """

    engines: tuple[str, ...] = ("torch_cuda", "jax_gpu")
    device: str | None = None
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    layouts: tuple[str, ...] = tuple(KVCacheLayout.__members__)
    threads: int = 2
    shuffled: bool = True
    quick: bool = False
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if not self.engines:
            raise RunError("engines: expected at least one, got none")
        for name in self.dtypes:
            if name not in DTYPES:
                raise RunError(f"dtypes: expected some of {', '.join(DTYPES)}, got {name!r}")
        names = tuple(KVCacheLayout.parse(name).name for name in self.layouts)
        object.__setattr__(self, "layouts", names)  # an alias is recorded under the layout's name
        if self.threads < 1:
            raise RunError(f"threads: expected an int >= 1, got {self.threads!r}")


def make_options(*, tables: str, quick: bool, **values: Any) -> Options:
    """Options from a command's words; a quick run measures for a shorter time.

    Raises:
        RunError: what is none of the words.
    """
    if tables not in TABLES:
        raise RunError(f"tables: expected one of {', '.join(TABLES)}, got {tables!r}")
    limits = QUICK_LIMITS if quick else Limits()
    return Options(shuffled=tables == TABLES[0], quick=quick, limits=limits, **values)


@dataclass(frozen=True, slots=True, eq=False)
class Bench:
    """Options with the engines loaded."""

    options: Options
    engines: dict[str, Any]

    @property
    def on_gpu(self) -> bool:
        """Whether the engines run on a GPU."""
        return any(engine.device.startswith("cuda") for engine in self.engines.values())

    def torch(self) -> Any | None:
        """The torch engine, which torch's peers take their tensors from."""
        return self.engines.get("torch_cuda")

    def jax(self) -> Any | None:
        """The JAX engine."""
        return self.engines.get("jax_gpu")


def open_bench(options: Options) -> Bench:
    """Load the engines and set torch's threads.

    Raises:
        LayoutError: an engine that is not there (says what to install).
    """
    import backends

    engines = {name: backends.load(name, device=options.device) for name in options.engines}
    if "torch_cuda" in engines:
        from diffusion_runner.bench import torch_peers

        torch_peers.set_threads(options.threads)
    return Bench(options, engines)


def installed(package: str) -> bool:
    """Whether a package can be imported, without importing it."""
    return importlib.util.find_spec(package) is not None
