"""Runs, padding and owners of bytes, against sets of bytes built cell by cell."""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layout_core import (
    FullAttentionSpec,
    KVCacheLayout,
    LayerView,
    MLAAttentionSpec,
    ResolvedLayout,
    count_runs,
    make_config,
    owners,
    owners_of_byte,
    padding_of,
    resolve_layout,
    run_ranges,
    runs,
    single_group_config,
)
from layout_core.errors import LayoutError
from tests.core.brute import cells
from tests.core.test_legality import LAYOUTS, SCENARIOS, group, page


def plan(
    layout: KVCacheLayout | str,
    *,
    layers: int = 3,
    blocks: int = 5,
    heads: int = 2,
    tokens: int = 4,
) -> ResolvedLayout:
    names = [f"layer{i}" for i in range(layers)]
    return resolve_layout(single_group_config(page(heads, tokens, 4), blocks, names, layout))


def plans() -> list[tuple[str, ResolvedLayout]]:
    """Every scenario of the table in every layout that can hold it; a plain one, a shifted one."""
    out = [(f"plain-{layout.name}", plan(layout)) for layout in LAYOUTS]
    for layout in LAYOUTS:  # all of it behind 48 bytes that are none of ours
        config = single_group_config(page(2, 4, 4), 5, ["a", "b"], layout)
        for tensor in config.kv_cache_tensors:
            tensor.offset += 48
            tensor.size += 48
        out.append((f"offset-{layout.name}", resolve_layout(config)))
    for name, (groups, kernel) in SCENARIOS.items():
        for layout in LAYOUTS:
            try:
                config = make_config(groups, 5, layout)
                resolved = resolve_layout(config, kernel_block_sizes=kernel)
            except LayoutError:
                continue  # the table's own tests hold who can and who cannot
            out.append((f"{name}-{layout.name}", resolved))
    return out


PLANS = plans()


def test_the_plans_are_many() -> None:
    assert len(PLANS) >= 30
    assert {resolved.layout for _, resolved in PLANS} == set(LAYOUTS)
    assert any(padding_of(resolved).unused for _, resolved in PLANS)
    assert any(len(resolved.groups) > 1 for _, resolved in PLANS)
    assert any(v.blocks_per_manager_block > 1 for _, r in PLANS for v in r.layers)


def chosen_bytes(
    resolved: ResolvedLayout,
    layers: Sequence[int],
    blocks: range,
    heads: Sequence[range],
    tokens: range | None,
) -> list[int]:
    """All bytes of the choice, cell by cell."""
    out = []
    for layer, slots in zip(layers, heads):
        view = resolved.layers[layer]
        for (b, h, n), content in cells(view):
            block = b // view.blocks_per_manager_block
            if block in blocks and h in slots and (tokens is None or n in tokens):
                out += list(content)
    return sorted(out)


def group_bytes(resolved: ResolvedLayout, index: int) -> set[int]:
    return {
        byte
        for view in resolved.layers
        if view.group == index
        for _, content in cells(view)
        for byte in content
    }


def brute_runs(chosen: list[int], others: set[int], *, carry: bool) -> list[tuple[int, int]]:
    """Half-open runs: a run ends where a byte is missing, or (carrying) where another's lies."""
    found = [[chosen[0], chosen[0] + 1]]
    for byte in chosen[1:]:
        gap = range(found[-1][1], byte)
        if not gap or (carry and not any(b in others for b in gap)):
            found[-1][1] = byte + 1
        else:
            found.append([byte, byte + 1])
    return [(start, stop) for start, stop in found]


def check(
    resolved: ResolvedLayout,
    layers: Sequence[int],
    blocks: range,
    heads: Sequence[range],
    tokens: range | None = None,
) -> None:
    chosen = chosen_bytes(resolved, layers, blocks, heads, tokens)
    of_group = group_bytes(resolved, resolved.layers[layers[0]].group)
    others = of_group - set(chosen)
    choice = {"layers": layers, "blocks": blocks, "heads": heads, "tokens": tokens}
    for carry in (False, True):
        want = brute_runs(chosen, others, carry=carry)
        got = count_runs(resolved, **choice, carry_padding=carry)  # type: ignore[arg-type]
        ranges = run_ranges(resolved, **choice, carry_padding=carry)  # type: ignore[arg-type]
        assert [tuple(r) for r in ranges] == want
        lengths: dict[int, int] = defaultdict(int)
        for start, stop in want:
            lengths[stop - start] += 1
        assert got.lengths == tuple(sorted(lengths.items()))
        assert (got.start, got.stop) == (want[0][0], want[-1][1])
        assert got.count == len(want)
        assert got.payload_bytes == len(chosen)
        assert got.padding_bytes == sum(stop - start for start, stop in want) - len(chosen)


@pytest.mark.parametrize(("name", "resolved"), PLANS, ids=[name for name, _ in PLANS])
def test_runs_are_what_bytes_say(name: str, resolved: ResolvedLayout) -> None:
    for index in range(len(resolved.groups)):
        layers = resolved.group_layers(index)
        least = min(resolved.layers[i].shape[1] for i in layers)
        for subset in {layers, layers[:1], layers[-1:], layers[::2]}:
            for blocks in (range(1, 2), range(5), range(1, 4), range(0, 5, 2), range(1, 5, 3)):
                for heads in (None, range(1), range(least - 1, least)):
                    slots = [heads or range(resolved.layers[i].shape[1]) for i in subset]
                    check(resolved, subset, blocks, slots)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_runs_of_random_plans(data: st.DataObject) -> None:
    layout = data.draw(st.sampled_from(LAYOUTS))
    one_head = data.draw(st.booleans())
    heads = 1 if one_head else data.draw(st.integers(1, 4))
    tokens, content = data.draw(st.integers(1, 4)), 2 * data.draw(st.integers(1, 3))
    payload = heads * tokens * content
    padded = data.draw(st.one_of(st.none(), st.integers(payload, payload + 9)))
    aligned = data.draw(st.one_of(st.none(), st.sampled_from([3, 16])))
    specs = [page(heads, tokens, content, padded, aligned)] * data.draw(st.integers(1, 4))
    groups = [group(*specs, prefix=f"g{i}") for i in range(data.draw(st.integers(1, 3)))]
    num_blocks = data.draw(st.integers(1, 6))
    try:
        resolved = resolve_layout(make_config(groups, num_blocks, layout))
    except LayoutError:
        return
    index = data.draw(st.integers(0, len(groups) - 1))
    layers = data.draw(
        st.lists(st.sampled_from(resolved.group_layers(index)), min_size=1, unique=True)
    )
    start = data.draw(st.integers(0, num_blocks - 1))
    blocks = range(
        start, data.draw(st.integers(start + 1, num_blocks)), data.draw(st.integers(1, 3))
    )
    low = data.draw(st.integers(0, heads - 1))
    slots = range(low, data.draw(st.integers(low + 1, heads)), data.draw(st.integers(1, 2)))
    first = data.draw(st.integers(0, tokens - 1))
    some = range(first, data.draw(st.integers(first + 1, tokens)), data.draw(st.integers(1, 2)))
    check(resolved, layers, blocks, [slots] * len(layers), data.draw(st.sampled_from([None, some])))


def test_unlike_head_ranges_are_counted_one_by_one() -> None:
    """Heads that differ from layer to layer interleave where H lies outside L."""
    for layout in LAYOUTS:
        check(
            plan(layout, heads=3), (0, 1, 2), range(1, 4), (range(3), range(1, 2), range(0, 3, 2))
        )


@pytest.mark.parametrize(("name", "resolved"), PLANS, ids=[name for name, _ in PLANS])
def test_owners_and_padding_are_what_bytes_say(name: str, resolved: ResolvedLayout) -> None:
    at: dict[int, list[tuple[int, int, int, int, int]]] = defaultdict(list)
    starts = sorted({content.start for view in resolved.layers for _, content in cells(view)})
    for index, view in enumerate(resolved.layers):
        for (b, h, n), content in cells(view):
            for byte in content:
                at[byte].append((index, b, h, n, byte - content.start))
    for byte in range(resolved.size_bytes):
        said = owners_of_byte(resolved, byte)
        got = [(o.layer, o.kernel_block, o.head, o.token, o.offset) for o in said.owners]
        assert got == at.get(byte, [])
        assert said.is_padding == (byte not in at)
        for owner in said.owners:
            view = resolved.layers[owner.layer]
            assert owner.start == view.cell_offset(owner.kernel_block, owner.head, owner.token)
            assert owner.null == (owner.block == 0)
            assert (owner.part == "K") == (owner.offset < view.key_bytes)
        blocks = {owner.block for owner in said.owners}
        assert len(blocks) <= 1
        later = bisect_right(starts, byte)
        assert said.distance == (starts[later] - byte if later < len(starts) else None)
    padding = padding_of(resolved)
    assert padding.unused == resolved.size_bytes - len(at)
    for index in range(len(resolved.groups)):
        assert padding.by_group[index] == resolved.size_bytes - len(group_bytes(resolved, index))


def test_one_block_over_all_layers() -> None:
    """The figure that offloading is chosen by: 1, L or L·H runs."""
    counted = {
        layout.name: count_runs(
            plan(layout, layers=8, blocks=100, heads=4), layers=range(8), blocks=range(1, 2)
        ).count
        for layout in LAYOUTS
    }
    assert counted == {"LBHNC": 8, "LBNHC": 8, "LHBNC": 32, "BLHNC": 1, "BLNHC": 1, "BHLNC": 1}


def test_one_head_over_all_layers() -> None:
    """A rank's slice: heads outside layers make it one run of each block."""
    counted = {
        layout.name: count_runs(
            plan(layout, layers=8, blocks=100, heads=4),
            layers=range(8),
            blocks=range(1, 2),
            heads=range(2),
        ).count
        for layout in LAYOUTS
    }
    assert counted == {"LBHNC": 8, "LBNHC": 32, "LHBNC": 16, "BLHNC": 8, "BLNHC": 32, "BHLNC": 1}


def test_real_sizes_need_no_visit_to_every_cell() -> None:
    """128 layers, a million blocks: the whole cache and scattered blocks, from the strides."""
    spec = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype="bfloat16")
    names = [f"layer{i}" for i in range(128)]
    for layout in LAYOUTS:
        resolved = resolve_layout(single_group_config(spec, 1_000_000, names, layout))
        whole = count_runs(resolved, layers=range(128), blocks=range(1_000_000))
        assert whole.lengths == ((resolved.size_bytes, 1),)
        scattered = count_runs(resolved, layers=range(128), blocks=range(1, 1_000_000, 2))
        for_each = {"LBHNC": 128, "LBNHC": 128, "LHBNC": 1024}.get(layout.name, 1)
        assert scattered.count == 500_000 * for_each
        last = resolved.size_bytes - 1
        owner = owners_of_byte(resolved, last).owners[0]
        assert (owner.layer, owner.block, owner.head, owner.token) == (127, 999_999, 7, 15)
        assert (owner.part, owner.element) == ("V", 127)
        assert padding_of(resolved).unused == 0


def test_packed_content_has_no_k_and_v() -> None:
    spec = MLAAttentionSpec(
        block_size=4, num_kv_heads=1, head_size=8, dtype="uint8", state_content_bytes=11
    )
    resolved = resolve_layout(single_group_config(spec, 2, ["a"], "LBHNC"))
    owner = owners_of_byte(resolved, 12).owners[0]
    assert (owner.part, owner.element, owner.token, owner.offset) == ("content", -1, 1, 1)


REFUSED = {
    "no layer": ({"layers": []}, "layers: expected distinct indices, at least one, got []"),
    "twice": ({"layers": [1, 1]}, "layers: expected distinct indices, at least one, got [1, 1]"),
    "layer": ({"layers": [7]}, "layer: expected an index in [0, 3), got 7"),
    "block": (
        {"blocks": range(3, 6)},
        "blocks: expected a non-empty ascending range inside [0, 5), got range(3, 6)",
    ),
    "empty": ({"blocks": range(2, 2)}, "blocks: expected a non-empty ascending range"),
    "backwards": ({"blocks": range(3, 0, -1)}, "blocks: expected a non-empty ascending range"),
    "heads": (
        {"heads": range(1, 3)},
        "heads of layer 'layer0': expected a non-empty ascending range inside [0, 2)",
    ),
    "tokens": (
        {"tokens": range(5)},
        "tokens of layer 'layer0': expected a non-empty ascending range inside [0, 4)",
    ),
    "head lists": ({"heads": [range(1)]}, "heads: expected one range for each of 3 layers, got 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_choice_is_refused_by_name(case: str) -> None:
    changes, message = REFUSED[case]
    choice = {"layers": [0, 1, 2], "blocks": range(1, 2), **changes}
    with pytest.raises(LayoutError) as error:
        count_runs(plan("LBHNC"), **choice)  # type: ignore[arg-type]
    assert message in str(error.value)


def test_layers_of_two_groups_are_refused() -> None:
    resolved = resolve_layout(
        make_config([group(page(1, 2, 4)), group(page(1, 2, 4), prefix="b")], 3, "LBHNC")
    )
    with pytest.raises(
        LayoutError, match=r"layers: expected layers of one group.*got groups \[0, 1\]"
    ):
        count_runs(resolved, layers=[0, 1], blocks=range(1))


@pytest.mark.parametrize("byte", [-1, 480, True, 1.0])
def test_a_byte_outside_is_refused(byte: object) -> None:
    resolved = plan("LBHNC")
    assert resolved.size_bytes == 480
    with pytest.raises(LayoutError, match=r"byte: expected an int in \[0, 0x1e0\)"):
        owners_of_byte(resolved, byte)  # type: ignore[arg-type]


def test_a_plan_without_layers_has_no_padding() -> None:
    empty = ResolvedLayout(KVCacheLayout.LBHNC, 0, 1, (), ())
    with pytest.raises(LayoutError, match="the plan has no layers"):
        padding_of(empty)


def _reversed_axes(view: LayerView) -> list[tuple[str, int, int]]:
    return sorted((a for a in zip("BHN", view.shape, view.strides) if a[1] > 1), key=lambda a: a[2])


FAULTS = {
    "runs never touch": (runs, "_touching", lambda stop, start: False),
    "runs always touch": (runs, "_touching", lambda stop, start: True),
    "padding is a cell": (runs, "holds_cell", lambda view, start, stop: True),
    "a cell is padding": (runs, "holds_cell", lambda view, start, stop: False),
    "axes inside out": (owners, "nested_axes", _reversed_axes),
    "copies forget the join": (
        runs,
        "_repeated",
        lambda part, count, stride, joins: _repeated(part, count, stride, lambda a, b: False),
    ),
    "neighbours forget the join": (
        runs,
        "_side_by_side",
        lambda left, right, joins: _side_by_side(left, right, lambda a, b: False),
    ),
    "a block counts its split pieces": (
        runs,
        "_box",
        lambda view, blocks, heads, tokens: _box(
            dataclasses.replace(view, blocks_per_manager_block=1), blocks, heads, tokens
        ),
    ),
}
_repeated, _side_by_side, _box = runs._repeated, runs._side_by_side, runs._box


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_seen(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """The comparison with bytes can fail: each of these turns it red."""
    module, name, wrong = FAULTS[fault]
    monkeypatch.setattr(module, name, wrong)
    red = 0
    for _, resolved in PLANS:
        layers = resolved.group_layers(0)
        try:
            for blocks in (range(1, 2), range(1, 4)):
                check(resolved, layers, blocks, [range(1)] * len(layers))
                slots = [range(resolved.layers[i].shape[1]) for i in layers]
                check(resolved, layers, blocks, slots)
        except AssertionError:
            red += 1
        if red:
            break
    assert red, f"{fault}: no plan of {len(PLANS)} shows it"


def test_a_stride_off_by_one_is_seen() -> None:
    """The brute force can fail: a planted stride changes what it counts."""
    resolved = plan("BLHNC")
    view = resolved.layers[1]
    b, h, n, c = view.strides
    wrong = LayerView(**{**view.__dict__, "strides": (b, h, n + 1, c), "offset": view.offset - 1})
    planted = ResolvedLayout(
        resolved.layout,
        resolved.size_bytes,
        resolved.num_blocks,
        (resolved.layers[0], wrong, resolved.layers[2]),
        resolved.groups,
    )
    choice = {"layers": (0, 1, 2), "blocks": range(1, 2), "carry_padding": False}
    assert count_runs(planted, **choice) != count_runs(resolved, **choice)  # type: ignore[arg-type]
