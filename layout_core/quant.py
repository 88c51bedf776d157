"""How stored K/V is quantised: the modes that a spec can name."""

from __future__ import annotations

from enum import IntEnum


class KVQuantMode(IntEnum):
    """Quantisation of stored K/V; names and values are vLLM's (0.29, then 0.32's additions).

    It changes no size here: packed formats state theirs through ``state_content_bytes``.
    """

    NONE = 0
    FP8_PER_TENSOR = 1
    INT8_PER_TOKEN_HEAD = 2
    FP8_PER_TOKEN_HEAD = 3
    INT4_PER_TOKEN_HEAD = 4
    NVFP4 = 5
    TURBOQUANT_K8V4 = 6
    TURBOQUANT_4BIT_NC = 7
    TURBOQUANT_K3V4_NC = 8
    TURBOQUANT_3BIT_NC = 9
    NVFP4_DS_MLA = 10
    ULTRAQUANT_4BIT = 11


def get_kv_quant_mode(kv_cache_dtype: str) -> KVQuantMode:
    """The mode that a ``kv_cache_dtype`` option names; an unquantised one gives ``NONE``.

    Raises:
        KeyError: a ``turboquant_`` name that is none of the modes.
    """
    exact = {
        "int4_per_token_head": KVQuantMode.INT4_PER_TOKEN_HEAD,
        "int8_per_token_head": KVQuantMode.INT8_PER_TOKEN_HEAD,
        "fp8_per_token_head": KVQuantMode.FP8_PER_TOKEN_HEAD,
        "nvfp4_ds_mla": KVQuantMode.NVFP4_DS_MLA,
        "ultraquant_4bit": KVQuantMode.ULTRAQUANT_4BIT,
    }
    if kv_cache_dtype in exact:
        return exact[kv_cache_dtype]
    if kv_cache_dtype.startswith("nvfp4"):
        return KVQuantMode.NVFP4
    if kv_cache_dtype.startswith("turboquant_"):
        return KVQuantMode[kv_cache_dtype.upper()]
    if kv_cache_dtype.startswith("fp8"):
        return KVQuantMode.FP8_PER_TENSOR
    return KVQuantMode.NONE
