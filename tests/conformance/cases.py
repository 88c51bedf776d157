"""Random cases as plain data, from which both sides build their own objects."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, cast

from hypothesis import strategies as st

import layout_core
from layout_core import KVCacheLayout, KVCacheSpec

DTYPES = ("bfloat16", "float32", "float16", "float8_e4m3fn", "float8_e5m2", "uint8", "int8")
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
BLOCK_SIZES = (16, 1, 2, 3, 4, 8, 12, 32, 48, 64, 128)
HEAD_SIZES = (64, 1, 2, 4, 8, 16, 40, 80, 128, 192, 256)
SPEC_KINDS = (
    "FullAttentionSpec",
    "SlidingWindowSpec",
    "MLAAttentionSpec",
    "ChunkedLocalAttentionSpec",
    "CrossAttentionSpec",
    "SlidingWindowMLASpec",
    "SinkFullAttentionSpec",
    "RSWASpec",
    "HiddenStateCacheSpec",
)


@dataclass(frozen=True)
class SpecCase:
    """A spec as data: the class's name and its fields."""

    kind: str
    fields: tuple[tuple[str, Any], ...]

    def ours(self) -> KVCacheSpec:
        """Our spec."""
        cls = getattr(layout_core, self.kind)
        return cast("KVCacheSpec", cls(**dict(self.fields)))

    def get(self, name: str, default: Any = None) -> Any:
        """A field's value."""
        return dict(self.fields).get(name, default)

    def changed(self, **changes: Any) -> SpecCase:
        """The same case with other fields."""
        return SpecCase(self.kind, tuple((dict(self.fields) | changes).items()))


layouts = st.sampled_from(list(KVCacheLayout))


def rarely(draw: st.DrawFn, one_in: int) -> bool:
    """True about once in ``one_in`` draws; shrinks to False."""
    return draw(st.integers(0, one_in - 1)) == one_in - 1


@st.composite
def spec_cases(
    draw: st.DrawFn,
    kinds: tuple[str, ...] = SPEC_KINDS,
    *,
    plain: bool = False,
    block_sizes: tuple[int, ...] = BLOCK_SIZES,
    max_heads: int = 8,
    head_sizes: tuple[int, ...] = HEAD_SIZES,
) -> SpecCase:
    """A spec, mostly a valid one.

    Args:
        plain: no packing, padding or compression, and no 0.32 fields.
    """
    kind = draw(st.sampled_from(kinds))
    fields: dict[str, Any] = {
        "block_size": draw(st.sampled_from(block_sizes)),
        "num_kv_heads": draw(st.integers(1, max_heads)),
        "head_size": draw(st.sampled_from(head_sizes)),
        "dtype": draw(st.sampled_from(DTYPES)),
    }
    is_mla = "MLA" in kind or kind == "HiddenStateCacheSpec"
    if is_mla and not rarely(draw, 4):
        fields["num_kv_heads"] = 1
    if not is_mla and rarely(draw, 5):
        fields["head_size_v"] = draw(st.sampled_from((0, *head_sizes)))
    if rarely(draw, 10):
        fields["kv_quant_mode"] = draw(st.integers(0, 9))
    if not plain:
        _odd_fields(draw, kind, fields)
    if kind in ("SlidingWindowSpec", "SlidingWindowMLASpec"):
        fields["sliding_window"] = draw(st.sampled_from((1, 4, 16, 33, 100, 1024)))
        if rarely(draw, 6):
            fields["extra_retained_tokens"] = draw(st.integers(0, 5))
    elif kind == "ChunkedLocalAttentionSpec":
        fields["attention_chunk_size"] = draw(st.sampled_from((1, 8, 16, 50, 512)))
    elif kind == "RSWASpec":
        fields["rswa_window"] = draw(st.sampled_from((16, 64)))
    elif kind == "SinkFullAttentionSpec":
        fields["sink_len"] = draw(st.sampled_from((None, 4, 16)))
    if kind in ("FullAttentionSpec", "SinkFullAttentionSpec", "RSWASpec"):
        if rarely(draw, 6):
            fields["sliding_window"] = draw(st.sampled_from((16, 64)))
        if rarely(draw, 8):
            fields["attention_chunk_size"] = draw(st.sampled_from((16, 64)))
        if rarely(draw, 6):
            fields["non_causal"] = True
    return SpecCase(kind, tuple(fields.items()))


def _odd_fields(draw: st.DrawFn, kind: str, fields: dict[str, Any]) -> None:
    """Packing, compression, padding, alignment: each of them rare, so that some meet."""
    if rarely(draw, 8):
        fields["num_head_slots"] = draw(st.integers(1, 6))
    if rarely(draw, 8):
        fields["state_content_bytes"] = draw(st.sampled_from((1, 16, 72, 132, 576, 656)))
    if rarely(draw, 6):
        fields["tokens_per_state"] = draw(
            st.sampled_from((2, 4, Fraction(1, 2), Fraction(1, 4), Fraction(3, 2), 128))
        )
    is_mla = "MLA" in kind or kind == "HiddenStateCacheSpec"
    if is_mla:
        if rarely(draw, 3):
            fields["alignment"] = draw(st.sampled_from((1, 16, 512, 576)))
        if rarely(draw, 4):
            fields["cache_dtype_str"] = draw(st.sampled_from(("fp8_ds_mla", "bfloat16")))
        if rarely(draw, 5):
            fields["model_version"] = "deepseek_v4"
        if "Sliding" not in kind and rarely(draw, 6):
            fields["non_causal_multi_token_decode"] = True
    if rarely(draw, 5):
        fields["page_size_padded"] = max(
            1, payload_of(kind, fields) + draw(st.sampled_from((0, 64, 1, 4096, -1)))
        )
    if rarely(draw, 6):
        fields["block_stride_alignment"] = draw(st.sampled_from((1, 64, 256, 576)))
    if rarely(draw, 8):
        fields["dcp_sharded"] = draw(st.booleans())


def payload_of(kind: str, fields: dict[str, Any]) -> int:
    """Bytes of an unpadded page, by arithmetic of its own."""
    is_mla = "MLA" in kind or kind == "HiddenStateCacheSpec"
    size = fields["head_size"]
    size_v = fields.get("head_size_v", 0 if is_mla else size)
    content = fields.get("state_content_bytes") or (size + size_v) * ITEMSIZE.get(
        fields["dtype"], 1
    )
    heads = fields.get("num_head_slots") or fields["num_kv_heads"]
    return int(heads * int(fields["block_size"] // fields.get("tokens_per_state", 1)) * content)


def without_later_fields(case: SpecCase) -> SpecCase:
    """The case as vLLM 0.29 can express it."""
    kept = tuple(
        (k, v) for k, v in case.fields if k not in ("block_stride_alignment", "dcp_sharded")
    )
    return SpecCase(case.kind, kept)
