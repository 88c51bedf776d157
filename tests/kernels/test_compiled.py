"""Kernels compiled ahead of time for sm_80, sm_90 and sm_100: what came out of the compiler.

No GPU is needed, and none is used: this says that the code is there and of the right kind, not
that it is fast. Each check is shown to fail on a variant that breaks it.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace

import pytest

from backends.triton_kernels.compiling import CAPABILITIES, Compiled
from backends.triton_kernels.configs import ITEM_BYTES, MANY_ROWS, TileShape, generation
from tests.kernels.variants import Variant, compile_variant, variants
from tests.tolerances import Mismatch

VARIANTS = {v.name: v for v in variants()}

SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""What a program may have on each chip."""

SPILLS = {("float32", "float8_e4m3fn", 256): 512}
"""What may be spilled, in bytes: float32 queries over 8-bit storage, heads of more than 128."""

FAULTS = {
    "strides of which nothing is known": (
        replace(VARIANTS["sm_90 attention over extents"], unit=1, extents=False, block_size=16),
        "16-byte copies",
    ),
    "an offset of odd bytes in the writer": (
        replace(VARIANTS["sm_80 write bfloat16"], unit=1),
        "16-byte",
    ),
    "a tile that needs more registers than there are": (
        replace(
            VARIANTS["sm_80 attention over extents"],
            shape=TileShape(128, 64, 64, 2, 1, 8, 2, 1),
            extents=False,
        ),
        "spilled",
    ),
    "stages that do not fit into shared memory": (
        replace(
            VARIANTS["sm_90 attention over extents"],
            extents=False,
            shape=TileShape(128, 128, 64, 2, 1, 8, 4, 1),
        ),
        "shared memory",
    ),
    "float32 products where 16 bits were asked for": (
        replace(
            VARIANTS["sm_80 attention over extents"],
            dtype="float32",
            query_dtype="float32",
            extents=False,
            shape=TileShape(32, 32, 16, 2, 1, 4, 2, 1),
        ),
        "matrix instructions",
    ),
}
"""Variants that break a check, and what it says then."""


@pytest.fixture(scope="module")
def compiled() -> Iterator[dict[str, Future[Compiled]]]:
    """Everything compiles in two processes while the tests wait for one after another."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=context) as pool:
        jobs = dict(VARIANTS)
        jobs.update({name: variant for name, (variant, _) in FAULTS.items()})
        futures = {name: pool.submit(compile_variant, variant) for name, variant in jobs.items()}
        yield futures
        pool.shutdown(cancel_futures=True)


def check(variant: Variant, found: Compiled, *, of_16_bits: bool | None = None) -> None:
    """Raise :class:`Mismatch` unless the code is of the kind that the variant promises."""
    allowed = SPILLS.get((variant.query_dtype, variant.dtype, variant.head_size_v), 0)
    if found.spilled_bytes > allowed or (found.stack_bytes and not allowed):
        raise Mismatch(
            f"{variant.name}: {found.spilled_bytes} bytes spilled, {found.stack_bytes} of stack"
        )
    room = SHARED_BYTES[generation(variant.capability)]
    if found.shared_bytes > room:
        raise Mismatch(f"{variant.name}: {found.shared_bytes} bytes of shared memory, of {room}")
    if variant.kernel == "attention":
        _check_attention(variant, found)
    elif variant.kernel == "merge":
        if not found.loads(16):
            raise Mismatch(f"{variant.name}: no 16-byte loads")
    elif not (found.loads(16) and found.stores(16)):
        raise Mismatch(f"{variant.name}: no 16-byte loads or no 16-byte stores")
    elif found.loads(ITEM_BYTES[variant.dtype]) and ITEM_BYTES[variant.dtype] < 4:
        raise Mismatch(f"{variant.name}: elements are loaded one by one")


def _check_attention(variant: Variant, found: Compiled) -> None:
    wide = found.async_copies(16) + found.loads(16)
    if ITEM_BYTES[variant.dtype] == 1:
        wide += found.async_copies(8)  # 8 elements, as many as the 16-bit product takes
    elif not found.async_copies(16):
        raise Mismatch(f"{variant.name}: no 16-byte copies of K and V to shared memory")
    if not wide or found.loads(2) or found.loads(1):
        raise Mismatch(f"{variant.name}: K and V are not loaded as vectors")
    if variant.query_dtype == variant.dtype == "float32":
        if found.matrix_instructions:
            raise Mismatch(f"{variant.name}: tensor cores would round float32 to TF32")
        return
    if not found.matrix_instructions:
        raise Mismatch(f"{variant.name}: no matrix instructions")
    shape = variant.shape or variant.chosen()
    kind = {80: "mma.sync", 90: "wgmma", 100: "tcgen05.mma"}[generation(variant.capability)]
    if shape.block_m >= 64 and kind not in found.ptx:
        raise Mismatch(f"{variant.name}: none of the chip's own matrix instructions, {kind}")


@pytest.mark.parametrize("name", VARIANTS)
def test_variant(compiled: dict[str, Future[Compiled]], name: str) -> None:
    check(VARIANTS[name], compiled[name].result(timeout=590))


@pytest.mark.parametrize("name", FAULTS)
def test_the_checks_can_fail(compiled: dict[str, Future[Compiled]], name: str) -> None:
    variant, says = FAULTS[name]
    asked = replace(variant, query_dtype="bfloat16") if says.startswith("matrix") else variant
    with pytest.raises(Mismatch, match=says):
        check(asked, compiled[name].result(timeout=590))


def test_every_entry_of_the_tables_is_compiled() -> None:
    """A shape that is added to a table is compiled, or this fails."""
    shapes = {
        (generation(v.capability), ITEM_BYTES[v.dtype], max(v.head_size_v, 64)): v.chosen()
        for v in VARIANTS.values()
        if v.kernel == "attention"
        and v.max_query_len > 16
        and v.query_dtype != "float32"
        and v.block_size != 64
        and not v.extents
    }
    assert set(shapes) == set(MANY_ROWS)
    for key, shape in shapes.items():
        assert (shape.block_m, shape.block_n, shape.num_warps) == MANY_ROWS[key][:3], key
    for chip in CAPABILITIES:
        of_chip = [v for v in VARIANTS.values() if v.capability == chip]
        assert {v.kernel for v in of_chip} == {"attention", "merge", "write", "copy", "gather"}
        attention = [v for v in of_chip if v.kernel == "attention"]
        for what in ("softcap", "scalars_in_memory", "extents"):
            assert {getattr(v, what) for v in attention} == {False, True}, (chip, what)
        assert {v.splits > 1 for v in attention} == {False, True}
