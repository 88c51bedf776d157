"""The one table of tolerances: (operation, dtype) -> how far two results may lie apart, and why.

Where bytes move (writes, copies, loads) there is no tolerance: tests compare bytes. The largest
errors seen on the suite's steps, relative to 1 + |expected|: float32 4e-7, float16 4e-4, bfloat16
3e-3; the limits leave room for longer rows, larger scores and other machines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Tolerance:
    """``|got - expected| <= absolute + relative * |expected|``, element by element."""

    absolute: float
    relative: float
    reason: str


TOLERANCES: dict[tuple[str, str], Tolerance] = {
    ("attention", "float32"): Tolerance(
        5e-6,
        5e-6,
        "float32 products and sums over up to some thousand keys of inputs of size 1, in an "
        "order that the kernel chooses; the oracle is float64 over the same rounded inputs",
    ),
    ("attention", "float16"): Tolerance(
        1.5e-3,
        1.5e-3,
        "the output is rounded to 11 bits (2^-11 = 5e-4), and a kernel may round the softmax "
        "weights to float16 before it multiplies them with V",
    ),
    ("attention", "bfloat16"): Tolerance(
        1e-2,
        1e-2,
        "as float16 with 8 bits: 2^-8 = 4e-3 for the output and again for the weights",
    ),
    ("attention over 8 bits", "float32"): Tolerance(
        2e-5,
        2e-5,
        "the oracle reads the stored values, so storage does not count; scales enter the products",
    ),
    ("attention over 8 bits", "bfloat16"): Tolerance(
        4e-2,
        2e-2,
        "as attention in bfloat16, the output multiplied by v_scale (2.5) after it was rounded",
    ),
    ("engines", "float32"): Tolerance(1e-5, 1e-5, "two results, each within 'attention'"),
    ("engines", "float16"): Tolerance(3e-3, 3e-3, "two results, each within 'attention'"),
    ("engines", "bfloat16"): Tolerance(2e-2, 2e-2, "two results, each within 'attention'"),
    ("20 denoise steps", "float64"): Tolerance(
        1e-9, 1e-9, "a transformer called 20 times under guidance; 2e-13 seen"
    ),
    ("20 denoise steps", "float32"): Tolerance(
        1e-3,
        1e-3,
        "as in float64, where guidance multiplies each call's rounding and feeds it to the next; "
        "the unchanged transformer in float32 ends 1e-4 away from itself in float64",
    ),
    ("transformer call", "float32"): Tolerance(
        2e-5, 2e-5, "some layers of attention and matrix products on values of size 1; 6e-7 seen"
    ),
    ("transformer call", "bfloat16"): Tolerance(
        6e-2, 3e-2, "as in float32 with 8 bits, rounded after every operation of some layers"
    ),
    ("lse", "float32"): Tolerance(
        5e-6, 5e-6, "a float32 sum of weights and one logarithm, on scores of size 1 to 10"
    ),
}


class Mismatch(AssertionError):
    """A comparison of numbers or bytes that failed: what a planted fault must lead to."""


def tolerance(operation: str, dtype: str) -> Tolerance:
    """The entry of the table; a missing one raises ``KeyError``, as nothing is assumed."""
    return TOLERANCES[operation, dtype]


def assert_close(
    got: npt.ArrayLike, expected: npt.ArrayLike, operation: str, dtype: str, where: str = ""
) -> None:
    """Raise :class:`Mismatch` unless ``got`` is within the table's tolerance of ``expected``.

    Shapes must be equal, NaN anywhere fails, and an infinity is met by the same one alone.
    """
    limit = tolerance(operation, dtype)
    a, b = np.asarray(got).astype(np.float64), np.asarray(expected).astype(np.float64)
    if a.shape != b.shape:
        raise Mismatch(f"{where}: shape {a.shape}, expected {b.shape}")
    with np.errstate(invalid="ignore", over="ignore"):
        near = np.abs(a - b) <= limit.absolute + limit.relative * np.abs(b)
    inside = (a == b) | (near & np.isfinite(b))  # an infinite limit would admit anything
    if not inside.all():
        worst = np.argwhere(~inside)[0]
        at = tuple(int(i) for i in worst)
        with np.errstate(invalid="ignore"):
            apart = np.abs(a - b)
        finite = apart[np.isfinite(apart)]
        largest = float(finite.max()) if finite.size else float("nan")
        raise Mismatch(
            f"{where}: {int((~inside).sum())} of {inside.size} values outside the tolerance for "
            f"{operation} in {dtype} ({limit.absolute:g} + {limit.relative:g} relative); first at "
            f"{at}: got {a[at]!r}, expected {b[at]!r}; largest difference {largest:g}"
        )


def assert_same_bytes(got: bytes, expected: bytes, where: str = "") -> None:
    """Raise :class:`Mismatch` unless two buffers are equal, naming the first byte that differs."""
    if got == expected:
        return
    if len(got) != len(expected):
        raise Mismatch(f"{where}: {len(got)} bytes, expected {len(expected)}")
    a, b = np.frombuffer(got, np.uint8), np.frombuffer(expected, np.uint8)
    differs = np.flatnonzero(a != b)
    at = int(differs[0])
    raise Mismatch(
        f"{where}: {differs.size} of {a.size} bytes differ; first at byte {at}: got "
        f"0x{a[at]:02x}, expected 0x{b[at]:02x}"
    )


def assert_same_bits(got: npt.NDArray[Any], expected: npt.NDArray[Any], where: str = "") -> None:
    """Raise :class:`Mismatch` unless two arrays have one dtype, one shape and the same bits."""
    if got.dtype != expected.dtype or got.shape != expected.shape:
        raise Mismatch(
            f"{where}: {got.dtype} {got.shape}, expected {expected.dtype} {expected.shape}"
        )
    assert_same_bytes(got.tobytes(), expected.tobytes(), where)
