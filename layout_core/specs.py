"""What one layer stores: the KV cache specs, and every size that follows from them.

Names, fields and numbers equal those of vLLM 0.29; ``block_stride_alignment`` and
``dcp_sharded`` came with 0.32, and ``None`` for either means 0.29's rule. A spec is checked
when it is built, so that a size asked of it later cannot be wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from math import gcd
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from layout_core.dtypes import DType
from layout_core.errors import MergeError, SpecError, UnsupportedError
from layout_core.quant import KVQuantMode

if TYPE_CHECKING:
    from layout_core.configs import ConfigLike

SpecT = TypeVar("SpecT", bound="KVCacheSpec")


def cdiv(a: int, b: int) -> int:
    """``a / b`` rounded up."""
    return -(-a // b)


def round_up(value: int, multiple: int) -> int:
    """The least multiple of ``multiple`` that is >= ``value``."""
    return cdiv(value, multiple) * multiple


@dataclass(frozen=True, slots=True)
class MultipleOf:
    """Any multiple of ``base``: a block size rule, or an alignment in whole kernel blocks."""

    base: int

    def __post_init__(self) -> None:
        if type(self.base) is not int or self.base < 1:
            raise SpecError(f"MultipleOf.base: expected an int >= 1, got {self.base!r}")

    def __str__(self) -> str:
        return f"multiple of {self.base}"


def _check_int(owner: object, name: str, least: int) -> None:
    value = getattr(owner, name)
    if type(value) is not int or value < least:
        raise SpecError(f"{type(owner).__name__}.{name}: expected an int >= {least}, got {value!r}")


@dataclass(frozen=True, eq=False)
class KVCacheSpec:
    """Base of all specs.

    Args:
        block_size: tokens of a manager block; >= 1.
        block_stride_alignment: the distance between blocks must be a multiple of this many
            bytes, or (:class:`MultipleOf`) of a whole kernel block. ``None``: no demand.
        dcp_sharded: whether decode context parallelism spreads the tokens over its ranks.
            ``None``: vLLM 0.29's rule, which is that attention layers are.

    Raises:
        SpecError: a field out of range, naming the class, the field and the value.
    """

    block_size: int
    block_stride_alignment: int | MultipleOf | None = field(default=None, kw_only=True)
    dcp_sharded: bool | None = field(default=None, kw_only=True)

    uniform_base: ClassVar[str] = ""
    """Name of the spec class whose descendants may share a group with this one."""

    # A spec is its class and its fields. Comparing the dicts is several times faster than the
    # tuples that dataclasses build, and planning compares every layer's spec.

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash((type(self), *self.__dict__.values()))

    def __post_init__(self) -> None:
        _check_int(self, "block_size", 1)
        alignment = self.block_stride_alignment
        if alignment is None or type(alignment) is MultipleOf:
            pass
        elif type(alignment) is not int and hasattr(alignment, "base"):  # vLLM's own class
            object.__setattr__(self, "block_stride_alignment", MultipleOf(alignment.base))
        else:
            _check_int(self, "block_stride_alignment", 1)
        if self.dcp_sharded is not None and type(self.dcp_sharded) is not bool:
            raise SpecError(
                f"{type(self).__name__}.dcp_sharded: expected None or a bool, "
                f"got {self.dcp_sharded!r}"
            )

    # The shape of a page. Specs that store nothing of their own (the wrapper) have none.

    @property
    def num_heads(self) -> int:
        """H: head slots of a page."""
        raise UnsupportedError(f"{type(self).__name__} has no page of its own, so no num_heads")

    @property
    def num_states(self) -> int:
        """N: stored states of a page."""
        return self.get_num_kernel_states(self.block_size)

    def get_num_kernel_states(self, kernel_block_size: int) -> int:
        """N of a kernel block of ``kernel_block_size`` tokens."""
        raise UnsupportedError(f"{type(self).__name__} has no page of its own, so no states")

    @property
    def state_content_size_bytes(self) -> int:
        """C: bytes of one cell."""
        raise UnsupportedError(f"{type(self).__name__} has no page of its own, so no content")

    @property
    def page_size_bytes(self) -> int:
        """Bytes that one block of one layer takes, padding included."""
        raise NotImplementedError

    def get_block_stride_alignment(self) -> int:
        """Bytes that the distance between blocks must be a multiple of; 1 for no demand.

        ``MultipleOf(n)`` is the page of a kernel block of ``gcd(n, block_size)`` tokens.
        """
        alignment = self.block_stride_alignment
        if not isinstance(alignment, MultipleOf):
            return alignment or 1
        kernel_block_size = gcd(alignment.base, self.block_size)
        if kernel_block_size == self.block_size:
            return 1
        return self.copy_with_new_block_size(kernel_block_size).page_size_bytes

    # What a request needs.

    @property
    def prefix_cacheable(self) -> bool:
        """Whether the group takes part in prefix caching."""
        return True

    @property
    def is_dcp_sharded(self) -> bool:
        """``dcp_sharded``, with ``None`` resolved by 0.29's rule."""
        return bool(self.dcp_sharded)

    def max_memory_usage_bytes(self, config: ConfigLike) -> int:
        """Most bytes of one layer that one request of the maximum length takes."""
        raise NotImplementedError

    def max_num_blocks_per_req(self, config: ConfigLike, max_len: int) -> int:
        """Block table entries that a request of ``max_len`` tokens needs."""
        return cdiv(max_len, self.block_size)

    def copy_with_new_block_size(self, block_size: int) -> Self:
        """The same spec with another block size."""
        return replace(self, block_size=block_size)

    @classmethod
    def merge(cls, specs: Sequence[Self]) -> Self:
        """One spec that stands for all layers of a group.

        Raises:
            MergeError: the layers cannot share a group, naming the first field that differs.
        """
        _check_merge_classes(specs, KVCacheSpec)
        _check_merge_classes(specs, type(specs[0]))
        _check_equal_fields(specs, [f.name for f in fields(specs[0])])
        return specs[0]

    def is_uniform_with_collection(self, specs: Mapping[str, KVCacheSpec]) -> bool:
        """Whether every spec always needs as many token slots as this one."""
        base = SPEC_CLASSES.get(self.uniform_base)
        if base is None:
            raise SpecError(
                f"{type(self).__name__}: has no uniform base, so it cannot be grouped by type"
            )
        return all(isinstance(spec, base) for spec in specs.values())


def _check_merge_classes(specs: Sequence[KVCacheSpec], wanted: type[KVCacheSpec]) -> None:
    if not specs:
        raise MergeError("specs: expected at least one spec to merge, got none")
    for index, spec in enumerate(specs):
        if not isinstance(spec, wanted):
            raise MergeError(
                f"specs[{index}]: layers of one group must all be {wanted.__name__}, "
                f"got {type(spec).__name__}"
            )


def _all_equal(specs: Sequence[KVCacheSpec]) -> bool:
    """Whether all specs are equal, compared as dicts so that no Python runs for each."""
    values = [spec.__dict__ for spec in specs]
    return len(set(map(type, specs))) == 1 and values.count(values[0]) == len(values)


def _check_equal_fields(specs: Sequence[KVCacheSpec], names: Sequence[str]) -> None:
    """Raise unless all specs agree on the named fields; equal specs cost one comparison."""
    first = specs[0]
    if _all_equal(specs):
        return
    for index, spec in enumerate(specs):
        for name in names:
            want, got = getattr(first, name, None), getattr(spec, name, None)
            if want != got:
                raise MergeError(
                    f"specs[{index}].{name}: layers of one group must agree, "
                    f"expected {want!r}, got {got!r}"
                )


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionSpec(KVCacheSpec):
    """K and V of an attention layer, ``K ‖ V`` in each cell unless packed otherwise.

    Args:
        num_kv_heads: KV heads of this rank; >= 1.
        head_size: elements of K of one head and token; >= 1.
        dtype: element type; a name or a framework's dtype is accepted and stored as a
            :class:`~layout_core.dtypes.DType`.
        head_size_v: elements of V; ``None`` means ``head_size``, 0 that there is no V.
        kv_quant_mode: quantisation of the storage.
        page_size_padded: bytes that a page takes, at least its payload; ``None``: no padding.
        num_head_slots: H of the page where it is not ``num_kv_heads``.
        state_content_bytes: C where the content is packed (sub-byte elements, scales inside).
        tokens_per_state: tokens that one stored state covers: an int > 1 compresses, a
            fraction 1/k stores k states for each token.
        max_tp_shards: distinct shards over the tensor-parallel ranks (vLLM 0.32); carried.

    Raises:
        SpecError: a field out of range, a payload that is no whole number of bytes, padding
            below the payload, a block of no whole number of states.
    """

    num_kv_heads: int
    head_size: int
    dtype: DType
    head_size_v: int = None  # type: ignore[assignment]  # an int once built
    kv_quant_mode: KVQuantMode = KVQuantMode.NONE
    page_size_padded: int | None = None
    num_head_slots: int | None = None
    state_content_bytes: int | None = None
    tokens_per_state: int | Fraction = 1
    max_tp_shards: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_size_v is None:
            object.__setattr__(self, "head_size_v", self.head_size)
        object.__setattr__(self, "dtype", DType.parse(self.dtype))
        _check_int(self, "num_kv_heads", 1)
        _check_int(self, "head_size", 1)
        _check_int(self, "head_size_v", 0)
        for name in ("page_size_padded", "num_head_slots", "state_content_bytes", "max_tp_shards"):
            if getattr(self, name) is not None:
                _check_int(self, name, 1)
        kind = type(self).__name__
        if type(self.kv_quant_mode) is not KVQuantMode:
            if self.kv_quant_mode not in set(KVQuantMode):
                raise SpecError(
                    f"{kind}.kv_quant_mode: expected a KVQuantMode, got {self.kv_quant_mode!r}"
                )
            object.__setattr__(self, "kv_quant_mode", KVQuantMode(int(self.kv_quant_mode)))
        tokens = self.tokens_per_state
        if isinstance(tokens, bool) or not isinstance(tokens, int | Fraction) or tokens <= 0:
            raise SpecError(
                f"{kind}.tokens_per_state: expected an int or a Fraction > 0, got {tokens!r}"
            )
        if self.num_states < 1:
            raise SpecError(
                f"{kind}.tokens_per_state: a block of {self.block_size} tokens holds no whole "
                f"state of {tokens} tokens"
            )
        self._derive_padding()
        payload = self.unpadded_page_size_bytes
        if self.page_size_padded is not None and self.page_size_padded < payload:
            raise SpecError(
                f"{kind}.page_size_padded: expected at least the payload of {payload} bytes, "
                f"got {self.page_size_padded}"
            )

    def _derive_padding(self) -> None:
        """Set ``page_size_padded`` where another field implies it, before it is checked."""

    @property
    def num_heads(self) -> int:
        """H: ``num_head_slots``, or one slot for each KV head."""
        return self.num_kv_heads if self.num_head_slots is None else self.num_head_slots

    def get_num_kernel_states(self, kernel_block_size: int) -> int:
        """N of a kernel block: whole states that fit its tokens."""
        return int(kernel_block_size // self.tokens_per_state)

    @property
    def state_content_size_bytes(self) -> int:
        """C: ``state_content_bytes``, or the bytes of ``K ‖ V``, counted in bits."""
        if self.state_content_bytes is not None:
            return self.state_content_bytes
        bits = (self.head_size + self.head_size_v) * self.dtype.bits
        size, rest = divmod(bits, 8)
        if rest:
            raise SpecError(
                f"{type(self).__name__}: K and V of {self.head_size} and {self.head_size_v} "
                f"elements of {self.dtype} are {bits} bits, no whole number of bytes; state the "
                "packed size in state_content_bytes"
            )
        return size

    @property
    def unpadded_page_size_bytes(self) -> int:
        """``H·N·C``: the payload of a page."""
        return self.num_heads * self.num_states * self.state_content_size_bytes

    @property
    def real_page_size_bytes(self) -> int:
        """vLLM's other name of ``unpadded_page_size_bytes``."""
        return self.unpadded_page_size_bytes

    @property
    def page_size_bytes(self) -> int:
        """``page_size_padded``, or the payload."""
        if self.page_size_padded is not None:
            return self.page_size_padded
        return self.unpadded_page_size_bytes

    @property
    def is_dcp_sharded(self) -> bool:
        return self.dcp_sharded is not False

    def max_num_blocks_per_req(self, config: ConfigLike, max_len: int) -> int:
        ranks = _dcp(config) if self.is_dcp_sharded else 1
        return cdiv(max_len, self.block_size * ranks)


def _dcp(config: ConfigLike) -> int:
    from layout_core.configs import read_config

    return int(read_config(config, "parallel_config.decode_context_parallel_size"))


def _max_model_len(config: ConfigLike) -> int:
    from layout_core.configs import read_config

    return int(read_config(config, "model_config.max_model_len"))


def _max_in_flight_tokens(config: ConfigLike) -> int:
    from layout_core.configs import read_config

    return int(read_config(config, "max_in_flight_tokens"))


ATTENTION_FIELDS: tuple[str, ...] = tuple(f.name for f in fields(AttentionSpec))
"""Fields that all layers of a group share; the subclasses' own are reconciled."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FullAttentionSpec(AttentionSpec):
    """Keeps every token of a request.

    Args:
        sliding_window, attention_chunk_size: set where a local layer is stored as a full one;
            they size nothing. At most one of them in a group.
        non_causal: the layer sees keys past the query. Visibility is given to the engine's
            ``prepare``, not read from here.
    """

    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    non_causal: bool = False

    uniform_base: ClassVar[str] = "FullAttentionSpec"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("sliding_window", "attention_chunk_size"):
            if getattr(self, name) is not None:
                _check_int(self, name, 1)

    def max_memory_usage_bytes(self, config: ConfigLike) -> int:
        tokens = _max_model_len(config)
        if self.is_dcp_sharded:
            tokens = cdiv(tokens, _dcp(config))
        return cdiv(tokens, self.block_size) * self.page_size_bytes

    @classmethod
    def merge(cls, specs: Sequence[Self]) -> Self:
        """One spec for the group: windows and chunks united, non-causal if any layer is.

        Raises:
            MergeError: fields differ, an MLA spec among others, or windows beside chunks.
            SpecError: two different windows, or two different chunks.
        """
        if specs and type(specs[0]) is cls and not issubclass(cls, MLAAttentionSpec):
            window, chunk = specs[0].sliding_window, specs[0].attention_chunk_size
            if _all_equal(specs) and (window is None or chunk is None):
                return specs[0]  # the common case: a model of equal layers
        _check_merge_classes(specs, FullAttentionSpec)
        for index, spec in enumerate(specs):
            if isinstance(spec, MLAAttentionSpec):
                raise MergeError(
                    f"specs[{index}]: {type(spec).__name__} cannot be merged by {cls.__name__}"
                )
        window = _merge_one("sliding_window", specs)
        chunk = _merge_one("attention_chunk_size", specs)
        _check_equal_fields(specs, ATTENTION_FIELDS)
        if window is not None and chunk is not None:
            raise MergeError(
                f"specs: one group cannot hold both sliding windows ({window}) and chunked "
                f"local attention ({chunk})"
            )
        return rebuild_as(
            cls,
            specs[0],
            sliding_window=window,
            attention_chunk_size=chunk,
            non_causal=any(spec.non_causal for spec in specs),
        )


def _merge_one(name: str, specs: Sequence[Any]) -> int | None:
    values = {value for spec in specs if (value := getattr(spec, name)) is not None}
    if len(values) > 1:
        raise SpecError(
            f"specs.{name}: all layers of one KV cache group must have the same, "
            f"got {sorted(values)}"
        )
    return values.pop() if values else None


def rebuild_as(
    cls: type[SpecT], spec: KVCacheSpec, *, drop: Sequence[str] = (), **changes: Any
) -> SpecT:
    """``spec`` as an instance of ``cls``: shared fields kept, others at their defaults."""
    wanted = {f.name for f in fields(cls)}
    values = {f.name: getattr(spec, f.name) for f in fields(spec) if f.name in wanted}
    for name in drop:
        values.pop(name, None)
    return cls(**(values | changes))


def _apply_alignment(spec: MLAAttentionSpec | SlidingWindowMLASpec) -> None:
    """Round the page up to ``alignment``; a padding that it made for another block size goes."""
    if spec.alignment is None:
        return
    _check_int(spec, "alignment", 1)
    payload = spec.unpadded_page_size_bytes
    padded = round_up(payload, spec.alignment)
    if padded != payload:
        object.__setattr__(spec, "page_size_padded", padded)
        return
    old = spec.page_size_padded
    if old is not None and old < payload and old % spec.alignment == 0:
        object.__setattr__(spec, "page_size_padded", None)


@dataclass(frozen=True, kw_only=True, eq=False)
class MLAAttentionSpec(FullAttentionSpec):
    """One latent vector for each state and no V (``head_size_v`` is 0).

    Args:
        alignment: bytes that a page is rounded up to a multiple of, which sets
            ``page_size_padded``.
        cache_dtype_str, model_version, non_causal_multi_token_decode: carried, and equal in
            one group; they size nothing.
    """

    head_size_v: int = 0
    cache_dtype_str: str | None = None
    alignment: int | None = None
    model_version: str | None = None
    non_causal_multi_token_decode: bool = False

    def _derive_padding(self) -> None:
        _apply_alignment(self)

    @classmethod
    def merge(cls, specs: Sequence[Self]) -> Self:
        """One spec for the group; the padded page stays, the alignment that made it does not."""
        _check_merge_classes(specs, MLAAttentionSpec)
        own = (
            "cache_dtype_str",
            "tokens_per_state",
            "model_version",
            "non_causal_multi_token_decode",
        )
        _check_equal_fields(specs, (*ATTENTION_FIELDS, *own))
        dropped = ("alignment", "sliding_window", "attention_chunk_size", "non_causal")
        return rebuild_as(cls, specs[0], drop=dropped)


@dataclass(frozen=True, kw_only=True, eq=False)
class SinkFullAttentionSpec(FullAttentionSpec):
    """Full attention with ``sink_len`` sink tokens."""

    sink_len: int | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class RSWASpec(FullAttentionSpec):
    """Reference sliding window attention: the prefix whole, and ``rswa_window`` later tokens."""

    rswa_window: int

    @classmethod
    def merge(cls, specs: Sequence[Self]) -> Self:
        _check_merge_classes(specs, RSWASpec)
        windows = {spec.rswa_window for spec in specs}
        if len(windows) > 1:
            raise MergeError(f"specs.rswa_window: must agree in one group, got {sorted(windows)}")
        return super().merge(specs)


@dataclass(frozen=True, kw_only=True, eq=False)
class HiddenStateCacheSpec(MLAAttentionSpec):
    """A cache of hidden states; it has a block table of its own."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SlidingWindowSpec(AttentionSpec):
    """Keeps the last ``sliding_window`` tokens (and ``extra_retained_tokens`` before them)."""

    sliding_window: int
    extra_retained_tokens: int = 0

    uniform_base: ClassVar[str] = "SlidingWindowSpec"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_int(self, "sliding_window", 1)
        _check_int(self, "extra_retained_tokens", 0)

    def max_admission_blocks_per_request(
        self, max_in_flight_tokens: int, max_model_len: int
    ) -> int:
        """Most blocks that one request holds at a time.

        The window less the query's own token, the retained tokens and those in flight, and
        one block more, as the window may start inside a block.
        """
        tokens = self.sliding_window - 1 + self.extra_retained_tokens + max_in_flight_tokens
        return cdiv(min(tokens, max_model_len), self.block_size) + 1

    def max_memory_usage_bytes(self, config: ConfigLike) -> int:
        if self.is_dcp_sharded and _dcp(config) > 1:
            raise UnsupportedError(
                f"{type(self).__name__}: decode context parallelism of {_dcp(config)} cannot "
                "shard a sliding window; expected a size of 1, or dcp_sharded=False"
            )
        blocks = self.max_admission_blocks_per_request(
            _max_in_flight_tokens(config), _max_model_len(config)
        )
        return blocks * self.page_size_bytes

    def is_uniform_with_collection(self, specs: Mapping[str, KVCacheSpec]) -> bool:
        return all(
            isinstance(spec, SlidingWindowSpec) and spec.sliding_window == self.sliding_window
            for spec in specs.values()
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class SlidingWindowMLASpec(SlidingWindowSpec):
    """A sliding window over latent vectors; see :class:`MLAAttentionSpec`."""

    head_size_v: int = 0
    cache_dtype_str: str | None = None
    alignment: int | None = None
    model_version: str | None = None

    def __post_init__(self) -> None:
        if self.model_version not in (None, "deepseek_v4"):
            raise SpecError(
                "SlidingWindowMLASpec.model_version: expected None or 'deepseek_v4', "
                f"got {self.model_version!r}"
            )
        super().__post_init__()

    def _derive_padding(self) -> None:
        _apply_alignment(self)

    @classmethod
    def merge(cls, specs: Sequence[Self]) -> Self:
        _check_merge_classes(specs, SlidingWindowMLASpec)
        own = ("cache_dtype_str", "model_version", "sliding_window", "extra_retained_tokens")
        _check_equal_fields(specs, (*ATTENTION_FIELDS, *own))
        return rebuild_as(cls, specs[0], drop=("alignment",))

    def is_uniform_with_collection(self, specs: Mapping[str, KVCacheSpec]) -> bool:
        return all(
            isinstance(spec, SlidingWindowMLASpec) and spec.sliding_window == self.sliding_window
            for spec in specs.values()
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class ChunkedLocalAttentionSpec(AttentionSpec):
    """Keeps the tokens of the current chunk of ``attention_chunk_size``."""

    attention_chunk_size: int

    uniform_base: ClassVar[str] = "ChunkedLocalAttentionSpec"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_int(self, "attention_chunk_size", 1)

    def max_admission_blocks_per_request(
        self, max_in_flight_tokens: int, max_model_len: int
    ) -> int:
        """Most blocks that one request holds: one chunk and the tokens in flight."""
        tokens = min(self.attention_chunk_size + max_in_flight_tokens, max_model_len)
        return cdiv(tokens, self.block_size)

    def max_memory_usage_bytes(self, config: ConfigLike) -> int:
        blocks = self.max_admission_blocks_per_request(
            _max_in_flight_tokens(config), _max_model_len(config)
        )
        return blocks * self.page_size_bytes

    def is_uniform_with_collection(self, specs: Mapping[str, KVCacheSpec]) -> bool:
        return all(
            isinstance(spec, ChunkedLocalAttentionSpec)
            and spec.attention_chunk_size == self.attention_chunk_size
            for spec in specs.values()
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class EncoderOnlyAttentionSpec(AttentionSpec):
    """An encoder's layer: it keeps no K/V between steps, so no group's pool holds it."""

    def max_memory_usage_bytes(self, config: ConfigLike) -> int:
        return 0


@dataclass(frozen=True, kw_only=True, eq=False)
class CrossAttentionSpec(AttentionSpec):
    """K/V of an encoder's output, read by a decoder's cross-attention."""

    uniform_base: ClassVar[str] = "CrossAttentionSpec"

    def max_memory_usage_bytes(self, config: ConfigLike) -> int:
        from layout_core.configs import read_config

        tokens = int(read_config(config, "scheduler_config.max_num_encoder_input_tokens"))
        return cdiv(tokens, self.block_size) * self.page_size_bytes


@dataclass(frozen=True, eq=False)
class UniformTypeKVCacheSpecs(KVCacheSpec):
    """Layers of one group that always need the same token slots but differ in page size."""

    kv_cache_specs: dict[str, KVCacheSpec]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.kv_cache_specs:
            raise SpecError("UniformTypeKVCacheSpecs.kv_cache_specs: expected at least one layer")
        for name, spec in self.kv_cache_specs.items():
            if spec.block_size != self.block_size:
                raise SpecError(
                    f"UniformTypeKVCacheSpecs: layer {name!r} has blocks of {spec.block_size} "
                    f"tokens, expected {self.block_size}"
                )
        if self.dcp_sharded is None:
            object.__setattr__(self, "dcp_sharded", self.first_spec.dcp_sharded)

    def __hash__(self) -> int:
        return hash((self.block_size, tuple(self.kv_cache_specs.items())))

    @property
    def first_spec(self) -> KVCacheSpec:
        """The spec of the first layer."""
        return next(iter(self.kv_cache_specs.values()))

    @property
    def prefix_cacheable(self) -> bool:
        return all(spec.prefix_cacheable for spec in self.kv_cache_specs.values())

    @property
    def is_dcp_sharded(self) -> bool:
        return self.first_spec.is_dcp_sharded

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of all layers together."""
        return sum(spec.page_size_bytes for spec in self.kv_cache_specs.values())

    def max_memory_usage_pages(self, config: ConfigLike) -> int:
        """Most blocks that one request takes, of the neediest layer."""
        return max(
            cdiv(spec.max_memory_usage_bytes(config), spec.page_size_bytes)
            for spec in self.kv_cache_specs.values()
        )

    def max_memory_usage_bytes(self, config: ConfigLike) -> int:
        return self.max_memory_usage_pages(config) * self.page_size_bytes

    def max_num_blocks_per_req(self, config: ConfigLike, max_len: int) -> int:
        widths = {
            spec.max_num_blocks_per_req(config, max_len) for spec in self.kv_cache_specs.values()
        }
        if len(widths) > 1:
            raise SpecError(
                "UniformTypeKVCacheSpecs: all layers of a group must need the same number of "
                f"block table entries, got {sorted(widths)}"
            )
        return widths.pop()

    @classmethod
    def is_uniform_type(cls, kv_cache_specs: Mapping[str, KVCacheSpec]) -> bool:
        """Whether all layers always need the same token slots."""
        specs = list(kv_cache_specs.values())
        if len({spec.block_size for spec in specs}) > 1:
            return False
        if len({spec.is_dcp_sharded for spec in specs}) > 1:
            return False
        return specs[0].is_uniform_with_collection(kv_cache_specs)

    @classmethod
    def from_specs(cls, kv_cache_specs: Mapping[str, KVCacheSpec]) -> Self | None:
        """The wrapper where the layers are of one type, else ``None``."""
        if not cls.is_uniform_type(kv_cache_specs):
            return None
        block_size = next(iter(kv_cache_specs.values())).block_size
        return cls(block_size=block_size, kv_cache_specs=dict(kv_cache_specs))

    def get_max_layers_per_page_size(self) -> int:
        """Layers of the most frequent page size."""
        counts = Counter(spec.page_size_bytes for spec in self.kv_cache_specs.values())
        return counts.most_common(1)[0][1]


def layer_specs_of(spec: KVCacheSpec) -> tuple[KVCacheSpec, ...]:
    """The specs of single layers that a group's spec stands for, in order."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return tuple(spec.kv_cache_specs.values())
    return (spec,)


SPEC_CLASSES: dict[str, type[KVCacheSpec]] = {
    cls.__name__: cls
    for cls in (
        FullAttentionSpec,
        MLAAttentionSpec,
        SinkFullAttentionSpec,
        RSWASpec,
        HiddenStateCacheSpec,
        SlidingWindowSpec,
        SlidingWindowMLASpec,
        ChunkedLocalAttentionSpec,
        EncoderOnlyAttentionSpec,
        CrossAttentionSpec,
        UniformTypeKVCacheSpecs,
    )
}
"""The specs that can be carried and grouped, by name."""
