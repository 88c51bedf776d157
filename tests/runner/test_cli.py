"""The commands as a user calls them: what they print, write and answer to bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import diffusion_runner.compare as compare_module
from diffusion_runner import cli
from diffusion_runner.run import Runner, RunResult
from layout_core import KVCacheLayout

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Exit status of ``pagestride`` with these arguments, in this process."""
    monkeypatch.setattr(sys, "argv", ["pagestride", *arguments])
    monkeypatch.delenv(cli.BACKEND_VARIABLE, raising=False)
    with pytest.raises(SystemExit) as stop:
        cli.main()
    code = stop.value.code
    return code if isinstance(code, int) else 0


def test_run_writes_a_picture_and_its_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out, figures = tmp_path / "deep" / "seven.png", tmp_path / "seven.json"
    arguments = ("--prompt", "a handwritten seven", "--count", "2", "--steps", "3")
    status = call(
        monkeypatch,
        *("run", "--backend", "torch_cuda", "--layout", "NHD", *arguments),
        *("--out", str(out), "--json", str(figures)),
    )
    assert status == 0
    assert out.read_bytes().startswith(PNG_SIGNATURE)
    record = json.loads(figures.read_text())
    assert record["layout"] == "LBNHC"  # the alias is recorded under the canonical name
    assert record["kernel"] == "sdpa"
    assert record["query_tokens"] == 2 * (20 + 1) + 3 * 2 * 2 * 16
    printed = capsys.readouterr().out
    assert "234 computed; 318 without prefix reuse" in printed
    assert str(out) in printed.replace("\n", "")


BAD_INPUT = {
    "layout": (
        ("--backend", "torch_cuda", "--layout", "NCHW"),
        "layout: expected one of LBHNC, LBNHC, LHBNC, BLHNC, BLNHC, BHLNC",
    ),
    "backend": (("--backend", "tpu"), "backend: expected one of torch_cuda, jax_gpu, got 'tpu'"),
    "no backend": ((), "backend: expected --backend or $PAGESTRIDE_BACKEND with one of"),
    "device": (("--backend", "torch_cuda", "--device", "abacus"), "abacus"),
    "prompt": (
        ("--backend", "torch_cuda", "--prompt", "x" * 100),
        "is 101 tokens long (begin-of-text and 100 bytes), the model's limit is 48",
    ),
    "pool": (
        ("--backend", "torch_cuda", "--prompt", "a handwritten seven", "--pool-blocks", "4"),
        "one request needs 8 blocks of 8 tokens and the null block, so at least 9, got 4",
    ),
    "guidance": (
        ("--backend", "torch_cuda", "--guidance", "nan"),
        "guidance: expected a finite number >= 0, got nan",
    ),
    "steps": (("--backend", "torch_cuda", "--steps", "0"), "steps: expected an int >= 1, got 0"),
    "dtype": (("--backend", "torch_cuda", "--kv-dtype", "float9"), "dtype: expected one of"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_line_and_writes_nothing(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    case: str,
) -> None:
    arguments, message = BAD_INPUT[case]
    status = call(
        monkeypatch,
        *("run", *arguments),
        *("--out", str(tmp_path / "x.png"), "--json", str(tmp_path / "x.json")),
    )
    printed = capsys.readouterr()
    assert status == 2
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert printed.err.startswith("pagestride: ")
    assert printed.out == ""
    assert list(tmp_path.iterdir()) == []


def test_bad_input_from_a_shell(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "diffusion_runner", "run", "--backend", "tpu", "--out", "x.png"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == "pagestride: backend: expected one of torch_cuda, jax_gpu, got 'tpu'\n"
    assert list(tmp_path.iterdir()) == []


def test_the_backend_may_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["pagestride"])
    monkeypatch.setenv(cli.BACKEND_VARIABLE, "torch_cuda")
    assert cli._backend(None) == "torch_cuda"
    assert cli._backend("jax_gpu") == "jax_gpu"


def test_compare_agrees_over_all_twelve(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out, figures = tmp_path / "compare.png", tmp_path / "compare.json"
    arguments = ("--prompt", "a handwritten two", "--prompt", "7", "--steps", "3")
    status = call(monkeypatch, "compare", *arguments, "--out", str(out), "--json", str(figures))
    assert status == 0
    assert out.read_bytes().startswith(PNG_SIGNATURE)
    runs = json.loads(figures.read_text())["runs"]
    assert [(run["backend"], run["layout"]) for run in runs] == [
        (backend, layout.name) for backend in ("torch_cuda", "jax_gpu") for layout in KVCacheLayout
    ]
    for run in runs:
        assert run["device"] == "cpu"
        assert run["kernel"] == {"torch_cuda": "sdpa", "jax_gpu": "xla"}[run["backend"]]
        assert run["seconds"] > 0
        assert run["pool_bytes"] == runs[0]["pool_bytes"]
        assert 0.0 <= run["max_abs_diff"] <= 1e-3
    assert "all 12 runs agree within 0.001" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [0.002, float("nan")])
def test_compare_fails_where_one_layout_differs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wrong: float
) -> None:
    """A planted difference in one layout of one engine turns the verdict."""
    generate = Runner.generate

    def planted(self: Runner, settings: Any, **keywords: Any) -> RunResult:
        result = generate(self, settings, **keywords)
        if settings.layout is KVCacheLayout.BLNHC:
            result.images[0, 0, 0] += np.float32(wrong)
        return result

    monkeypatch.setattr(Runner, "generate", planted)
    monkeypatch.setattr(compare_module, "COMPARED_BACKENDS", ("torch_cuda",))
    status = call(monkeypatch, "compare", "--prompt", "7", "--steps", "2")
    assert status == 1
    assert "1 of 6 runs differ from the first by more than 0.001" in capsys.readouterr().out


def test_layouts_names_all_six(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "layouts") == 0
    printed = capsys.readouterr().out
    for layout in KVCacheLayout:
        assert layout.name in printed


def test_doctor_says_what_is_there_and_what_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "doctor", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    by_device = {(entry["backend"], entry["device"]): entry for entry in report["backends"]}
    for backend, kernel in (("torch_cuda", "sdpa"), ("jax_gpu", "xla")):
        assert by_device[backend, "cpu"]["works"]
        assert kernel in by_device[backend, "cpu"]["kernels"]
        gpu = by_device[backend, "cuda"]
        assert gpu["works"] or "cuda" in gpu["problem"]
    assert report["packages"]["torch"]
    assert call(monkeypatch, "doctor") == 0
    assert "torch_cuda" in capsys.readouterr().out


def test_doctor_explains_which_kernel_serves_a_shape(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a machine without a GPU too: it says what was assumed."""
    shape = ("--queries", "1024", "--keys", "8192", "--json")
    assert call(monkeypatch, "doctor", "--device", "cpu", *shape) == 0
    choice = json.loads(capsys.readouterr().out)
    assert (choice["kernel"], choice["assumed"]) == ("sdpa", None)
    assert ["triton", "runs on CUDA devices alone"] in choice["kernels"]
    for more, kernel in (((), "gather"), (("--bucket",), "triton"), (("--causal",), "triton")):
        assert call(monkeypatch, "doctor", "--device", "cuda", *shape, *more) == 0
        choice = json.loads(capsys.readouterr().out)
        assert choice["kernel"] == kernel
        assert choice["kernels"][-1][0] == "sdpa"
    assert call(monkeypatch, "doctor", "--device", "cuda", *shape[:-1], "--layout", "HND") == 0
    printed = capsys.readouterr().out
    assert "kernel gather" in printed
    assert call(monkeypatch, "doctor", "--queries", "8", "--keys", "7") == 2
    assert "span must lie within" in capsys.readouterr().err


def test_help_teaches(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "run", "--help") == 0
    printed = capsys.readouterr().out
    for word in ("--backend", "--no-prefix-reuse", "--guidance", "--block-size", "--json"):
        assert word in printed
