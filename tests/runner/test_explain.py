"""``pagestride explain``: figures, places of cells, owners of bytes, differences, bad input."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from diffusion_runner.explain.diff import difference
from diffusion_runner.explain.figures import figures_of, human_bytes, transfer_blocks
from diffusion_runner.explain.geometry import Geometry, lay_out, read_config
from diffusion_runner.explain.locate import (
    CellQuery,
    describe_byte,
    find_cell,
    parse_address,
    parse_cell,
)
from layout_core import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheLayout,
    make_config,
    owners_of_byte,
    padding_of,
    resolve_layout,
)
from tests.core.brute import cells
from tests.core.test_runs import PLANS
from tests.runner.test_cli import call

SIX = tuple(KVCacheLayout)


def plans(geometry: Geometry) -> dict[str, Any]:
    return {v.layout.name: v.plan for v in lay_out(geometry.cache(), SIX) if v.plan is not None}


def test_the_figures_of_a_model() -> None:
    """Runs by hand: 28 layers, 8 heads, blocks of 16 tokens, 2 ranks, 16 blocks."""
    geometry = Geometry(layers=28, blocks=500, heads=8, head_size=128, block_size=16)
    counts = {
        name: tuple(figure.count for figure in figures_of(plan))
        for name, plan in plans(geometry).items()
    }
    # page, block, layer, head, rank, adjacent, scattered
    assert counts == {
        "LBHNC": (1, 28, 1, 1, 28, 28, 16 * 28),
        "LBNHC": (1, 28, 1, 16, 28 * 16, 28, 16 * 28),
        "LHBNC": (8, 224, 1, 1, 112, 224, 16 * 224),
        "BLHNC": (1, 1, 500, 1, 28, 1, 16),
        "BLNHC": (1, 1, 500, 16, 28 * 16, 1, 16),
        "BHLNC": (8, 1, 4000, 1, 1, 1, 16),
    }


def test_padding_is_counted_once_and_carried() -> None:
    geometry = Geometry(layers=4, blocks=5, groups=2, page_size_padded=2304)
    for name, plan in plans(geometry).items():
        figures = figures_of(plan)
        # two groups overlay each other, so their padding is the same bytes
        assert figures.padding.unused == 2 * 5 * 256, name
        assert figures.padding.by_group == (2560, 2560)
        assert figures.block.padding_bytes == (2 * 256 if name.startswith("B") else 0)
        assert [runs.count for runs in figures.block.runs] == ([1, 1] if name[0] == "B" else [2, 2])


def test_transfers_leave_the_null_block_out_and_fit_the_pool() -> None:
    plan = plans(Geometry(blocks=6))["LBHNC"]
    assert transfer_blocks(plan, 3) == (range(1, 4), range(1, 6, 2))
    assert transfer_blocks(plan, 99) == (range(1, 6), range(1, 6, 2))
    only = plans(Geometry(blocks=1))["LBHNC"]
    assert transfer_blocks(only, 4) == (range(1), range(0, 1, 2))


@pytest.mark.parametrize(
    ("size", "words"),
    [(0, "0 B"), (1023, "1,023 B"), (2048, "2 KiB"), (1536, "1.5 KiB"), (7 << 40, "7 TiB")],
)
def test_sizes_in_words(size: int, words: str) -> None:
    assert human_bytes(size) == words


@pytest.mark.parametrize(("name", "plan"), PLANS, ids=[name for name, _ in PLANS])
def test_cells_are_found_where_the_bytes_are(name: str, plan: Any) -> None:
    for layer, view in enumerate(plan.layers):
        for (b, h, n), content in cells(view):
            ratio, tokens = view.blocks_per_manager_block, view.shape[2]
            query = CellQuery(layer, b // ratio, h, b % ratio * tokens + n)
            place = find_cell(plan, query)
            assert (place.start, place.stop) == (content.start, content.stop)
            assert place.indices == (layer, b, h, n)
            assert place.null == (b // ratio == 0)


@pytest.mark.parametrize(("name", "plan"), PLANS, ids=[name for name, _ in PLANS])
def test_every_byte_is_described_by_its_owners(name: str, plan: Any) -> None:
    for byte in range(plan.size_bytes):
        said = owners_of_byte(plan, byte)
        words = describe_byte(plan, byte)
        assert words.startswith("padding") == said.is_padding
        for owner in said.owners:
            assert f"({owner.name}" in words
            assert f"block {owner.block}" in words
            assert f"head {owner.head}, token {owner.token}" in words
        assert ("held back" in words) == any(owner.null for owner in said.owners)
        assert ("overlay" in words) == (len(said.owners) > 1)


def test_differences_are_what_enumeration_says() -> None:
    by_scenario: dict[str, list[Any]] = {}
    for name, plan in PLANS:
        by_scenario.setdefault(name.rsplit("-", 1)[0], []).append(plan)
    compared = 0
    for found in by_scenario.values():
        for a, b in combinations(found, 2):
            if [v.shape for v in a.layers] != [v.shape for v in b.layers]:
                continue
            said = difference(a, b)
            places = [
                [
                    (i, *index, content.start)
                    for i, v in enumerate(p.layers)
                    for index, content in cells(v)
                ]
                for p in (a, b)
            ]
            moved = [(x, y) for x, y in zip(*places) if x != y]
            assert (said.cells, said.moved) == (len(places[0]), len(moved))
            first = sorted(moved, key=lambda pair: (pair[0][4], pair[0][0]))[:5]
            assert [(m.first, m.second) for m in said.examples] == [(x[4], y[4]) for x, y in first]
            compared += 1
    assert compared > 40


def test_layouts_that_are_the_same_memory_do_not_differ() -> None:
    one_head = plans(Geometry(heads=1))
    said = difference(one_head["LBHNC"], one_head["LBNHC"])
    assert (said.moved, said.examples) == (0, ())


def test_differences_of_real_sizes() -> None:
    real = plans(Geometry(layers=128, blocks=1_000_000, heads=8, head_size=128, block_size=16))
    said = difference(real["LBHNC"], real["BLHNC"])
    assert said.cells == 128 * 1_000_000 * 8 * 16
    # pages of layer i and block b with i * 1e6 + b == b * 128 + i
    agreeing = [i for i in range(128) if i * 999_999 % 127 == 0 and i * 999_999 // 127 < 1_000_000]
    assert said.same == 128 * len(agreeing) == 256
    assert said.examples[0].cell == CellQuery(0, 1, 0, 0)


# --- the command -------------------------------------------------------------------------------


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str, str]:
    status = call(monkeypatch, *arguments)
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_explain_prints_the_figures_and_writes_what_is_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    names = ["deep/a.svg", "a.png", "a.html"]
    files = [argument for name in names for argument in ("--out", str(tmp_path / name))]
    figures = tmp_path / "a.json"
    status, out, _ = run(
        monkeypatch,
        capsys,
        *("explain", *files, "--json", str(figures), "--cell", "1 2 0 3", "--address", "0x1400"),
    )
    assert status == 0
    assert "3 layers · 4 blocks of 4 tokens · 2 KV heads · bfloat16 · 24 KiB" in out
    assert "one block, all layers" in out
    assert "LBHNC  layer 0 (layers.0), block 2, head 1, token 0: K[0], byte 0 of its 256" in out
    assert "byte 0x1400 (5,120)" in out
    assert "layer 1 (layers.1), block 2, head 0, token 3" in out
    for name in names:
        assert (tmp_path / name).stat().st_size > 5000
        assert f"written: {tmp_path / name}" in out
    record = json.loads(figures.read_text())
    by_layout = {item["layout"]: item for item in record["layouts"]}
    assert list(by_layout) == [layout.name for layout in SIX]
    assert by_layout["LHBNC"]["runs"]["block"]["runs"] == 6
    assert by_layout["BHLNC"]["cell"]["start"] == 0x3700
    assert by_layout["BHLNC"]["cell"]["value_start"] == 0x3780
    owner = by_layout["LBNHC"]["address"]["owners"][0]
    assert (owner["layer"], owner["block"], owner["head"], owner["token"]) == (0, 2, 0, 2)


def test_explain_reads_a_config(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    spec = FullAttentionSpec(
        block_size=4, num_kv_heads=2, head_size=8, dtype="float16", page_size_padded=320
    )
    groups = [KVCacheGroupSpec(["full.0"], spec), KVCacheGroupSpec(["local.0"], spec)]
    config = make_config(groups, 6, "NHD")
    path = tmp_path / "config.json"
    path.write_text(config.to_json())
    cache = read_config(path)
    carried = [v for v in lay_out(cache, SIX) if v.carried]
    assert [v.layout.name for v in carried] == ["LBNHC"]
    assert carried[0].plan == resolve_layout(config)
    assert padding_of(resolve_layout(config)).unused == 6 * 64
    status, out, _ = run(
        monkeypatch,
        capsys,
        *("explain", "--config", str(path), "--layout", "NHD", "--address", "330"),
    )
    assert status == 0
    assert "2 layers · 2 groups · 6 blocks of 4 tokens" in out
    assert (
        "LBNHC  layer 0 (full.0, group 0), block 1, head 0, token 0: K[5], byte 10 of its 32; and "
        "layer 1 (local.0, group 1), block 1, head 0, token 0: K[5], byte 10 of its 32 (groups "
        "overlay each other: block 1 belongs to one at a time)"
    ) in out
    status, out, _ = run(
        monkeypatch,
        capsys,
        *("explain", "--config", str(path), "--layout", "NHD", "--address", "300"),
    )
    assert "padding, 44 bytes past layer 0 (full.0), block 0, head 1, token 3; the next cell" in out
    assert "the next cell starts 20 bytes on" in out


PICTURES = {
    "layouts.svg": (),
    "overlay.svg": (
        *("--layers", "4", "--groups", "2", "--page-size-padded", "2304"),
        *("--layout", "LBHNC", "--layout", "BLHNC"),
    ),
    "diff.svg": ("--diff", "LBHNC", "LBNHC"),
}


@pytest.mark.parametrize("name", PICTURES)
def test_the_pictures_of_the_documentation_are_what_is_drawn(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    name: str,
) -> None:
    out = tmp_path / name
    assert run(monkeypatch, capsys, "explain", "--out", str(out), *PICTURES[name])[0] == 0
    kept = Path(__file__).parents[2] / "docs" / "images" / name
    assert out.read_text() == kept.read_text(), "run `make pictures`"


def test_a_damaged_config_is_refused_by_field(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The carried layout is resolved from the config's own tensors, which may be wrong."""
    config = make_config(Geometry().cache().groups, 4, "LBHNC")
    config.kv_cache_tensors[0].layer_stride += 256
    path = tmp_path / "config.json"
    path.write_text(config.to_json())
    status, out, err = run(monkeypatch, capsys, "explain", "--config", str(path))
    assert status == 2
    assert "config.kv_cache_tensors[0].layer_stride: layout LBHNC, 4 blocks" in err
    assert out == ""


def test_explain_shows_where_two_layouts_disagree(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    figures, page = tmp_path / "d.json", tmp_path / "d.html"
    status, out, _ = run(
        monkeypatch,
        capsys,
        *("explain", "--diff", "HND", "BLHNC", "--json", str(figures), "--out", str(page)),
    )
    assert status == 0
    assert "LBHNC and BLHNC: 80 of 96 cells (83%) lie elsewhere, first these:" in out
    said = json.loads(figures.read_text())["diff"]
    assert (said["first"], said["second"], said["same"]) == ("LBHNC", "BLHNC", 16)
    assert said["examples"][0] == {"cell": "0 1 0 0", "first": 0x800, "second": 0x1800}
    assert page.read_text().count('opacity="0.16"') == 32  # the cells that agree, in both
    status, out, _ = run(monkeypatch, capsys, "explain", "--heads", "1", "--diff", "LBHNC", "LBNHC")
    assert "0 of 48 cells (0%) lie elsewhere; they are the same memory" in out


def test_refused_layouts_are_said_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = run(monkeypatch, capsys, "explain", "--page-size-padded", "4096")
    assert status == 0
    assert "refused layout LHBNC: cannot pad a page of 2 heads to 4096 bytes" in out


BAD_INPUT = {
    "cell": (("--cell", "1 2 3"), "cell: expected four integers 'l b h n', got '1 2 3'"),
    "cell layer": (("--cell", "3 0 0 0"), "cell: expected a layer in [0, 3), got 3"),
    "cell block": (("--cell", "0 4 0 0"), "block: expected an int in [0, 4), got 4"),
    "cell head": (("--cell", "0 1 2 0"), "cell: expected a head in [0, 2), got 2"),
    "cell token": (("--cell", "0 1 0 4"), "cell: expected a token in [0, 4), got 4"),
    "address": (("--address", "12q"), "address: expected a byte such as 0x1F400 or 128000"),
    "address outside": (
        ("--address", "0x6000"),
        "byte: expected an int in [0, 0x6000), the 24,576 bytes of the allocation, got 0x6000",
    ),
    "layout": (("--layout", "NCHW"), "layout: expected one of LBHNC, LBNHC, LHBNC, BLHNC"),
    "diff with layout": (
        ("--diff", "LBHNC", "BLHNC", "--layout", "LBNHC"),
        "layout: --diff names its two layouts, so expected no --layout beside it",
    ),
    "diff with itself": (
        ("--diff", "HND", "LBHNC"),
        "diff: expected two layouts, got HND and LBHNC, which are one",
    ),
    "diff refused": (
        ("--diff", "LHBNC", "BLHNC", "--page-size-padded", "4096"),
        "diff: layout LHBNC: cannot pad a page of 2 heads",
    ),
    "nothing holds it": (
        ("--layout", "LHBNC", "--page-size-padded", "4096"),
        "layout LHBNC: cannot pad a page of 2 heads",
    ),
    "out": (("--out", "x.gif"), "out: expected a name that ends in .svg, .png, .html, got x.gif"),
    "theme": (("--theme", "sepia"), "theme: expected one of light, dark, got 'sepia'"),
    "show": (("--show", "1,2,3"), "show: expected four integers >= 2 'l,b,h,n', got '1,2,3'"),
    "show too much": (
        ("--show", "99,99,9,9"),
        "show: expected at most 20,000 cells in all, got '99,99,9,9'",
    ),
    "block": (("--block", "9"), "block: expected an int in [0, 4), got 9"),
    "transfer": (("--transfer", "0"), "transfer: expected an int >= 1, got 0"),
    "ranks": (("--ranks", "0"), "ranks: expected an int >= 1, got 0"),
    "layers": (("--layers", "0"), "layers: expected an int >= 1, got 0"),
    "groups": (("--groups", "2"), "groups: expected a divisor of the 3 layers, got 2"),
    "heads": (("--heads", "0"), "FullAttentionSpec.num_kv_heads: expected an int >= 1, got 0"),
    "dtype": (("--dtype", "float9"), "dtype: expected one of float64, float32"),
    "kernel": (
        ("--kernel-block-size", "3"),
        "kernel_block_size: expected a divisor of the block size 4, got 3",
    ),
    "no file": (("--config", "no.json"), "config: cannot read no.json"),
    "config and flags": (
        ("--config", "no.json", "--layers", "3", "--block-size", "4"),
        "config: it says what the cache holds, so expected no --layers, --block-size beside it",
    ),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_line_and_writes_nothing(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    case: str,
) -> None:
    arguments, message = BAD_INPUT[case]
    monkeypatch.chdir(tmp_path)
    status, out, err = run(
        monkeypatch, capsys, "explain", "--out", "a.svg", "--json", "a.json", *arguments
    )
    assert status == 2
    assert message in err
    assert err.count("\n") == 1
    assert err.startswith("pagestride: ")
    assert out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("text", "byte"), [("0x1F400", 128000), ("128000", 128000), ("1_0", 10)])
def test_addresses_are_read_in_both_bases(text: str, byte: int) -> None:
    assert parse_address(text) == byte


def test_cells_are_read_with_blanks_or_commas() -> None:
    assert parse_cell(" 1, 2 3,4 ") == CellQuery(1, 2, 3, 4)
