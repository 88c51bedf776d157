"""``pagestride advise``: ranks by counted runs, and reasons that agree with the counts."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffusion_runner.advise import Advice, Use, advise, cutting_axes
from diffusion_runner.explain.geometry import Geometry
from layout_core import KVCacheLayout
from tests.runner.test_cli import call

MODEL = Geometry(layers=32, blocks=1000, heads=8, head_size=128, block_size=16)


def places(advice: Advice) -> dict[str, tuple[int | None, int]]:
    return {item.layout.name: (item.place, item.runs) for item in advice.ranked}


def test_the_ranks_of_a_model() -> None:
    """By hand: 32 layers, 8 heads, blocks of 16 tokens, 16 blocks, 2 ranks."""
    cache = MODEL.cache()
    assert places(advise(cache, Use.ATTENTION)) == {
        "LHBNC": (1, 16),
        "LBHNC": (2, 16),
        "BLHNC": (2, 16),
        "BHLNC": (2, 16),
        "LBNHC": (5, 256),
        "BLNHC": (5, 256),
    }
    assert places(advise(cache, Use.OFFLOAD)) == {
        "BLHNC": (1, 1),
        "BHLNC": (1, 1),
        "BLNHC": (3, 1),
        "LBHNC": (4, 32),
        "LBNHC": (5, 32),
        "LHBNC": (6, 256),
    }
    assert places(advise(cache, Use.TRANSFER, transfer=4)) == {
        "BLHNC": (1, 4),
        "BHLNC": (1, 4),
        "BLNHC": (3, 4),
        "LBHNC": (4, 128),
        "LBNHC": (5, 128),
        "LHBNC": (6, 1024),
    }
    assert places(advise(cache, Use.RESHARD, transfer=1, ranks=4)) == {
        "BHLNC": (1, 4),
        "LBHNC": (2, 4 * 32),
        "BLHNC": (2, 4 * 32),
        "LHBNC": (4, 32 * 8),
        "LBNHC": (5, 4 * 32 * 16),
        "BLNHC": (5, 4 * 32 * 16),
    }


@pytest.mark.parametrize("use", Use)
def test_best_comes_first_and_equals_share_a_place(use: Use) -> None:
    advice = advise(MODEL.cache(), use)
    keys = [(item.runs, *item.ties) for item in advice.ranked]
    assert keys == sorted(keys)
    assert [item.place for item in advice.ranked] == [keys.index(key) + 1 for key in keys]
    assert len({item.layout for item in advice.ranked}) == 6


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(list(KVCacheLayout)), st.data())
def test_the_axes_that_the_reason_names_make_up_the_count(
    layout: KVCacheLayout, data: st.DataObject
) -> None:
    """One block of a dense cache: a run for each index of the axes outside the cut."""
    sizes = {axis: data.draw(st.integers(1, 5), label=axis) for axis in "LBHN"}
    cache = Geometry(
        layers=sizes["L"],
        blocks=sizes["B"] + 3,
        heads=sizes["H"],
        head_size=2,
        block_size=sizes["N"],
    ).cache()
    sizes["B"] += 3
    item = next(i for i in advise(cache, Use.OFFLOAD, transfer=1).ranked if i.layout is layout)
    innermost, outside = cutting_axes(layout, "B", sizes)
    assert innermost == "B"
    assert item.runs == prod(sizes[axis] for axis in outside)
    if outside:
        verb = "lie outside B" if len(outside) > 1 else "lies outside B"
        assert item.reason.startswith(f"{' and '.join(outside)} {verb}: a run for each ")
    else:
        assert item.reason.startswith("a block of all layers lies together: runs of ")


def test_padding_that_a_copy_carries_is_said() -> None:
    advice = advise(Geometry(page_size_padded=2304).cache(), Use.OFFLOAD)
    best = advice.ranked[0]
    assert best.layout is KVCacheLayout.BLHNC
    assert best.reason.endswith("runs of 6.5 KiB, 512 B of it padding that is carried along")


def test_layouts_that_cannot_hold_it_come_last_with_the_reason() -> None:
    advice = advise(Geometry(page_size_padded=2304).cache(), Use.TRANSFER)
    last = [item for item in advice.ranked if item.place is None]
    assert [item.layout.name for item in last] == ["LHBNC", "BHLNC"]
    assert advice.ranked[-2:] == tuple(last)
    assert "cannot pad a page of 2 heads" in last[0].reason


def test_fewer_heads_than_ranks() -> None:
    """Ranks that share a head all take it, and those left without one take nothing."""
    advice = advise(Geometry(heads=1, layers=2).cache(), Use.RESHARD, transfer=1, ranks=4)
    assert places(advice)["BHLNC"] == (1, 4)
    three = advise(Geometry(heads=3, layers=2).cache(), Use.RESHARD, transfer=1, ranks=2)
    assert places(three)["LBHNC"] == (2, 4)


def test_groups_are_counted_each_for_itself() -> None:
    advice = advise(Geometry(layers=4, groups=2).cache(), Use.OFFLOAD)
    assert advice.counted == "one block of each group, all layers"
    assert places(advice)["BLHNC"] == (1, 2)
    assert places(advice)["LBHNC"][1] == 4


def test_the_command_prints_and_writes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "deep" / "advice.json"
    assert call(monkeypatch, "advise", "--layers", "32", "--json", str(path)) == 0
    out = capsys.readouterr().out
    for use in Use:
        assert f"{use}: " in out
    assert "a block of all layers lies together" in out
    assert "Each run is one copy between the device and the host." in out
    record = json.loads(path.read_text())
    assert [item["use"] for item in record["uses"]] == [use.value for use in Use]
    assert record["uses"][1]["ranked"][0]["runs"] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--use", "cooking"),
            "use: expected one of attention, offload, transfer, reshard, got 'cooking'",
        ),
        (("--ranks", "1"), "ranks: expected an int >= 2, got 1"),
        (("--transfer", "0"), "transfer: expected an int >= 1, got 0"),
        (("--layers", "0"), "layers: expected an int >= 1, got 0"),
    ],
)
def test_bad_input_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    status = call(monkeypatch, "advise", "--json", str(tmp_path / "a.json"), *arguments)
    printed = capsys.readouterr()
    assert (status, printed.out) == (2, "")
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
