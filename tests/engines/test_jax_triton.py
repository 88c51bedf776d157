"""Kernel ``triton`` of the JAX engine, as far as a machine without a GPU can tell.

The kernels run in Triton's interpreter with the arguments that JAX's programs give them, and the
programs are lowered for CUDA; both in processes of their own. What is chosen and refused is looked
at here.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from backends.jax_gpu import create_engine
from backends.jax_gpu.device import find_device
from backends.jax_gpu.engine import JaxEngine
from backends.jax_gpu.kernels.plain import XlaKernel
from backends.jax_gpu.kernels.select import Toolkit, select_kernel, toolkit_for
from backends.jax_gpu.kernels.triton import Chip, TritonKernel, chip_of
from backends.triton_kernels.tiles import query_tiles
from layout_core.errors import MissingPackageError, UnsupportedError
from layout_core.rows import Bucket
from tests.cases import CAUSAL, LAYOUTS, PLAIN, Cells, Group, PoolShape, Tables, plan_of, row

ROOT = Path(__file__).resolve().parents[2]
TWO_DEVICES = "--xla_force_host_platform_device_count=2"
SUITES = ("steps", "isolation", "quantised", "blocks")


def run(*arguments: str) -> str:
    """The output of ``python -m``."""
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "XLA_FLAGS": TWO_DEVICES},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    return done.stdout


# --- run ---------------------------------------------------------------------------------------


@pytest.mark.timeout(1800)
def test_the_shared_suite_in_the_interpreter() -> None:
    """A fixed slice of it, which meets every layout and every dtype."""
    out = run(
        "tests.engines.interpreted_jax", "-q", "--every", "31", "--from", "17",
        *(f"tests/engines/test_suite_{name}.py" for name in SUITES),
    )  # fmt: skip
    rows = re.findall(r"jax_gpu +triton +(\w+) +((?:[LBHNC]{5} +\d+ *)+)", out)
    seen = {
        (dtype, layout): int(count)
        for dtype, cells in rows
        for layout, count in re.findall(r"([LBHNC]{5}) +(\d+)", cells)
        if int(count)
    }
    assert {layout for _, layout in seen} == set(LAYOUTS)
    assert {dtype for dtype, _ in seen} >= {"float32", "float16", "bfloat16"}
    assert sum(seen.values()) >= 12
    assert "failed" not in out


@pytest.mark.timeout(1800)
def test_moves_loops_splits_and_planted_faults_in_the_interpreter() -> None:
    out = run("tests.engines.interpreted_jax", "-q", "tests/engines/interpreted_jax_checks.py")
    found = re.search(r"\b(\d+) passed", out)
    assert found is not None
    assert int(found[1]) >= 17


# --- lowered -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lowered() -> Any:
    return json.loads(run("tests.engines.lowered_jax", "80", "90", "100"))


@pytest.mark.parametrize(
    ("chip", "target"),
    [
        ("80 bfloat16", "sm_80"),
        ("90 bfloat16", "sm_90a"),
        ("90 float32", "sm_90a"),
        ("100 bfloat16", "sm_100a"),
    ],
)
def test_a_step_lowers_to_two_launches_a_layer(lowered: Any, chip: str, target: str) -> None:
    """The pool goes in place through the writes; products on tensor cores; 16-byte moves."""
    result = lowered["chips"][chip]
    calls = result["calls"]
    assert [c["entry"] for c in calls] == ["write_kernel", "paged_attention_kernel"] * 2
    assert {c["target"] for c in calls} == {target}
    assert [c["in place"] for c in calls] == [True, False] * 2
    assert result["equal layers"] == [True, True], "equal layers launch the same code"
    assert result["pool donated"] == 1
    for call in calls:
        assert call["wide moves"] > 0
        assert not call["local"], "no registers are spilled by the compiler's own choice"
    assert (calls[1]["products"] > 0) == (chip != "90 float32")


def test_lengths_and_layouts_change_no_program(lowered: Any) -> None:
    """Field case 28: one program for a bucket; and, portable, one for all six layouts."""
    programs = lowered["programs"]
    assert programs["programs of one bucket"] == 1
    assert programs["programs of all layouts"] == 1
    assert programs["scan"] == ["write_kernel", "paged_attention_kernel"]


def test_few_queries_over_many_keys_are_split_and_merged(lowered: Any) -> None:
    one = ["write_kernel", "paged_attention_kernel", "merge_kernel"]
    assert lowered["programs"]["split"] == one * 2


def test_moves_outside_of_steps_work_in_place(lowered: Any) -> None:
    moves = lowered["programs"]["moves"]
    assert [m["entry"] for m in moves] == ["write_kernel", "copy_blocks_kernel"]
    assert all(m["in place"] and m["wide moves"] for m in moves)


def test_ranks_lower_to_the_launches_of_one_device(lowered: Any) -> None:
    """Under ``shard_map`` on two devices: a rank's own pool and heads, in place."""
    calls = lowered["ranks"]["calls"]
    assert [c["entry"] for c in calls] == ["write_kernel", "paged_attention_kernel"]
    assert {c["pool"] for c in calls} == {"tensor<768x128xui16>"}, "a rank has half of the heads"
    assert lowered["ranks"]["donated"] == 1


def test_a_program_with_launches_is_exported(lowered: Any) -> None:
    assert lowered["export"] == {"platforms": ["cuda"], "serves": True, "serves others": False}


# --- chosen ------------------------------------------------------------------------------------

KERNEL = TritonKernel(Chip((9, 0), 132), platforms=("cpu",))
ENGINE = JaxEngine(*find_device("cpu"), toolkit=Toolkit("cpu", (KERNEL, XlaKernel())))


def prepared(
    plan: Any, lengths: tuple[int, ...], kernel: str = "auto", bucket: Bucket | None = None,
    num_heads: int = 4,
) -> Any:  # fmt: skip
    rows, tables = [row(f"r{i}", n, n) for i, n in enumerate(lengths)], Tables()
    for at, r in enumerate(rows):
        tables.put(r, 0, range(1 + 6 * at, 7 + 6 * at))
    return ENGINE.prepare(
        plan, rows, tables, visibility=CAUSAL, num_heads=num_heads, kernel=kernel, bucket=bucket
    )


def test_choices_follow_from_shapes_alone() -> None:
    """Other rows in the same bucket have the same work, and so the same program."""
    plan, bucket = plan_of(PLAIN, "LBNHC", "bfloat16"), Bucket(24, 3, 6)
    batches = [prepared(plan, lengths, bucket=bucket) for lengths in ((24,), (1, 2, 3), ())]
    assert {b.kernel for b in batches} == {"triton"}
    assert len({b.shape for b in batches}) == 1
    shapes = {tuple(x.shape for x in jax.tree.leaves(b)) for b in batches}
    assert len(shapes) == 1
    assert len({jax.tree.structure(b) for b in batches}) == 1


def test_the_work_list_is_the_steps() -> None:
    batch = prepared(plan_of(PLAIN, "LBNHC", "bfloat16"), (9, 4), bucket=Bucket(24, 3, 6))
    (work,), (table,) = batch.shape.bound.work, batch.arrays.tables
    step = batch.host.step
    tiles = query_tiles(step.cu_seqlens, step.num_tokens, step.lo, step.hi, work.shape.queries)
    got = np.asarray(table)
    assert got.shape == (work.num_tiles, 8)
    assert got.reshape(-1)[: len(tiles)].tolist() == list(tiles)
    assert not got.reshape(-1)[len(tiles) :].any()


def test_queries_over_8_bit_storage_may_be_of_any_type() -> None:
    plan = plan_of(PLAIN, "LBNHC", "float8_e4m3fn")
    batch = prepared(plan, (9,))
    assert [w.query_dtype for w in batch.shape.bound.work] == ["float32", "float16", "bfloat16"]
    assert len(batch.arrays.tables) == len({w.table for w in batch.shape.bound.work})


def test_another_query_type_is_refused_by_name() -> None:
    plan = plan_of(PLAIN, "LBNHC", "bfloat16")
    batch, pool = prepared(plan, (4,)), ENGINE.allocate(plan)
    query = jnp.ones((4, 4, 32), jnp.float32)
    with pytest.raises(
        UnsupportedError,
        match="kernel 'triton' takes bfloat16 over a pool of bfloat16, got float32",
    ):
        ENGINE.forward_paged(pool, 0, query, None, None, batch)


def wide(head_size: int) -> PoolShape:
    return PoolShape("wide", (Group((Cells(1, head_size),), 4),), 24)


def test_what_triton_does_not_serve_goes_to_xla_by_the_rule() -> None:
    plan = plan_of(wide(288), "LBNHC", "float32")
    assert prepared(plan, (4,)).kernel == "xla"
    with pytest.raises(UnsupportedError, match=r"'triton' cannot serve .*head_size 288 is outside"):
        prepared(plan, (4,), kernel="triton")
    assert prepared(plan_of(wide(256), "LBNHC", "float32"), (4,)).kernel == "triton"


def test_a_row_that_splits_an_element_is_refused() -> None:
    """Rows of one byte, as a group of 8-bit cells leaves them: no whole number of elements."""
    from dataclasses import replace

    plan = plan_of(PLAIN, "LBNHC", "bfloat16")
    case = _case(ENGINE.allocate(plan).plan.cells[0])
    cell = replace(case.cells[0], word_bits=8, words_per_row=1, rows_per_cell=128)
    assert KERNEL.refuse(case) is None
    refusal = KERNEL.refuse(_case(cell))
    assert refusal is not None
    assert refusal.startswith("a row of the pool has 1 bytes, no multiple of the 2 of bfloat16;")


def _case(cell: Any, platform: str = "cpu") -> Any:
    from backends.jax_gpu.kernels.base import KernelCase

    return KernelCase(platform, 4, (cell,), num_tokens=8, num_rows=1, max_keys=64)


def test_triton_is_refused_on_the_cpu_by_name() -> None:
    engine, plan = create_engine("cpu"), plan_of(PLAIN, "LBNHC", "float32")
    assert engine.kernels == ("xla",)
    with pytest.raises(
        UnsupportedError,
        match="jax_gpu on cpu expects one of auto, xla, got 'triton'; it runs on GPUs alone",
    ):
        engine.prepare(plan, [], Tables(), visibility=CAUSAL, num_heads=2, kernel="triton",
                       bucket=Bucket(1, 1, 1))  # fmt: skip
    cell = engine.allocate(plan).plan.cells[0]
    gpu = TritonKernel(Chip((9, 0), 132))
    assert gpu.refuse(_case(cell)) == "it runs on gpu, the device is 'cpu'"
    toolkit = Toolkit("gpu", (gpu, XlaKernel()))
    assert select_kernel("auto", _case(cell, "gpu"), toolkit).kernel is gpu
    assert select_kernel("xla", _case(cell, "gpu"), toolkit).kernel == XlaKernel()


GPU: Any = SimpleNamespace(platform="gpu", compute_capability="9.0", core_count=132)


def test_a_gpu_gets_the_triton_kernel_of_its_chip() -> None:
    toolkit = toolkit_for(GPU)
    assert [kernel.name for kernel in toolkit.kernels] == ["triton", "xla"]
    assert toolkit.moves == TritonKernel(chip_of(GPU))
    assert chip_of(GPU) == Chip((9, 0), 132)


@pytest.mark.parametrize("missing", ["jax_triton", "triton"])
def test_a_gpu_without_jax_triton_is_an_error(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == missing else found(name)
    )
    with pytest.raises(
        MissingPackageError,
        match=rf"jax_gpu on .* needs {missing}, .*pip install 'pagestride\[jax-triton\]'",
    ):
        toolkit_for(GPU)
