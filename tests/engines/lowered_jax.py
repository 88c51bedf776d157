"""What JAX programs with Triton kernels become for a CUDA device, on a machine without one.

A process of its own, since ``jax_triton`` changes the environment when it is imported, and the
interpreter must be off. Prints JSON for ``test_jax_triton``.

    XLA_FLAGS=--xla_force_host_platform_device_count=2 python -m tests.engines.lowered_jax 80 90
"""

from __future__ import annotations

import json
import re
import sys
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from backends.jax_gpu.device import find_device
from backends.jax_gpu.engine import JaxEngine
from backends.jax_gpu.export import export_program, load_program
from backends.jax_gpu.kernels.select import Toolkit
from backends.jax_gpu.kernels.triton import Chip, TritonKernel
from backends.jax_gpu.ranks import Ranks
from backends.jax_gpu.sharding import ShardedEngine
from layout_core.rows import Bucket
from tests.cases import CAUSAL, LAYOUTS, Cells, Group, PoolShape, Tables, plan_of, row

SHAPE = PoolShape("lowered", (Group((Cells(2, 64),) * 2, 16),), 24)
BUCKET = Bucket(tokens=64, rows=2, blocks=4)
HEADS = 8


def engine_for(capability: int) -> JaxEngine:
    """The engine of such a chip, on the CPU: nothing of it runs here."""
    chip = Chip(divmod(capability, 10), num_sms=132)
    kernel = TritonKernel(chip, platforms=("cpu",))
    return JaxEngine(*find_device("cpu"), toolkit=Toolkit("cpu", (kernel,)))


def batch_of(engine: JaxEngine, plan: Any, lengths: tuple[int, ...], bucket: Bucket) -> Any:
    rows, tables = [row(f"r{i}", n, n) for i, n in enumerate(lengths)], Tables()
    for at, r in enumerate(rows):
        tables.put(r, 0, range(1 + 8 * at, 1 + 8 * at + -(-r.seq_len // 16)))
    return engine.prepare(plan, rows, tables, visibility=CAUSAL, num_heads=HEADS, bucket=bucket)


def arrays_of(dtype: str, tokens: int) -> tuple[Any, Any, Any]:
    query, key = (jnp.zeros((tokens, n, 64), jnp.dtype(dtype)) for n in (HEADS, 2))
    return query, key, key


def lower(program: Any, *arguments: Any) -> Any:
    return program.trace(*arguments).lower(lowering_platforms=("cuda",))


def calls_of(lowered: Any) -> list[dict[str, Any]]:
    """Every launch in a lowered program: its operands, aliases and code."""
    found: list[dict[str, Any]] = []

    def visit(operation: Any) -> None:
        for region in operation.regions:
            for block in region:
                for child in block:
                    visit(child.operation)
        if operation.name == "stablehlo.custom_call":
            attributes = operation.attributes
            if attributes["call_target_name"].value == "triton_kernel_call":
                config = attributes["backend_config"].value_bytes
                found.append(
                    {
                        "operands": [str(o.type) for o in operation.operands],
                        "in place": "output_operand_alias<" in str(operation),
                        "code": zlib.decompress(config).decode("latin-1"),
                    }
                )

    visit(lowered.compiler_ir("stablehlo").operation)
    return found


def facts_of(call: dict[str, Any]) -> dict[str, Any]:
    code = call["code"]
    return {
        "entry": re.findall(r"\.entry (\w+)\(", code)[0],
        "target": re.findall(r"\.target (sm_\w+)", code)[0],
        "in place": call["in place"],
        "products": len(re.findall(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)", code)),
        "wide moves": len(
            re.findall(r"(?:ld|st)\.global\S*\.v4\.b32|cp\.async\.c[ga]\S*[^;]*, 0x10", code)
        ),
        "pool": call["operands"][0],
        "local": ".local " in code,
    }


def two_layers(engine: JaxEngine) -> Any:
    def run(pool: Any, query: Any, key: Any, value: Any, batch: Any) -> Any:
        outputs = []
        for layer in range(2):
            output, pool = engine.forward_paged(pool, layer, query, key, value, batch)
            outputs.append(output)
        return outputs, pool

    return jax.jit(run, donate_argnums=0)


def scanned(engine: JaxEngine) -> Any:
    def run(pool: Any, query: Any, key: Any, value: Any, batch: Any) -> Any:
        def one(pool: Any, layer: Any) -> Any:
            output, pool = engine.forward_paged(pool, layer, query, key, value, batch)
            return pool, output

        return jax.lax.scan(one, pool, jnp.arange(2, dtype=jnp.int32))

    return jax.jit(run, donate_argnums=0)


def check_chip(capability: int, dtype: str) -> dict[str, Any]:
    """The programs of one chip and dtype."""
    engine = engine_for(capability)
    plan = plan_of(SHAPE, "LBNHC", dtype)
    pool = engine.allocate(plan)
    arrays = arrays_of(dtype, BUCKET.tokens)
    lowered = lower(two_layers(engine), pool, *arrays, batch_of(engine, plan, (40, 20), BUCKET))
    calls = calls_of(lowered)
    return {
        "calls": [facts_of(call) for call in calls],
        "equal layers": [
            calls[0]["code"] == calls[2]["code"],
            calls[1]["code"] == calls[3]["code"],
        ],
        "pool donated": len(re.findall(r"tf\.aliasing_output", lowered.as_text())),
    }


def check_programs(capability: int) -> dict[str, Any]:
    """What does not change a program, and what a scan and splits make of it."""
    engine = engine_for(capability)
    plan = plan_of(SHAPE, "LBNHC", "bfloat16")
    pool = engine.allocate(plan)
    arrays = arrays_of("bfloat16", BUCKET.tokens)
    texts = {
        lower(two_layers(engine), pool, *arrays, batch_of(engine, plan, n, BUCKET)).as_text()
        for n in ((40, 20), (1,), (64, 0))
    }
    layouts = set()
    for layout in LAYOUTS:
        other = plan_of(SHAPE, layout, "bfloat16")
        batch = batch_of(engine, other, (40, 20), BUCKET).portable()
        portable = engine.allocate(other).portable()
        layouts.add(lower(two_layers(engine), portable, *arrays, batch).as_text())
    loop = calls_of(lower(scanned(engine), pool, *arrays, batch_of(engine, plan, (9, 9), BUCKET)))
    long = Bucket(tokens=8, rows=1, blocks=512)
    big = plan_of(PoolShape("long", SHAPE.groups, 600), "LBNHC", "bfloat16")
    split = calls_of(
        lower(
            two_layers(engine),
            engine.allocate(big),
            *arrays_of("bfloat16", 8),
            batch_of(engine, big, (8,), long),
        )
    )

    def move(pool: Any, slots: Any, key: Any) -> Any:
        pool = engine.write(pool, 0, key, key, slots)
        return engine.copy_blocks(pool, [(1, 2), (3, 4), (1, 5)])

    moves = lower(jax.jit(move, donate_argnums=0), pool, np.zeros(64, np.int32), arrays[1])
    return {
        "programs of one bucket": len(texts),
        "programs of all layouts": len(layouts),
        "scan": [facts_of(call)["entry"] for call in loop],
        "split": [facts_of(call)["entry"] for call in split],
        "moves": [facts_of(call) for call in calls_of(moves)],
    }


def check_export(capability: int) -> dict[str, Any]:
    """A program with launches goes through bytes; another batch's choices are refused there."""
    engine = engine_for(capability)
    plan = plan_of(SHAPE, "LBNHC", "bfloat16")
    pool, batch = engine.allocate(plan), batch_of(engine, plan, (40, 20), BUCKET)
    arrays = arrays_of("bfloat16", BUCKET.tokens)

    def run(pool: Any, batch: Any, query: Any, key: Any, value: Any) -> Any:
        return engine.forward_paged(pool, 0, query, key, value, batch)

    data = export_program("step", run, pool, batch, *arrays, platforms=("cuda",))
    program = load_program(data)
    wider = batch_of(engine, plan, (40, 20), Bucket(64, 3, 4))
    return {
        "platforms": program.platforms,
        "serves": program.serves(pool, batch, *arrays),
        "serves others": program.serves(pool, wider, *arrays),
    }


def check_ranks(capability: int) -> dict[str, Any]:
    """A step on two ranks of heads: each has the launches of one device, on its own heads."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("tensor",))
    kernel = TritonKernel(Chip(divmod(capability, 10), 132), platforms=("cpu",))
    engine = ShardedEngine(Ranks(mesh, None, "tensor"), Toolkit("cpu", (kernel,)))
    shape = PoolShape("rank", (Group((Cells(1, 64),) * 2, 16),), 24)
    plan, rows, tables = plan_of(shape, "LBNHC", "bfloat16"), [row("a", 40, 40)], Tables()
    tables.put(rows[0], 0, [1, 5, 3])
    batch = engine.prepare(
        plan, [rows], [tables], visibility=CAUSAL, num_heads=HEADS // 2, bucket=BUCKET
    )

    def run(pool: Any, query: Any, key: Any, value: Any, batch: Any) -> Any:
        return engine.forward_paged(pool, 1, query, key, value, batch)

    program = jax.jit(run, donate_argnums=0)
    arrays = arrays_of("bfloat16", BUCKET.tokens)
    lowered = lower(program, engine.allocate(plan), *arrays, batch)
    return {
        "calls": [facts_of(call) for call in calls_of(lowered)],
        "donated": len(re.findall(r"jax\.buffer_donor|tf\.aliasing_output", lowered.as_text())),
    }


def main(arguments: list[str]) -> None:
    chips = {
        f"{capability} {dtype}": check_chip(int(capability), dtype)
        for capability in arguments
        for dtype in ("bfloat16", "float32")[: 2 if capability == "90" else 1]
    }
    print(
        json.dumps(
            {
                "chips": chips,
                "programs": check_programs(90),
                "ranks": check_ranks(90),
                "export": check_export(90),
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1:])
