"""The suites of ``pagestride bench``: every one runs, with both engines, and checks its work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from diffusion_runner.bench import record, suites
from diffusion_runner.bench.harness import Limits
from diffusion_runner.bench.options import Bench, Options, make_options, open_bench
from diffusion_runner.bench.plots import save_plot
from diffusion_runner.bench.scaled_model import ScaledModel
from diffusion_runner.bench.workload import (
    Geometry,
    Rows,
    Tables,
    check_agrees,
    dense_reference,
    random_data,
)
from diffusion_runner.cli import app
from diffusion_runner.errors import RunError
from tests.oracle import dense_attention

ONCE = Limits(rounds=1, seconds=0.01, least=1, warmup=0, settle=0)


@pytest.fixture(scope="module")
def bench() -> Bench:
    return open_bench(
        Options(
            device="cpu",
            dtypes=("float32",),
            layouts=("LBNHC", "BHLNC"),
            threads=1,
            quick=True,
            limits=ONCE,
        )
    )


@pytest.fixture(scope="module")
def results(bench: Bench) -> record.Results:
    return suites.measure(bench, ["attention", "write", "copy", "memory"])


def test_attention_times_both_engines_in_each_layout_beside_the_peers(
    results: record.Results,
) -> None:
    cases = [c for c in results.comparisons if c.suite == "attention"]
    assert len(cases) == 2
    names = [t.name for t in cases[0].timings]
    assert names == [
        "torch dense SDPA",
        "torch gather + SDPA",
        "jax.nn.dot_product_attention",
        "torch_cuda LBNHC",
        "torch_cuda BHLNC",
        "jax_gpu LBNHC",
        "jax_gpu BHLNC",
    ]
    assert cases[0].base == "torch dense SDPA"
    assert cases[0].details["kernels"] == {"torch_cuda": "sdpa", "jax_gpu": "xla"}
    assert all(t.seconds.median > 0 for case in cases for t in case.timings)


def test_moving_suites_have_a_copy_of_as_many_bytes_as_their_base(results: record.Results) -> None:
    write = next(c for c in results.comparisons if c.suite == "write")
    assert write.base == "memcpy of as many bytes"
    assert write.details["bytes"] == write.details["cells"] * 2 * 128 * 4
    assert {c.suite for c in results.comparisons} == {"attention", "write", "copy"}


def test_memory_counts_what_the_plan_allocates(results: record.Results) -> None:
    one, two, same = results.memories
    assert one.bytes[one.base] < one.bytes["dense, reserved at 8,192 tokens a row"]
    assert two.bytes["dense, padded to the longest row"] > 2 * two.bytes[two.base] * 0.9
    # four pictures of one prompt hold it once: fewer bytes than the tokens of their rows
    assert same.bytes[same.base] < same.bytes["dense, each row at its own length"]


def test_a_record_comes_back_as_it_was(results: record.Results, tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    record.save(results, path)
    back = record.load(path)
    assert back.machine == results.machine
    assert [c.timings for c in back.comparisons] == [c.timings for c in results.comparisons]
    assert back.memories == results.memories
    assert back.machine.versions["torch"].startswith("2.")
    path.write_text(json.dumps({"format": "other"}))
    with pytest.raises(RunError, match=r"expected a record of format pagestride-bench/1"):
        record.load(path)


def test_core_denoise_and_growth_run(bench: Bench, tmp_path: Path) -> None:
    found = suites.measure(bench, ["core", "denoise", "growth"])
    step = next(c for c in found.comparisons if c.case.startswith("one step"))
    # 670 of 1,070 tokens are not computed again: the operations allow between 2 and 3 times
    assert 2 < step.details["bound_by_operations"] < 3
    assert set(step.details["speedup_of_a_run"]) == {"torch_cuda", "jax_gpu"}
    assert {(g.name, g.axis) for g in found.growths} >= {
        ("torch_cuda", "S"),
        ("jax_gpu", "rows"),
        ("block manager, caching on", "blocks"),
        ("specs to a plan", "layers"),
    }
    picture = tmp_path / "bench.png"
    save_plot(found, picture)
    assert picture.read_bytes()[:4] == b"\x89PNG"
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    record.show(found, console)
    text = console.export_text()
    assert "exponent" in text
    assert "time / torch_cuda, prefix reused" in text


def test_nothing_to_draw_is_said(bench: Bench, tmp_path: Path) -> None:
    only_memory = suites.measure(bench, ["memory"])
    with pytest.raises(RunError, match=r"nothing to draw"):
        save_plot(only_memory, tmp_path / "x.png")
    assert not (tmp_path / "x.png").exists()


def test_the_reference_is_the_oracle() -> None:
    geometry, rows = Geometry(num_heads=4, num_kv_heads=2, head_size=16), Rows(((3, 5), (2, 2)))
    data = random_data(rows, geometry)
    got = dense_reference(rows, geometry, data)
    want = []
    for index, (queries, keys) in enumerate(rows.shapes):
        mask = np.ones((queries, keys), dtype=bool)
        want.append(dense_attention(*data.of_row(rows, index), mask)[0])
    np.testing.assert_allclose(got, np.concatenate(want), atol=1e-6)


def test_slots_lie_in_the_blocks_of_the_table() -> None:
    geometry, rows = Geometry(block_size=4), Rows(((1, 6), (1, 3)))
    tables = Tables(rows, geometry, shuffled=False)
    assert tables.slots([6, 3]).tolist() == [4, 5, 6, 7, 8, 9, 12, 13, 14]
    assert tables.num_blocks == 4


def test_a_candidate_that_does_other_work_is_not_timed() -> None:
    want = np.zeros((2, 1, 4), np.float32)
    with pytest.raises(RunError, match=r"x: its output differs from dense attention by 1"):
        check_agrees("x", want + 1, want, "float32")
    with pytest.raises(RunError, match=r"it was not timed"):
        check_agrees("x", np.full_like(want, np.nan), want, "float32")
    with pytest.raises(RunError, match=r"differs from dense attention by nan"):
        check_agrees("x", want[:1], want, "float32")


def test_operations_of_a_step() -> None:
    """Counted by hand for one layer: linear layers, then pairs of queries and keys."""
    model = ScaledModel(
        num_layers=1,
        hidden=2,
        mlp=3,
        prefix=2,
        target=1,
        geometry=Geometry(num_heads=1, num_kv_heads=1, head_size=1),
    )
    linear = 2 * (2 * 3 + 1 * 2 + 2 * 2 * 3)
    assert model.operations(reuse=True) == linear + 4 * 3
    assert model.operations(reuse=False) == 3 * linear + 4 * (1 + 2 + 3)
    assert model.speedup(2.0, 1.0) == 50 * 2 / (2 + 49)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["attack"], "suite: expected some of core, attention, write"),
        (["core", "--dtype", "int8"], "dtypes: expected some of float32, float16, bfloat16"),
        (["core", "--tables", "sorted"], "tables: expected one of shuffled, ascending"),
        (["core", "--threads", "0"], "threads: expected an int >= 1, got 0"),
        (["core", "--layout", "ABC"], "ABC"),
    ],
)
def test_the_command_refuses_what_it_does_not_know(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code != 0
    assert message in str(result.exception)


def test_the_command_writes_json_and_a_plot(tmp_path: Path) -> None:
    out, plot = tmp_path / "b.json", tmp_path / "b.png"
    arguments = ["write", "--quick", "--backend", "torch_cuda", "--layout", "NHD"]
    arguments += ["--dtype", "float32", "--threads", "1", "--json", str(out), "--plot", str(plot)]
    result = CliRunner().invoke(app, ["bench", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    written: Any = json.loads(out.read_text())
    assert [t["name"] for t in written["comparisons"][0]["timings"]] == [
        "memcpy of as many bytes",
        "torch_cuda LBNHC",
    ]
    assert plot.exists()


def test_an_option_is_what_the_command_said() -> None:
    options = make_options(tables="ascending", quick=True, threads=1)
    assert not options.shuffled
    assert options.limits.rounds < Limits().rounds
