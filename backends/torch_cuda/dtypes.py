"""Element types: the core's names as torch dtypes, bit-exact copies, and 8-bit quantisation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from layout_core.dtypes import DTYPES, DType
from layout_core.errors import MissingPackageError, TensorError, UnsupportedError
from layout_core.fp8 import FLOAT8_RULES, float8_rule

if TYPE_CHECKING:
    import numpy as np

COMPUTE_DTYPES = ("float64", "float32", "float16", "bfloat16")
"""Types that queries may have, and stored K/V too; stored K/V may be an 8-bit float instead."""

_CORE_DTYPES: Final = {
    getattr(torch, name): dtype for name, dtype in DTYPES.items() if hasattr(torch, name)
}
"""Looked up in every call, where parsing the name would take longer than the checks."""

_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def torch_dtype(dtype: DType) -> torch.dtype:
    """torch's dtype of the same name.

    Raises:
        UnsupportedError: this torch has none.
    """
    found = getattr(torch, dtype.name, None)
    if not isinstance(found, torch.dtype):
        raise UnsupportedError(f"dtype: torch {torch.__version__} has no {dtype.name}")
    return found


def core_dtype(dtype: torch.dtype) -> DType:
    """The core's entry of a torch dtype.

    Raises:
        UnknownDTypeError: the core has none.
    """
    found = _CORE_DTYPES.get(dtype)
    return DType.parse(dtype) if found is None else found  # parse lists the known names


def integer_dtype(itemsize: int) -> torch.dtype:
    """The integer type that carries elements of ``itemsize`` bytes without looking at them."""
    return _INTEGERS[itemsize]


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers of the same width: copies then keep every NaN's payload."""
    return tensor.view(integer_dtype(tensor.element_size()))


def is_float8(dtype: DType) -> bool:
    """Whether the type is an 8-bit float that ``quantize`` makes."""
    return dtype.name in FLOAT8_RULES


def quantize(x: torch.Tensor, scale: float, dtype: torch.dtype | DType | str) -> torch.Tensor:
    """``x / scale`` as an 8-bit float, by the rule of :mod:`layout_core.fp8`.

    Saturates (466 becomes 0x7e in e4m3fn); a NaN becomes the rule's byte.

    Args:
        x: any shape, float32, float16 or bfloat16.
        scale: > 0; what reading multiplies by (``k_scale``, ``v_scale``).
        dtype: an 8-bit float.

    Raises:
        UnsupportedError: ``dtype`` is no 8-bit float.
        TensorError: ``x`` is not floating point, or the scale is not positive and finite.
    """
    target = DType.parse(dtype)
    rule = float8_rule(target)
    if core_dtype(x.dtype).name not in ("float32", "float16", "bfloat16"):
        raise TensorError(f"x: quantize expects float32, float16 or bfloat16, got {x.dtype}")
    if not 0 < scale < float("inf"):
        raise TensorError(f"scale: expected a finite number > 0, got {scale!r}")
    # float32 throughout: a float64 division would round twice. A device scalar is divided by,
    # as a Python scalar may be turned into a product with the reciprocal.
    divisor = torch.tensor(scale, dtype=torch.float32, device=x.device)
    value = (x.float() / divisor).clamp(-rule.largest, rule.largest)
    stored = value.to(torch_dtype(target))
    bits = stored.view(torch.uint8)
    bits.masked_fill_(torch.isnan(value), rule.nan_byte)
    return stored


def from_numpy(array: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    """A tensor with a copy of a NumPy array; ml_dtypes' types come over bit for bit.

    Raises:
        UnknownDTypeError: the array's dtype is not in the core's table.
    """
    import numpy as np

    dtype = DType.parse(array.dtype)
    words = np.ascontiguousarray(array).reshape(array.shape)
    if dtype.name == "bool":
        return torch.from_numpy(words.copy()).to(device)
    carrier = words.view(f"i{dtype.itemsize}" if dtype.itemsize > 1 else "u1")
    bits = torch.from_numpy(carrier.copy()).to(device)
    return bits.view(torch_dtype(dtype))


def to_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A NumPy array with a copy of a tensor; types NumPy lacks come as ml_dtypes' bit for bit.

    Raises:
        MissingPackageError: such a type, and ml_dtypes is not installed.
    """
    import numpy as np

    dtype = core_dtype(tensor.dtype)
    # clone: the array must not be a window on memory that a later write changes
    host = tensor.detach().to("cpu", copy=True).contiguous()
    if dtype.name == "bool":
        return host.numpy()
    bits: np.ndarray[Any, Any] = as_bits(host).numpy()
    if hasattr(np, dtype.name):
        return bits.view(dtype.name)
    try:
        import ml_dtypes
    except ImportError as error:
        raise MissingPackageError(
            f"dtype: NumPy has no {dtype.name}, and ml_dtypes, which has, is not installed; "
            "pip install ml_dtypes"
        ) from error
    return bits.view(getattr(ml_dtypes, dtype.name))
