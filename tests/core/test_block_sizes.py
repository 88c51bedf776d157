"""One block size for every backend, chosen before anything is loaded (vllm#48499, vllm#49845)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layout_core import MultipleOf, resolve_block_size
from layout_core.errors import BlockSizeError


def backend(name: str, *sizes: int | MultipleOf) -> Any:
    return type(
        name,
        (),
        {
            "get_name": staticmethod(lambda: name),
            "get_supported_kernel_block_sizes": staticmethod(lambda: list(sizes)),
        },
    )


class VllmMultipleOf:
    """vLLM's class: only ``base`` is read."""

    def __init__(self, base: int) -> None:
        self.base = base


@pytest.mark.parametrize(
    ("backends", "expected"),
    [
        ([{32, 64}, {64}], 64),
        ([], 16),
        ([[MultipleOf(1)]], 16),
        ([[32, 64], [32, 64]], 32),
        ([[MultipleOf(24)], [MultipleOf(16)]], 48),
        ([[MultipleOf(16)], [8, 96]], 96),
        ([[MultipleOf(32)], [MultipleOf(48), 64]], 64),
        ([[VllmMultipleOf(32)]], 32),
        ([64], 64),
        ([backend("A", 32, 64), backend("B", 64)], 64),
        ([backend("A"), object], 16),
    ],
)
def test_a_common_size(backends: list[Any], expected: int) -> None:
    assert resolve_block_size(backends) == expected


def test_disjoint_sets_are_both_shown() -> None:
    with pytest.raises(
        BlockSizeError, match=r"accepted by all of them; one: 16, 32; two: 64, multiple of 48"
    ):
        resolve_block_size([backend("one", 16, 32), backend("two", 64, MultipleOf(48))])


def test_a_refused_request_names_value_backend_and_the_nearest() -> None:
    with pytest.raises(
        BlockSizeError,
        match=r"a block size of 8 is not accepted by flash: multiple of 16; the nearest that "
        r"every backend accepts is 16",
    ):
        resolve_block_size([backend("any", MultipleOf(1)), backend("flash", MultipleOf(16))], 8)
    with pytest.raises(BlockSizeError, match=r"not accepted by b: 64; .* accepts is 64"):
        resolve_block_size([backend("a", 32, 64), backend("b", 64)], 32)
    assert resolve_block_size([backend("a", MultipleOf(16))], 48) == 48


@pytest.mark.parametrize(
    ("backends", "requested", "wording"),
    [
        ([[16]], 0, r"requested: expected an int >= 1, got 0"),
        ([[16]], 16.0, r"requested: expected an int >= 1, got 16.0"),
        ([[0]], None, r"backends\[0\]: backend 0: expected ints >= 1 or MultipleOf, got 0"),
        ([["16"]], None, r"expected ints >= 1 or MultipleOf, got '16'"),
        ([[]], None, r"backends\[0\]: backend 0: accepts no block size at all"),
    ],
)
def test_malformed(backends: list[Any], requested: Any, wording: str) -> None:
    with pytest.raises(BlockSizeError, match=wording):
        resolve_block_size(backends, requested)


options = st.lists(
    st.one_of(st.integers(1, 40), st.integers(1, 12).map(MultipleOf)), min_size=1, max_size=3
)


def accepts(option: list[int | MultipleOf], size: int) -> bool:
    return any(
        size % one.base == 0 if isinstance(one, MultipleOf) else size == one for one in option
    )


@given(st.lists(options, min_size=1, max_size=3), st.integers(1, 60))
@settings(max_examples=50, deadline=None)
def test_against_brute_force(drawn: list[list[int | MultipleOf]], requested: int) -> None:
    legal = [size for size in range(1, 1400) if all(accepts(option, size) for option in drawn)]
    if not legal:
        with pytest.raises(BlockSizeError, match="no block size is accepted by all"):
            resolve_block_size(drawn)
        return
    assert resolve_block_size(drawn) == (16 if 16 in legal else legal[0])
    if requested in legal:
        assert resolve_block_size(drawn, requested) == requested
    else:
        nearest = min(legal, key=lambda size: (abs(size - requested), size))
        with pytest.raises(BlockSizeError, match=rf"every backend accepts is {nearest}$"):
            resolve_block_size(drawn, requested)
