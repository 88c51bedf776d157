"""Pictures of plans: what is drawn is what the bytes say, no text lies on another."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import combinations, pairwise
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from diffusion_runner.explain.build import Explained, explain, panels, picture
from diffusion_runner.explain.diff import diff_picture, difference, pale_where_equal
from diffusion_runner.explain.excerpt import Excerpt, Gap, Row, Shown, excerpt_of, pick
from diffusion_runner.explain.geometry import Cache, Geometry
from diffusion_runner.explain.locate import CellQuery
from diffusion_runner.explain.page import page_text, plan_record
from diffusion_runner.explain.picture import PANEL_INSIDE
from diffusion_runner.explain.png import SCALE, Fonts, font_of, png_bytes
from diffusion_runner.explain.scene import CSS, DARK, HUES, LIGHT, Rect, Scene, Text
from diffusion_runner.explain.svg import svg_text
from layout_core import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheLayout,
    ResolvedLayout,
    count_runs,
)
from tests.core.brute import cells
from tests.core.test_runs import PLANS

SIX = tuple(KVCacheLayout)
FEW = Shown(layers=2, blocks=3, heads=2, tokens=2, whole=1)

UNLIKE = Cache(
    (
        KVCacheGroupSpec(
            ["a.0", "a.1"],
            FullAttentionSpec(block_size=4, num_kv_heads=4, head_size=32, dtype="bfloat16"),
        ),
        KVCacheGroupSpec(
            ["b.0", "b.1", "b.2"],
            FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=32, dtype="bfloat16"),
        ),
    ),
    4,
    None,
)
CACHES: dict[str, Cache] = {
    "small": Geometry().cache(),
    "one": Geometry(layers=1, blocks=1, heads=1, block_size=1).cache(),
    "padded groups": Geometry(layers=4, groups=2, page_size_padded=2304).cache(),
    "much padding": Geometry(page_size_padded=65536).cache(),
    "real": Geometry(layers=128, blocks=1_000_000, heads=8, head_size=128, block_size=16).cache(),
    "many heads": Geometry(layers=40, blocks=999, heads=64, block_size=128).cache(),
    "split": Geometry(layers=1, block_size=8, kernel_block_size=4).cache(),
    "unlike groups": UNLIKE,
}


def rows_of(excerpt: Excerpt) -> list[Row]:
    return [row for row in excerpt.rows if isinstance(row, Row)]


def bytes_of(plan: ResolvedLayout) -> set[int]:
    return {byte for view in plan.layers for _, content in cells(view) for byte in content}


@pytest.mark.parametrize("shown", [Shown(20, 20, 20, 20), FEW], ids=["whole", "excerpt"])
@pytest.mark.parametrize(("name", "plan"), PLANS, ids=[name for name, _ in PLANS])
def test_tiles_are_what_the_bytes_say(name: str, plan: ResolvedLayout, shown: Shown) -> None:
    excerpt = excerpt_of(plan, block=1, shown=shown)
    held = bytes_of(plan)
    drawn = list(excerpt.cells)
    assert len({cell.key for cell in drawn}) == len(drawn)
    total = sum(b * h * n for b, h, n in (view.shape[:3] for view in plan.layers))
    assert excerpt.whole == (len(drawn) == total)
    if shown is not FEW:
        assert excerpt.whole
    end = 0
    for row in excerpt.rows:
        assert row.start == end
        end = row.stop
        if isinstance(row, Gap):
            assert any(byte in held for byte in range(row.start, row.stop))
            continue
        assert [t.start for t in row.tiles] == [row.start, *(t.stop for t in row.tiles[:-1])]
        assert row.tiles[-1].stop == row.stop
        shown_bytes = {b for lane in row.lanes for c in lane.cells for b in range(c.start, c.stop)}
        for tile in row.tiles:
            span = set(range(tile.start, tile.stop))
            assert tile.width > 0
            if tile.kind == "cell":
                assert span <= shown_bytes
            elif tile.kind == "padding":
                assert not span & held
            else:
                assert not span & shown_bytes
                assert tile.start in held
                assert tile.stop - 1 in held
        for lane in row.lanes:
            assert [c.start for c in lane.cells] == sorted(c.start for c in lane.cells)
            places = [(row.place(c.start), row.place(c.stop)) for c in lane.cells]
            assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(places))
    if not isinstance(excerpt.rows[-1], Gap):
        assert end == plan.size_bytes


@pytest.mark.parametrize(("name", "plan"), PLANS, ids=[name for name, _ in PLANS])
def test_a_whole_picture_has_a_bar_for_each_run(name: str, plan: ResolvedLayout) -> None:
    excerpt = excerpt_of(plan, block=2, shown=Shown(20, 20, 20, 20))
    for group in range(len(plan.groups)):
        runs = count_runs(plan, layers=plan.group_layers(group), blocks=range(2, 3))
        lanes = [lane for row in rows_of(excerpt) for lane in row.lanes if lane.group == group]
        assert sum(len(lane.runs) for lane in lanes) == runs.count
        for row in rows_of(excerpt):
            for lane in row.lanes:
                if lane.group != group:
                    continue
                for cell in lane.cells:
                    middle = (row.place(cell.start) + row.place(cell.stop)) / 2
                    under = any(x <= middle <= x + width for x, width in lane.runs)
                    assert under == (cell.manager_block == 2)


def test_long_axes_show_their_first_and_last() -> None:
    assert pick(4, 3, 4) == [0, 1, 2, 3]
    assert pick(5, 3, 4) == [0, 1, 4]
    assert pick(1_000_000, 4, 4, also=[5, 7_000_000]) == [0, 1, 2, 5, 999_999]


def test_a_wanted_cell_is_drawn_and_framed() -> None:
    wanted = CellQuery(77, 5000, 3, 9)
    shown = explain(CACHES["real"], SIX, cell=wanted)
    assert shown.block == 5000
    for entry, scene in zip(shown.entries, panels(shown)):
        assert entry.excerpt is not None
        assert wanted.key in {cell.key for cell in entry.excerpt.cells}
        framed = [s for s in scene.shapes if isinstance(s, Rect) and s.stroke == "ink"]
        assert [rect.data["c"] for rect in framed] == [wanted.key]


def scenes() -> dict[str, Scene]:
    out = {name: picture(explain(cache, SIX)) for name, cache in CACHES.items()}
    out["found"] = picture(explain(CACHES["real"], SIX, cell=CellQuery(77, 5000, 3, 9)))
    out["single"] = picture(explain(CACHES["small"], SIX[5:]))
    out["large"] = picture(explain(CACHES["real"], SIX[:1], shown=Shown(8, 8, 8, 8)))
    both = explain(CACHES["small"], (KVCacheLayout.LBHNC, KVCacheLayout.BLNHC))
    found = difference(*both.plans)
    out["diff"] = diff_picture(pale_where_equal(both, found), found)
    return out


SCENES = scenes()


def boxes(scene: Scene) -> list[tuple[Text, tuple[float, float, float, float]]]:
    """What each text covers, in the font that PNGs are drawn with."""
    fonts: Fonts = {}
    anchors = {"start": "ls", "middle": "ms", "end": "rs"}
    out = []
    for text in scene.shapes:
        if isinstance(text, Text):
            left, top, right, bottom = font_of(text, fonts).getbbox(
                text.text, anchor=anchors[text.anchor]
            )
            x, y = text.x, text.y
            scaled = (left / SCALE + x, top / SCALE + y, right / SCALE + x, bottom / SCALE + y)
            out.append((text, scaled))
    return out


def overlapping(scene: Scene) -> list[tuple[str, str]]:
    found = []
    for (one, a), (other, b) in combinations(boxes(scene), 2):
        if a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]:
            found.append((one.text, other.text))
    return found


@pytest.mark.parametrize("name", SCENES)
def test_no_text_lies_on_another_or_outside(name: str) -> None:
    scene = SCENES[name]
    assert overlapping(scene) == []
    for text, (left, top, right, bottom) in boxes(scene):
        assert 0 <= left < right <= scene.width, text.text
        assert 0 <= top < bottom <= scene.height, text.text
    for shape in scene.shapes:
        if isinstance(shape, Rect):
            assert 0 <= shape.x <= shape.x + shape.width <= scene.width + 1
            assert 0 <= shape.y <= shape.y + shape.height <= scene.height


COLOUR_VISION = {
    # linear RGB as it is seen with a kind of cones missing: Machado, Oliveira, Fernandes 2009
    "all cones": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no long": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "no medium": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "no short": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}


def seen(colour: str, vision: str) -> np.ndarray:
    """A colour in OKLab, where distance is difference as it is seen."""
    channels = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    rgb = np.clip(np.array(COLOUR_VISION[vision]) @ linear, 0, 1)
    cones = np.array(
        (
            (0.4122214708, 0.5363325363, 0.0514459929),
            (0.2119034982, 0.6806995451, 0.1073969566),
            (0.0883024619, 0.2817188376, 0.6299787005),
        )
    )
    lab = np.array(
        (
            (0.2104542553, 0.7936177850, -0.0040720468),
            (1.9779984951, -2.4285922050, 0.4505937099),
            (0.0259040371, 0.7827717662, -0.8086757660),
        )
    )
    return np.asarray(lab @ np.cbrt(cones @ rgb))


@pytest.mark.parametrize("vision", COLOUR_VISION)
def test_layers_differ_for_every_kind_of_colour_vision(vision: str) -> None:
    distances = {
        (a, b): float(np.linalg.norm(seen(a, vision) - seen(b, vision)))
        for a, b in combinations(HUES, 2)
    }
    assert min(distances.values()) > 0.08  # just noticeable is 0.02


def test_the_check_for_colours_can_fail() -> None:
    teal, magenta = seen("#1d9a86", "no medium"), seen("#b5508f", "no medium")
    assert np.linalg.norm(teal - magenta) < 0.05


def test_the_check_for_overlaps_can_fail() -> None:
    texts = (Text(10, 20, "block 1"), Text(40, 22, "block 2"))
    assert overlapping(Scene(200, 50, texts, "")) == [("block 1", "block 2")]


def test_a_million_blocks_make_a_small_picture() -> None:
    scene = SCENES["real"]
    assert len(scene.shapes) < 2500
    assert scene.width < 2.6 * (PANEL_INSIDE + 150)
    words = {shape.text for shape in scene.shapes if isinstance(shape, Text)}
    assert "⋮  125 layers left out, 7.5 TiB" in words
    assert "⋮  999,996 blocks left out, 7.6 TiB" in words


@pytest.mark.parametrize("name", SCENES)
@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_svg_is_xml_and_names_nothing_outside(name: str, theme: dict[str, str]) -> None:
    text = svg_text(SCENES[name], theme)
    root = ElementTree.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert outside_references(text) == []
    drawn = [s for s in SCENES[name].shapes if isinstance(s, Rect) and s.data]
    assert len(root.findall(".//*[@data-c]")) == len(drawn) > 0
    assert "var(" not in text
    for colour in re.findall(r'(?:fill|stroke)="([^"]+)"', text):
        assert re.fullmatch(r"#[0-9a-f]{6}|url\(#p-hatch\)", colour)


def outside_references(text: str) -> list[str]:
    """Whatever would make a viewer load something: hosts, sources, links, imports."""
    text = text.replace('xmlns="http://www.w3.org/2000/svg"', "")
    pattern = r"https?:|//[a-z]|\bsrc\s*=|\bhref\s*=|@import|url\((?!#)|\bfetch\b|import\("
    return re.findall(pattern, re.sub(r"(?m)^\s*//.*$", "", text))


def test_png_is_twice_the_scene(tmp_path: object) -> None:
    from io import BytesIO

    scene = SCENES["padded groups"]
    image = Image.open(BytesIO(png_bytes(scene, DARK)))
    assert image.format == "PNG"
    assert image.size == (round(scene.width * 2), round(scene.height * 2))
    colours = {colour for _, colour in image.getcolors(1 << 24) or []}
    assert {tuple(bytes.fromhex(DARK[n][1:])) for n in ("ground", "panel", "accent")} <= colours


def page_data(page: str) -> dict[str, object]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert found is not None
    data: dict[str, object] = json.loads(found.group(1))
    return data


@pytest.mark.parametrize("name", CACHES)
def test_the_page_is_whole_and_stands_alone(name: str) -> None:
    shown = explain(CACHES[name], SIX)
    page = page_text(shown)
    assert outside_references(page) == []
    assert "__" not in page
    assert page.count("<figure") == 6
    data = page_data(page)
    assert data["plans"] == json.loads(json.dumps([plan_record(plan) for plan in shown.plans]))
    for entry in shown.entries:
        if entry.excerpt is not None:
            for cell in entry.excerpt.cells:
                assert f'data-c="{cell.key}"' in page
    for name_of_colour in LIGHT:
        assert f"--{name_of_colour}: {LIGHT[name_of_colour]}" in page
        assert f"--{name_of_colour}: {DARK[name_of_colour]}" in page
        assert CSS[name_of_colour] == f"var(--{name_of_colour})"


@pytest.mark.parametrize("name", CACHES)
def test_the_page_addresses_by_the_plan_s_numbers(name: str) -> None:
    """The rule that the page's script follows, applied to the numbers that the page carries."""
    for plan in explain(CACHES[name], SIX).plans:
        record = json.loads(json.dumps(plan_record(plan)))
        for view, (label, group, offset, kind) in zip(plan.layers, record["layers"]):
            numbers = record["kinds"][kind]
            assert (label, group, offset) == (view.name, view.group, view.offset)
            assert tuple(numbers["shape"]) == view.shape
            assert tuple(numbers["strides"]) == view.strides
            assert numbers["ratio"] == view.blocks_per_manager_block
            assert numbers["key"] == view.key_bytes
            last = tuple(size - 1 for size in view.shape[:3])
            start = offset + sum(i * s for i, s in zip(last, numbers["strides"]))
            assert start == view.cell_offset(*last)
        assert record["size"] == plan.size_bytes < 2**53  # the script's numbers are exact


def test_names_cannot_leave_their_place_in_a_page() -> None:
    wild = '</script><b>"&__DATA__'
    spec = FullAttentionSpec(block_size=2, num_kv_heads=1, head_size=2, dtype="float32")
    page = page_text(explain(Cache((KVCacheGroupSpec([wild], spec),), 3, None), SIX))
    assert wild not in page
    assert "<b>" not in page
    assert page.count("</script>") == 2
    assert page_data(page)["plans"][0]["layers"][0][0] == wild  # type: ignore[index]


def test_a_refused_layout_keeps_its_place_with_the_reason() -> None:
    shown = explain(CACHES["unlike groups"], SIX)
    refused = [e.variant for e in shown.entries if e.variant.plan is None]
    assert [variant.layout.name for variant in refused] == ["LHBNC"]
    words = " ".join(s.text for s in picture(shown).shapes if isinstance(s, Text))
    assert "cannot hold this cache" in words
    assert "groups of unlike (H, N, C)" in words


def test_pale_cells_are_those_that_lie_at_the_same_byte() -> None:
    both: Explained = explain(CACHES["small"], (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC))
    found = difference(*both.plans)
    scene = diff_picture(pale_where_equal(both, found), found)
    rects = [s for s in scene.shapes if isinstance(s, Rect) and s.data]
    first, second = rects[: len(rects) // 2], rects[len(rects) // 2 :]
    starts = {rect.data["c"]: rect.data["a"] for rect in second}
    assert len(first) == len(second) == found.cells == 96
    for rect in first:
        assert (rect.opacity < 1) == (starts[rect.data["c"]] == rect.data["a"])
    assert sum(rect.opacity < 1 for rect in first) == found.same == 16


def test_the_same_picture_twice_is_the_same_text() -> None:
    again = picture(explain(CACHES["padded groups"], SIX))
    assert svg_text(again, LIGHT) == svg_text(SCENES["padded groups"], LIGHT)
    assert replace(again) == SCENES["padded groups"]
