"""The layout of a tensor made elsewhere, from its strides or from what its owner declares."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layout_core import KVCacheLayout, recognise_layout
from layout_core.errors import LayoutConflictError, StrideError

# LMCache#2374: [K/V, blocks, tokens, heads, elements], head-major in memory
SHAPE = (2, 7286, 64, 8, 128)
STRIDES = (477495296, 65536, 128, 8192, 1)


def test_head_major_strides_are_recognised() -> None:
    layout = recognise_layout("KBNHC", SHAPE, STRIDES)
    assert layout is KVCacheLayout.LBHNC
    assert layout is KVCacheLayout.parse("HND")
    token_major = (477495296, 65536, 1024, 128, 1)
    assert recognise_layout("KBNHC", SHAPE, token_major) is KVCacheLayout.LBNHC


def test_a_block_gather_equals_indexing_element_by_element() -> None:
    # the same strides over fewer and smaller blocks: [K/V, B, N, H, D]
    pair, blocks, tokens, heads, size = shape = (2, 5, 4, 3, 2)
    strides = (blocks * 24, 24, size, tokens * size, 1)
    assert recognise_layout("KBNHC", shape, strides) is KVCacheLayout.LBHNC
    memory = np.arange(pair * blocks * 24)
    view = np.lib.stride_tricks.as_strided(memory, shape, [8 * s for s in strides])
    for block in (3, 0):
        run = memory[block * strides[1] : (block + 1) * strides[1]]  # one run of bytes
        gathered = run.reshape(heads, tokens, size).transpose(1, 0, 2)
        for n, h, d in np.ndindex(tokens, heads, size):
            assert gathered[n, h, d] == view[0, block, n, h, d]
            assert gathered[n, h, d] == memory[np.dot((0, block, n, h, d), strides)]


def test_a_declaration_settles_what_one_head_leaves_open() -> None:
    # LMCache#4798: H = 1, so both orders have the same strides
    shape, strides = (10, 16, 1, 8), (128, 8, 8, 1)
    for name in ("LBHNC", "LBNHC", "NHD"):
        assert recognise_layout("BNHC", shape, strides, declared=name) is KVCacheLayout.parse(name)
    with pytest.raises(StrideError, match=r"follow LBHNC, LBNHC.*; expected one, so declare it"):
        recognise_layout("BNHC", shape, strides)


def test_a_declaration_that_the_strides_contradict() -> None:
    with pytest.raises(LayoutConflictError, match=r"do not follow LBNHC; they follow LBHNC"):
        recognise_layout("KBNHC", SHAPE, STRIDES, declared="LBNHC")


@pytest.mark.parametrize(
    ("axes", "shape", "strides", "wording"),
    [
        ("BNH", (2, 3, 4), (12, 4, 4), r"follow no layout"),
        ("BNH", (2, 3), (12, 4), r"one distinct letter for each axis"),
        ("BBH", (2, 3, 4), (12, 4, 1), r"one distinct letter for each axis"),
        ("BNC", (2, 3, 4), (12, 4, 1), r"expected B, H and N, got 'BNC'"),
    ],
)
def test_malformed(
    axes: str, shape: tuple[int, ...], strides: tuple[int, ...], wording: str
) -> None:
    with pytest.raises(StrideError, match=wording):
        recognise_layout(axes, shape, strides)


@given(
    st.sampled_from([layout.name for layout in KVCacheLayout]),
    st.tuples(*[st.integers(2, 4)] * 5),
    st.permutations("LBHNC").map("".join),
)
@settings(deadline=None)
def test_every_layout_is_told_from_the_others(
    layout: str, sizes: tuple[int, ...], axes: str
) -> None:
    by_axis = dict(zip("LBHNC", sizes))
    strides, step = {}, 1
    for axis in reversed(layout):
        strides[axis] = step
        step *= by_axis[axis]
    assert (
        recognise_layout(axes, [by_axis[a] for a in axes], [strides[a] for a in axes]).name
        == layout
    )
