"""The six layouts: their golden orders, their properties, and how a name is read."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layout_core import KVCacheLayout
from layout_core.errors import UnknownLayoutError

# name: stride_order, layer_view_order, layer-compact, block-contiguous, block-compact, B outermost
GOLDEN = {
    "LBHNC": ((0, 1, 2, 3, 4), (0, 1, 2, 3), True, True, True, False),
    "LBNHC": ((0, 1, 3, 2, 4), (0, 2, 1, 3), True, False, True, False),
    "LHBNC": ((0, 2, 1, 3, 4), (1, 0, 2, 3), True, False, False, False),
    "BLHNC": ((1, 0, 2, 3, 4), (0, 1, 2, 3), False, True, True, True),
    "BLNHC": ((1, 0, 3, 2, 4), (0, 2, 1, 3), False, False, True, True),
    "BHLNC": ((1, 2, 0, 3, 4), (0, 1, 2, 3), False, False, False, True),
}


def test_the_members_are_the_golden_ones_in_order() -> None:
    assert [m.name for m in KVCacheLayout] == list(GOLDEN)


@pytest.mark.parametrize("name", GOLDEN)
def test_properties(name: str) -> None:
    layout = KVCacheLayout[name]
    assert (
        layout.stride_order,
        layout.layer_view_order,
        layout.is_layer_compact,
        layout.is_block_contiguous,
        layout.is_block_compact,
        layout.is_block_outermost,
    ) == GOLDEN[name]
    assert "".join("LBHNC"[axis] for axis in layout.stride_order) == name


@dataclass
class Named:
    """Stands for a member of another library's enum."""

    name: str


@pytest.mark.parametrize("name", GOLDEN)
def test_parse_takes_member_name_and_foreign_member(name: str) -> None:
    member = KVCacheLayout[name]
    assert KVCacheLayout.parse(member) is member
    assert KVCacheLayout.parse(name) is member
    assert KVCacheLayout.parse(Named(name)) is member


def test_aliases_are_the_layer_names_of_old() -> None:
    assert KVCacheLayout.parse("NHD") is KVCacheLayout.LBNHC
    assert KVCacheLayout.parse("HND") is KVCacheLayout.LBHNC
    assert KVCacheLayout.parse(SimpleNamespace(name="NHD")) is KVCacheLayout.LBNHC


@pytest.mark.parametrize("bad", ["", "lbnhc", "LBNH", "DHN", 0, None, (0, 1, 2, 3, 4), Named("X")])
def test_anything_else_is_refused_with_the_valid_names(bad: object) -> None:
    with pytest.raises(UnknownLayoutError, match=r"expected one of LBHNC, LBNHC, LHBNC") as error:
        KVCacheLayout.parse(bad)
    assert repr(bad) in str(error.value)
    assert "NHD = LBNHC" in str(error.value)


@given(st.permutations("LBHNC").map("".join))
@settings(deadline=None)
def test_parse_knows_exactly_the_six_orders(name: str) -> None:
    if name in GOLDEN:
        assert KVCacheLayout.parse(name).name == name
    else:
        with pytest.raises(UnknownLayoutError):
            KVCacheLayout.parse(name)
