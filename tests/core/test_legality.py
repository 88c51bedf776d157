"""The table of legal combinations, against brute force over every byte.

What the table allows, no two blocks may share; what it forbids must be refused, and where the
reason is a shared byte, planning it with the check taken out must show one.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layout_core import (
    LEGAL_COMBINATIONS,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheLayout,
    KVCacheSpec,
    Legality,
    MultipleOf,
    UniformTypeKVCacheSpecs,
    legality,
    make_config,
    placement,
    resolve,
    resolve_layout,
)
from layout_core.errors import IllegalCombinationError, LayoutError, StrideError
from tests.core.brute import owners_of_bytes

LAYOUTS = list(KVCacheLayout)


def page(
    h: int,
    n: int,
    c: int,
    padded: int | None = None,
    alignment: int | MultipleOf | None = None,
) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=n,
        num_kv_heads=h,
        head_size=c // 2,
        dtype="uint8",
        page_size_padded=padded,
        block_stride_alignment=alignment,
    )


def group(*specs: KVCacheSpec, prefix: str = "a") -> KVCacheGroupSpec:
    """One group with one layer for each spec."""
    names = [f"{prefix}{i}" for i in range(len(specs))]
    if all(spec == specs[0] for spec in specs):
        return KVCacheGroupSpec(names, specs[0])
    wrapper = UniformTypeKVCacheSpecs(
        block_size=specs[0].block_size, kv_cache_specs=dict(zip(names, specs))
    )
    return KVCacheGroupSpec(names, wrapper)


# field of the table -> groups that need it, and kernel block sizes
SCENARIOS: dict[str, tuple[list[KVCacheGroupSpec], list[int | None] | None]] = {
    "page_padding": ([group(page(2, 4, 4, padded=40), page(2, 4, 4, padded=40))], None),
    "mixed_pages_one_group": ([group(page(2, 4, 4), page(2, 4, 6), page(2, 4, 4))], None),
    "mixed_pages_groups": (
        [group(page(2, 4, 4), page(2, 4, 4)), group(page(2, 4, 6), prefix="b")],
        None,
    ),
    "unlike_overlay": (
        [group(page(2, 4, 4), page(2, 4, 4)), group(page(1, 8, 4), page(1, 8, 4), prefix="b")],
        None,
    ),
    "aligned_blocks": ([group(page(2, 4, 4, alignment=48), page(2, 4, 4, alignment=48))], None),
    "split_one_layer": ([group(page(2, 4, 4)), group(page(2, 4, 4), prefix="b")], [2, None]),
    "split_one_layer_one_head": ([group(page(1, 4, 4))], [2]),
    "split_many_layers": ([group(page(2, 4, 4), page(2, 4, 4))], [2]),
    "split_many_layers_one_head": ([group(page(1, 4, 4), page(1, 4, 4))], [1]),
}


def test_every_field_of_the_table_has_a_scenario() -> None:
    assert set(SCENARIOS) == set(Legality.__dataclass_fields__)
    assert set(LEGAL_COMBINATIONS) == set(KVCacheLayout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("field", SCENARIOS)
def test_what_the_table_says_holds(field: str, layout: KVCacheLayout) -> None:
    groups, kernel = SCENARIOS[field]

    def plan() -> None:
        resolved = resolve_layout(make_config(groups, 3, layout), kernel_block_sizes=kernel)
        faults, seen = owners_of_bytes(resolved)
        assert seen
        assert not faults, faults[:3]

    if getattr(LEGAL_COMBINATIONS[layout], field):
        plan()
    else:
        with pytest.raises((IllegalCombinationError, StrideError), match=layout.name):
            plan()


def without_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan as vLLM does: nothing refused for the sake of a shared byte."""
    monkeypatch.setattr(placement, "check_placement", lambda layout, groups: None)
    monkeypatch.setattr(resolve, "check_cells", lambda *args: None)
    monkeypatch.setattr(resolve, "check_tensors_apart", lambda *args: None)
    allow_all = Legality(*[True] * len(Legality.__dataclass_fields__))
    monkeypatch.setattr(resolve, "LEGAL_COMBINATIONS", dict.fromkeys(KVCacheLayout, allow_all))


@pytest.mark.parametrize(
    ("field", "layout"), [("unlike_overlay", "LHBNC"), ("split_one_layer", "BHLNC")]
)
def test_what_vllm_accepts_and_we_refuse_shares_bytes(
    field: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups, kernel = SCENARIOS[field]
    if field == "split_one_layer":  # one layer of BHLNC, as in the report
        groups, kernel = [group(page(2, 4, 4))], [2]
    with pytest.raises(LayoutError):
        resolve_layout(make_config(groups, 3, layout), kernel_block_sizes=kernel)
    without_checks(monkeypatch)
    config = make_config(groups, 3, layout)
    faults, _ = owners_of_bytes(resolve_layout(config, kernel_block_sizes=kernel))
    assert any("shares" in fault for fault in faults)


def test_refusals_say_what_and_what_else() -> None:
    with pytest.raises(
        IllegalCombinationError,
        match=r"layout LHBNC: groups of unlike \(H, N, C\) \[\(1, 8, 4\), \(2, 4, 4\)\] .*"
        r"or one of LBHNC, LBNHC, BLHNC, BLNHC, BHLNC",
    ):
        make_config(SCENARIOS["unlike_overlay"][0], 3, "LHBNC")
    with pytest.raises(
        IllegalCombinationError,
        match=r"layout LBNHC: cannot hold pages of \[32, 48\] bytes in 2 groups; expected pages "
        r"of one size, or one of BLHNC, BLNHC",
    ):
        make_config(SCENARIOS["mixed_pages_groups"][0], 3, "LBNHC")
    with pytest.raises(
        IllegalCombinationError, match=r"layout BHLNC: cannot pad a page of 2 heads to 40 bytes"
    ):
        make_config(SCENARIOS["page_padding"][0], 3, "BHLNC")
    with pytest.raises(
        StrideError,
        match=r"layout BLNHC cannot split .* the block pitch is 64 bytes, the payload of a block "
        r"32, the ratio 2",
    ):
        resolve_layout(
            make_config(SCENARIOS["split_many_layers"][0], 3, "BLNHC"), kernel_block_sizes=[2]
        )
    with pytest.raises(StrideError, match=r"layout BHLNC keeps the 2 heads of a block apart"):
        resolve_layout(make_config([group(page(2, 4, 4))], 3, "BHLNC"), kernel_block_sizes=[2])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_groups_of_which_one_is_aligned(
    layout: KVCacheLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = [group(page(2, 4, 4, alignment=48)), group(page(2, 4, 4), prefix="b")]
    if layout.is_block_outermost:
        assert not owners_of_bytes(resolve_layout(make_config(groups, 3, layout)))[0]
        return
    with pytest.raises(IllegalCombinationError, match=layout.name):
        make_config(groups, 3, layout)
    if layout.is_block_compact:
        without_checks(monkeypatch)
        faults, _ = owners_of_bytes(resolve_layout(make_config(groups, 3, layout)))
        assert any("another block" in fault for fault in faults)


def test_legal_layouts_reads_the_table() -> None:
    assert [m.name for m in legality.legal_layouts("mixed_pages_groups")] == ["BLHNC", "BLNHC"]


shapes = st.tuples(st.integers(1, 3), st.sampled_from([1, 2, 4]), st.sampled_from([2, 4, 8]))
layers = st.lists(st.tuples(shapes, st.sampled_from([None, 0, 3, 16])), min_size=1, max_size=3)


@given(
    st.sampled_from(LAYOUTS),
    st.lists(layers, min_size=1, max_size=3),
    st.integers(1, 3),
    st.sampled_from([None, 1, 2]),
    st.sampled_from([None, 12, MultipleOf(2)]),
)
@settings(max_examples=120, deadline=None)
def test_whatever_is_accepted_keeps_blocks_apart(
    layout: KVCacheLayout,
    drawn: list[list[tuple[tuple[int, int, int], int | None]]],
    num_blocks: int,
    kernel: int | None,
    alignment: int | MultipleOf | None,
) -> None:
    groups = []
    for index, members in enumerate(drawn):
        block_size = members[0][0][1]
        specs = [
            page(
                h,
                block_size,
                c,
                None if padding is None else h * block_size * c + padding,
                alignment if index % 2 == 0 else None,
            )
            for (h, _, c), padding in members
        ]
        groups.append(group(*specs, prefix=f"g{index}."))
    sizes = [
        kernel if kernel and g.kv_cache_spec.block_size % kernel == 0 else None for g in groups
    ]
    build: Callable[[], KVCacheConfig] = lambda: make_config(groups, num_blocks, layout)  # noqa: E731
    try:
        resolved = resolve_layout(build(), kernel_block_sizes=sizes)
    except (IllegalCombinationError, StrideError):
        return  # refused: the other tests say when that is right
    faults, seen = owners_of_bytes(resolved)
    assert seen
    assert not faults, (layout, faults[:3])
