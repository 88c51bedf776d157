"""Suite ``attention``: paged attention beside dense attention and other peers.

Each case is timed in every layout and with every engine. The base is torch's own dense
attention on contiguous K/V: a paged call below 1.0 is faster than not paging at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from diffusion_runner.bench.harness import Call, Comparison, compare
from diffusion_runner.bench.options import Bench, installed
from diffusion_runner.bench.workload import (
    Data,
    Geometry,
    PagedCall,
    Rows,
    check_agrees,
    dense_reference,
    random_data,
)

SUITE = "attention"

RAGGED = (
    (32, 500),
    (256, 256),
    (1, 2048),
    (128, 1111),
    (512, 777),
    (64, 2000),
    (300, 301),
    (7, 90),
)
"""Queries and keys of eight rows of one batch."""

CASES: dict[str, Rows] = {
    "T=1024, S=2048": Rows(((1024, 2048),)),
    "T=1024, S=1126 in a bucket of 2048": Rows(((1024, 1126),), bucket_keys=2048),
    "T=32, S=2048": Rows(((32, 2048),)),
    "8 ragged rows": Rows(RAGGED),
}
QUICK_CASES: dict[str, Rows] = {
    "T=64, S=256": Rows(((64, 256),)),
    "3 ragged rows": Rows(((8, 64), (32, 32), (1, 100))),
}


def run(bench: Bench) -> Iterator[Comparison]:
    """Every case in every dtype."""
    options = bench.options
    for dtype in options.dtypes:
        geometry = Geometry(dtype=dtype)
        for case, rows in (QUICK_CASES if options.quick else CASES).items():
            yield _case(bench, geometry, case, rows)


def _case(bench: Bench, geometry: Geometry, case: str, rows: Rows) -> Comparison:
    options = bench.options
    data = random_data(rows, geometry)
    want = dense_reference(rows, geometry, data)
    calls: dict[str, Call] = dict(_peers(bench, geometry, rows, data, want))
    kernels = {}
    for name, engine in bench.engines.items():
        for layout in options.layouts:
            call = PagedCall(engine, layout, geometry, rows, data, shuffled=options.shuffled)
            label = f"{name} {layout}"
            check_agrees(label, call.output(), want, geometry.dtype)
            calls[label] = call
            kernels[name] = call.kernel
    details = {
        "rows": [list(shape) for shape in rows.shapes],
        "bucket_keys": rows.bucket_keys,
        "num_heads": geometry.num_heads,
        "num_kv_heads": geometry.num_kv_heads,
        "head_size": geometry.head_size,
        "block_size": geometry.block_size,
        "dtype": geometry.dtype,
        "tables": "shuffled" if options.shuffled else "ascending",
        "kernels": kernels,
    }
    base = next(iter(calls))
    return compare(
        SUITE,
        f"{case}, {geometry.dtype}",
        calls,
        base=base,
        limits=options.limits,
        details=details,
    )


Peer = Callable[[Any, Geometry, Rows, Data], Callable[[], Any]]


def _peers(
    bench: Bench, geometry: Geometry, rows: Rows, data: Data, want: Any
) -> Iterator[tuple[str, Call]]:
    """Peers that the engines at hand allow, the base first; each is checked before it is timed."""

    def checked(module: Any, engine: Any, name: str, peer: Peer) -> tuple[str, Call]:
        call = peer(engine, geometry, rows, data)
        got = np.asarray(engine.to_numpy(call())).astype(np.float32)
        check_agrees(name, got, want, geometry.dtype)
        done: Call = module.done(call)
        return name, done

    engine = bench.torch()
    if engine is not None:
        from diffusion_runner.bench import torch_peers as torch_side

        yield checked(torch_side, engine, "torch dense SDPA", torch_side.dense)
        yield checked(torch_side, engine, "torch gather + SDPA", torch_side.gather)
        if len(rows.shapes) == 1 and geometry.dtype == "float32" and not bench.options.quick:
            yield checked(torch_side, engine, "torch FlexAttention", torch_side.flex)
        if bench.on_gpu and geometry.dtype != "float32":
            yield checked(torch_side, engine, "torch flash SDPA", torch_side.flash)
            yield checked(torch_side, engine, "torch cuDNN SDPA", torch_side.cudnn)
        if installed("vllm") and not bench.on_gpu:
            from integrations import vllm_bench

            yield checked(torch_side, engine, "vLLM's CPU kernel", vllm_bench.cpu_attention)
    engine = bench.jax()
    if engine is not None:
        from diffusion_runner.bench import jax_peers as jax_side

        yield checked(jax_side, engine, "jax.nn.dot_product_attention", jax_side.dense)
        if bench.on_gpu and geometry.dtype != "float32":
            yield checked(jax_side, engine, "JAX cuDNN", jax_side.cudnn)
