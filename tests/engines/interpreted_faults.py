"""Faults planted where the torch engine meets the kernels: each must turn the suite's check red.

Run by ``python -m tests.engines.interpreted``. The kernels' own faults are planted in
``tests/kernels``.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from backends.torch_cuda import allocator
from backends.torch_cuda.kernels import gather as gathering
from backends.torch_cuda.kernels import triton as kernels
from tests.cases import PLAIN, STEP_NAMES, room_for, steps
from tests.engines.interpreted import interpreted_engine
from tests.engines.suite import check_step
from tests.tolerances import Mismatch

STEPS = {s.name: s for s in steps(4)}
FIRST = STEP_NAMES[0]
TWO_ROWS = "two CFG rows of unlike prefixes, the target one full span"

Edit = Callable[[dict[str, Any], dict[str, float]], None]


def bound(name: str, edit: Edit) -> Callable[[pytest.MonkeyPatch], None]:
    """Launches that take a buffer ``name``, with what they are given edited."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        original = kernels.start

        def start(launch: Any, buffers: Any, scalars: Any = {}) -> None:  # noqa: B006
            given, numbers = dict(buffers), dict(scalars)
            if name in given:
                edit(given, numbers)
            original(launch, given, numbers)

        for module in (kernels, gathering):
            patch.setattr(module, "start", start)

    return plant


def swap(a: str, b: str) -> Edit:
    def edit(buffers: dict[str, Any], scalars: dict[str, float]) -> None:
        buffers[a], buffers[b] = buffers[b], buffers[a]

    return edit


def place(edit: Callable[[list[int]], list[int]]) -> Callable[[pytest.MonkeyPatch], None]:
    """Every layer's offset and strides as ``edit`` makes them."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        original = allocator.place_of
        patch.setattr(allocator, "place_of", lambda *a: tuple(edit(list(original(*a)))))

    return plant


def tiles(edit: Callable[[list[int]], None]) -> Callable[[pytest.MonkeyPatch], None]:
    """Every entry of the tile table as ``edit`` makes it."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        original = kernels._tiles

        def faulty(*arguments: Any) -> array[int]:
            out, good = array("i"), original(*arguments)
            for at in range(0, len(good), kernels.TILE_FIELDS):
                entry = list(good[at : at + kernels.TILE_FIELDS])
                edit(entry)
                out.extend(entry)
            return out

        patch.setattr(kernels, "_tiles", faulty)

    return plant


def first_row(entry: list[int]) -> None:
    entry[0] = 0


def one_key_less(entry: list[int]) -> None:
    entry[4] = max(entry[3], entry[4] - 1)
    entry[6] = min(entry[6], entry[4])


def scale_twice(buffers: dict[str, Any], scalars: dict[str, float]) -> None:
    scalars["score_scale"] *= 2


def one_key_wider(buffers: dict[str, Any], scalars: dict[str, float]) -> None:
    buffers["hi"] = buffers["hi"] + (buffers["hi"] > buffers["lo"]).int()


def one_key_later(buffers: dict[str, Any], scalars: dict[str, float]) -> None:
    buffers["first_key"] = buffers["first_key"] + 1


def tables_of_the_next_row(buffers: dict[str, Any], scalars: dict[str, float]) -> None:
    buffers["block_table"] = buffers["block_table"].roll(1, 0)


FAULTS: dict[str, tuple[str, str, Callable[[pytest.MonkeyPatch], None]]] = {
    "K stored as V": ("triton", FIRST, bound("slots", swap("key", "value"))),
    "all layers at the first one's place": ("triton", FIRST, place(lambda p: [0, *p[1:]])),
    "strides of head and token swapped": (
        "triton", FIRST, place(lambda p: [p[0], p[1], p[3], p[2]]),
    ),
    "intervals swapped": ("triton", FIRST, bound("tiles", swap("lo", "hi"))),
    "tiles of one row alone": ("triton", TWO_ROWS, tiles(first_row)),
    "intervals one key wider": ("triton", FIRST, bound("tiles", one_key_wider)),
    "the last key of a tile not loaded": ("triton", FIRST, tiles(one_key_less)),
    "scores scaled twice": ("triton", FIRST, bound("tiles", scale_twice)),
    "another row's blocks": ("triton", TWO_ROWS, bound("tiles", tables_of_the_next_row)),
    "gathered K and V swapped": (
        "gather", FIRST, bound("cu_keys", swap("key_out", "value_out")),
    ),
    "gathered from a key later": ("gather", FIRST, bound("cu_keys", one_key_later)),
    "gathered from another row's blocks": (
        "gather", TWO_ROWS, bound("cu_keys", tables_of_the_next_row),
    ),
}  # fmt: skip


def check(kernel: str, step: str) -> None:
    check_step(
        interpreted_engine(), PLAIN, "LBNHC", STEPS[step], dtype="float32", kernel=kernel,
        num_heads=4, room=replace(room_for(4), rows=5),
    )  # fmt: skip


@pytest.mark.parametrize(("kernel", "step"), sorted({f[:2] for f in FAULTS.values()}))
def test_without_a_fault_the_check_is_green(kernel: str, step: str) -> None:
    check(kernel, step)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, step, plant = FAULTS[name]
    plant(monkeypatch)
    with pytest.raises(Mismatch):
        check(kernel, step)
