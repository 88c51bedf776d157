"""The shared suite with the JAX engine's Triton kernels, run by Triton's interpreter.

A process of its own: the interpreter is chosen by an environment variable that must be set before
the kernels' modules are imported. The engine is the GPU engine but for its launcher: the programs
that JAX builds give the same launches the same arguments, in the order in which ``jax_triton``
takes them, and a callback runs each on the host.

    python -m tests.engines.interpreted_jax [--every N --from K] tests/engines/test_suite_blocks.py

``--every N --from K`` runs each N-th test of those collected; the rest is pytest's.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

KERNELS = (("jax_gpu", "triton"),)


def interpret(launch: Any, buffers: Mapping[str, Any], chip: Any) -> dict[str, Any]:
    """What ``launch_by_jax_triton`` does, by a callback: same arguments, same outputs."""
    import jax

    from backends.jax_gpu.kernels.triton import output_shape
    from backends.triton_kernels.launch import Scalar

    arguments = [p.value if isinstance(p, Scalar) else buffers[p.buffer] for p in launch.inputs]
    numbers = {i: a for i, a in enumerate(arguments) if isinstance(a, int | float)}
    arrays = [a for i, a in enumerate(arguments) if i not in numbers]
    shapes = [output_shape(p, buffers) for p in launch.outputs]
    run = partial(_run, launch, numbers, len(arguments))
    outputs = jax.pure_callback(run, shapes, *arrays)
    return {p.buffer: out for p, out in zip(launch.outputs, outputs, strict=True)}


def _run(launch: Any, numbers: dict[int, Any], count: int, *arrays: Any) -> list[Any]:
    """Launch on copies of the arrays; an output that is an input starts as that input."""
    import jax.numpy as jnp

    hosts = [np.array(a) for a in arrays]
    given = iter(hosts)
    inputs = [numbers[i] if i in numbers else next(given) for i in range(count)]
    sources = {output: hosts[place] for place, output in launch.aliases.items()}
    outputs = []
    for at, output in enumerate(launch.outputs):
        if at in sources:
            outputs.append(sources[at])  # one memory, as with aliased buffers
        else:
            # junk: an entry that the kernel leaves out must show
            outputs.append(np.full(output.shape, 77, jnp.dtype(output.dtype)))
    launch.kernel[launch.grid](
        *(a if isinstance(a, int | float) else _tensor(a) for a in inputs),
        *(_tensor(a) for a in outputs),
        **launch.constexprs,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    return outputs


def _tensor(array: Any) -> Any:
    """A tensor on the array's memory: what Triton's interpreter takes."""
    import torch

    word = array.view(f"u{array.itemsize}") if array.dtype.kind == "V" else array
    tensor = torch.from_numpy(word)
    return tensor if word is array else tensor.view(getattr(torch, array.dtype.name))


def interpreted_engine() -> Any:
    """A JAX engine on the CPU that launches what the GPU engine launches."""
    from backends.jax_gpu.device import find_device
    from backends.jax_gpu.engine import JaxEngine
    from backends.jax_gpu.kernels.select import Toolkit
    from backends.jax_gpu.kernels.triton import Chip, TritonKernel

    # sm_80: there 8-bit floats are decoded by hand, which the interpreter can do
    chip = Chip(capability=(8, 0), num_sms=64)
    kernel = TritonKernel(chip, platforms=("cpu",), launcher=interpret, upcast=True)
    return JaxEngine(*find_device("cpu"), toolkit=Toolkit("cpu", (kernel,)))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--from", type=int, default=0, dest="first")
    options, rest = parser.parse_known_args(arguments)
    os.environ["TRITON_INTERPRET"] = "1"
    import pytest

    import backends
    from tests.engines import suite
    from tests.engines.interpreted import Slice
    from tests.kernels import interpreter

    interpreter.mend()
    engine = interpreted_engine()
    backends.load = lambda name, *, device=None: engine  # type: ignore[assignment]
    suite.ENGINE_KERNELS = KERNELS  # before the test modules read it
    return int(
        pytest.main(
            ["--floors", "never", "-p", "no:cacheprovider", *rest],
            plugins=[Slice(options.every, options.first)],
        )
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
