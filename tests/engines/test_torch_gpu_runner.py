"""``make gpu`` where there is no GPU: what it says, what it would run, and what it writes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tools import gpu

ROOT = Path(__file__).resolve().parents[2]
HERE = gpu.Machine("a GPU", "9.0")


def stand_in(**fields: object) -> gpu.Slice:
    defaults: dict[str, object] = {"name": "one", "what": "a try", "command": ("-c", "print(7)")}
    return gpu.Slice(**{**defaults, **fields})  # type: ignore[arg-type]


def test_without_a_device_it_says_so_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu, "machine", lambda: gpu.Machine(None, None))
    for arguments in (["--dry-run"], []):
        assert gpu.main([*arguments, "--results", str(tmp_path)]) == 1
        assert "no CUDA device" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [], "nothing is recorded that was not tried on a device"


def test_the_machine_is_described_without_one() -> None:
    here = gpu.machine()
    assert here.packages["torch"]
    assert (here.device is None) == (here.capability is None)


def test_slices_name_what_is_there() -> None:
    """Files and modules of every command exist; each has a name of its own."""
    all_slices = gpu.slices()
    assert len({one.name for one in all_slices}) == len(all_slices)
    for one in all_slices:
        for part in one.command:
            if part.endswith(".py"):
                assert (ROOT / part).is_file(), part
        at = one.command.index("-m") + 1
        assert (ROOT / (one.command[at].replace(".", "/") + ".py")).is_file()
    assert {part for one in all_slices if one.name.startswith("bench") for part in one.command} > {
        "long",
        "layouts",
        "few",
        "spans",
        "write",
    }


def test_what_cannot_run_is_recorded_with_its_reason(tmp_path: Path) -> None:
    for one, reason in (
        (stand_in(packages=("no_such_package",)), "not installed: no_such_package"),
        (stand_in(tool="no-such-tool"), "no-such-tool is not on the PATH"),
    ):
        outcome = gpu.run(one, HERE, tmp_path)
        assert (outcome.state, outcome.reason, outcome.output) == (gpu.NOT_RUN, reason, "")
    assert gpu.run(stand_in(), gpu.Machine(None, None), tmp_path).reason == "no CUDA device"


def test_a_record_has_device_versions_clocks_and_date(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    writes = "import sys, json; json.dump({'x': 1}, open(sys.argv[2], 'w')); print('done')"
    fails = "print('before'); raise SystemExit(3)"
    known = (
        stand_in(name="works", command=("-c", writes), result="--json"),
        stand_in(name="fails", command=("-c", fails)),
    )
    monkeypatch.setattr(gpu, "slices", lambda: known)
    monkeypatch.setattr(gpu, "machine", lambda: HERE)
    assert gpu.main(["--results", str(tmp_path)]) == 1
    works, fails_ = (
        json.loads((tmp_path / f"gpu-{n}.json").read_text()) for n in ("works", "fails")
    )
    assert works.keys() == {
        "date", "machine", "slice", "what", "command", "state", "reason", "seconds", "output",
        "figures",
    }  # fmt: skip
    assert works["machine"].keys() >= {"device", "capability", "python", "packages", "clocks"}
    assert (works["state"], works["figures"], works["output"]) == ("ok", {"x": 1}, "done\n")
    assert (fails_["state"], fails_["output"]) == ("failed", "before\n")
    for path in (sys.executable, str(tmp_path)):
        assert path not in works["command"], "paths of a machine are not recorded"
    assert {path.name for path in tmp_path.iterdir()} == {"gpu-works.json", "gpu-fails.json"}
    assert gpu.main(["--slice", "works", "--results", str(tmp_path)]) == 0


def test_a_slice_is_stopped_at_its_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu, "LIMIT_SECONDS", 1)
    slow = stand_in(command=("-c", "import time; print('x', flush=True); time.sleep(30)"))
    outcome = gpu.run(slow, HERE, tmp_path)
    assert outcome.state == gpu.FAILED
    assert outcome.output.endswith("stopped after 1 s")


@pytest.mark.parametrize("part", ["long", "spans", "write", "few", "layouts"])
def test_the_bench_runs_on_small_shapes(part: str, tmp_path: Path) -> None:
    """Its code, not its numbers: kernels are checked against each other before they are timed."""
    from bench import gpu_attention

    path = tmp_path / "out.json"
    gpu_attention.main([part, "--device", "cpu", "--tiny", "--rounds", "1", "--json", str(path)])
    written = json.loads(path.read_text())
    (result,) = written["results"]
    assert result["absent"] == {}
    assert all(value > 0 for value in result["ratio"].values())
    assert len(list(gpu_attention.cases(part, tiny=False))) >= 2


def test_spans_count_the_work_that_is_left() -> None:
    from bench.gpu_attention import Case

    case = Case("spans", 6, 6, span=2)
    assert case.pairs == 1 + 2 + 3 + 4 + 2 * 6
    assert Case("long", 6, 9).pairs == 54
