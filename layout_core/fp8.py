"""How K/V become 8-bit floats: the one rule that both engines' ``quantize`` follows.

``value / scale`` in float32, rounded to nearest even, saturated to the largest finite value
(an infinity too). A NaN of either sign becomes the one byte given here, because frameworks
choose different ones. Reading multiplies by the scale again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from layout_core.dtypes import DType
from layout_core.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class Float8Rule:
    """Saturation and NaN of one 8-bit float type."""

    largest: float  #: largest finite value; values beyond, infinities too, become ± it
    nan_byte: int  #: the byte that a NaN becomes


FLOAT8_RULES: Final[dict[str, Float8Rule]] = {
    "float8_e4m3fn": Float8Rule(448.0, 0x7F),
    "float8_e4m3fnuz": Float8Rule(240.0, 0x80),
    "float8_e5m2": Float8Rule(57344.0, 0x7F),
    "float8_e5m2fnuz": Float8Rule(57344.0, 0x80),
}
"""By the DType's name. 448 is 0x7e in e4m3fn; 57344 is 0x7b in e5m2."""


def float8_rule(dtype: DType) -> Float8Rule:
    """The rule of a type.

    Raises:
        UnsupportedError: the type is no 8-bit float; lists those that are.
    """
    rule = FLOAT8_RULES.get(dtype.name)
    if rule is None:
        raise UnsupportedError(
            f"dtype: quantize expects one of {', '.join(FLOAT8_RULES)}, got {dtype}"
        )
    return rule
