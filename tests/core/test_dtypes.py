"""Element types: sizes, and how other libraries' names are read without importing them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from layout_core.dtypes import DTYPE_ALIASES, DTYPES, DType
from layout_core.errors import UnknownDTypeError


@pytest.mark.parametrize(
    ("name", "bits"),
    [("float32", 32), ("bfloat16", 16), ("float16", 16), ("float8_e4m3fn", 8), ("uint8", 8)],
)
def test_sizes(name: str, bits: int) -> None:
    assert DType.parse(name) == DType(name, bits)
    assert DType.parse(name).itemsize == bits // 8


def test_aliases_name_known_types() -> None:
    assert {DType.parse(alias).name for alias in DTYPE_ALIASES} <= set(DTYPES)
    assert DType.parse("half").name == "float16"


class TorchLike:
    """``str(torch.float16)`` is all that torch says about a dtype's name."""

    def __str__(self) -> str:
        return "torch.bfloat16"


def test_frameworks_dtypes_by_name() -> None:
    assert DType.parse(np.dtype("float32")).name == "float32"
    assert DType.parse(np.float16).name == "float16"
    assert DType.parse(TorchLike()).name == "bfloat16"
    assert DType.parse(SimpleNamespace(dtype=np.dtype("int8"))).name == "int8"


@pytest.mark.parametrize("bad", ["complex64", "float128", 16, None])
def test_unknown_dtypes_list_the_known(bad: object) -> None:
    with pytest.raises(UnknownDTypeError, match="expected one of float64, float32"):
        DType.parse(bad)


def test_sub_byte_elements_have_no_itemsize() -> None:
    with pytest.raises(UnknownDTypeError, match="4 bits are no whole byte"):
        _ = DType("int4", 4).itemsize
