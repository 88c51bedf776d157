"""The element types that K/V can be stored in: names and sizes, no framework.

torch, JAX, NumPy and ml_dtypes dtypes are recognised by name, so nothing is imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from layout_core.errors import UnknownDTypeError


@dataclass(frozen=True, slots=True)
class DType:
    """An element type: its name as torch, NumPy and ml_dtypes spell it, and its size in bits."""

    name: str
    bits: int

    @property
    def itemsize(self) -> int:
        """Bytes of one element; types narrower than a byte raise."""
        if self.bits % 8:
            raise UnknownDTypeError(f"dtype {self.name}: {self.bits} bits are no whole byte")
        return self.bits // 8

    def __str__(self) -> str:
        return self.name

    @classmethod
    def parse(cls, dtype: object) -> DType:
        """The table's entry for a ``DType``, a name, or a framework's dtype or scalar type.

        Raises:
            UnknownDTypeError: lists the known names.
        """
        if isinstance(dtype, cls):
            return dtype
        for name in _names_of(dtype):
            name = DTYPE_ALIASES.get(name, name)
            if name in DTYPES:
                return DTYPES[name]
        raise UnknownDTypeError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")


def _names_of(dtype: object) -> list[str]:
    """Names that a dtype may be known by: itself, ``.name``, ``.dtype.name``, ``__name__``."""
    if isinstance(dtype, str):
        return [dtype.removeprefix("torch.")]
    candidates = (
        getattr(dtype, "name", None),  # numpy.dtype, ml_dtypes
        getattr(dtype, "__name__", None),  # numpy.float32, jax.numpy.float32
        getattr(getattr(dtype, "dtype", None), "name", None),  # JAX scalar types
        str(dtype).removeprefix("torch."),  # torch.dtype
    )
    return [name for name in candidates if isinstance(name, str)]


DTYPES: Final[dict[str, DType]] = {
    name: DType(name, bits)
    for name, bits in (
        ("float64", 64),
        ("float32", 32),
        ("float16", 16),
        ("bfloat16", 16),
        ("float8_e4m3fn", 8),
        ("float8_e4m3fnuz", 8),
        ("float8_e5m2", 8),
        ("float8_e5m2fnuz", 8),
        ("float8_e8m0fnu", 8),
        ("float4_e2m1fn_x2", 8),  # torch's packed pair
        ("int64", 64),
        ("int32", 32),
        ("int16", 16),
        ("int8", 8),
        ("uint8", 8),
        ("uint16", 16),
        ("uint32", 32),
        ("bool", 8),
    )
}

DTYPE_ALIASES: Final[dict[str, str]] = {
    "float": "float32",
    "half": "float16",
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
