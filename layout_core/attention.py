"""The attention contract between a diffusion model and an engine, over any array type.

Fields, names and meaning are those of vLLM-Omni 0.30's attention backends, so that a model
written against either runs on both engines. Lengths and boundaries are plain ints where a device
value would force the host to wait for the device. Nothing here knows a framework.

Dense calls are ``[B, S, H, D]``: batch, tokens, heads, head size. ``Sq`` counts queries, ``Sk``
keys; queries stand bottom-right, at positions ``Sk - Sq + i``, unless ``query_ranges`` says where.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, Literal, TypeVar

from layout_core.errors import PlatformError, TensorError, UnsupportedError, VisibilityError

if TYPE_CHECKING:
    from layout_core.protocols import Layer

ArrayT = TypeVar("ArrayT")
PoolT = TypeVar("PoolT")
BatchT = TypeVar("BatchT")

JOINT_STRATEGIES: Final = ("front", "rear")

PLATFORM_METHODS: Final[dict[str, str]] = {
    "cuda": "forward_cuda",
    "rocm": "forward_hip",
    "musa": "forward_musa",
    "npu": "forward_npu",
    "xpu": "forward_xpu",
    "cpu": "forward_cpu",
}
"""Which method of an :class:`AttentionImpl` serves a platform."""

PLATFORM_ALIASES: Final[dict[str, str]] = {"gpu": "cuda", "hip": "rocm"}
"""What frameworks call a platform where its name is another."""


@dataclass(frozen=True, slots=True)
class QueryRange:
    """Local queries ``[local_start, local_end)`` stand at positions ``global_start`` onwards.

    A shard of a sequence-parallel run publishes these: together they cover its queries, in order.
    """

    local_start: int
    local_end: int
    global_start: int


@dataclass(frozen=True, slots=True)
class VideoTokenSpan:
    """One video grid ``latent_grid = (t, h, w)``, which starts at row ``start``."""

    start: int
    latent_grid: tuple[int, int, int]
    role: Literal["reference", "target"]

    @property
    def length(self) -> int:
        """Rows of the grid: ``t * h * w``."""
        t, h, w = self.latent_grid
        return t * h * w


@dataclass(frozen=True, slots=True)
class VideoTokenLayout:
    """Where the video lies in ``[prefix | video | padding]``.

    Who publishes it says that a mask masks only trailing padding. Either ``prefix_len`` and
    ``latent_grid`` of the one video at the end, or ``used_len`` and every span; audio and image
    rows between the spans are used rows like any other.
    """

    prefix_len: int | None = None
    latent_grid: tuple[int, int, int] | None = None
    used_len: int | None = None
    video_spans: tuple[VideoTokenSpan, ...] = ()

    def used_length(self) -> int:
        """Rows that are not padding: ``used_len``, else ``prefix_len + t * h * w``.

        Raises:
            VisibilityError: neither is given, they contradict each other, or a span ends past
                the used rows.
        """
        used = self.used_len
        if self.prefix_len is not None and self.latent_grid is not None:
            t, h, w = self.latent_grid
            end = self.prefix_len + t * h * w
            if used is None:
                used = end
            elif end > used:
                raise VisibilityError(
                    f"video_layout: prefix_len and latent_grid end at row {end}, past used_len "
                    f"{used}"
                )
        if used is None:
            raise VisibilityError(
                "video_layout: expected used_len, or prefix_len and latent_grid, got neither"
            )
        for index, span in enumerate(self.video_spans):
            if span.start < 0 or span.start + span.length > used:
                raise VisibilityError(
                    f"video_layout.video_spans[{index}]: rows [{span.start}, "
                    f"{span.start + span.length}) are outside the used rows [0, {used})"
                )
        return used


@dataclass(frozen=True, slots=True)
class PackedPaddingMetadata(Generic[ArrayT]):
    """Padding at the end of a ``[real, pad]`` packing, stated as ints: no mask is needed.

    ``cu_seqlens_q`` and ``cu_seqlens_k`` are ``[0, length]`` on the device.
    """

    q_length: int
    kv_length: int
    cu_seqlens_q: ArrayT
    cu_seqlens_k: ArrayT


@dataclass
class AttentionMetadata(Generic[ArrayT]):
    """What one dense call needs to know beside Q, K and V.

    Args:
        attn_mask: boolean (or integer: not 0) for what is visible, floating point to be added
            to the scores. ``[B, Sk]`` for keys (also where ``B == Sq``), ``[Sq, Sk]``,
            ``[B, Sq, Sk]``, or anything that broadcasts to ``[B, H, Sq, Sk]``.
        joint_attn_mask: ``[B, Sj]``, of the joint tokens, as ``attn_mask`` is of the others. One
            may be boolean where the other is added.
        joint_query, joint_key, joint_value: ``[B, Sj, H, D]``, put before or after the others.
        joint_strategy: ``front`` or ``rear``.
        extra: parameters of single backends; unknown keys are ignored. Well known:
            ``cu_seqlens_q``, ``cu_seqlens_k`` (starts of packed documents, and their end),
            ``max_seqlen_q``, ``max_seqlen_k``; ``valid_kv_length`` (int: only that many keys are
            real); ``kv_cache_dtype`` (the name of a type to quantise dense K/V to, or ``None``).
        full_attn_spans: for each sample its full spans ``[start, end)`` in global positions;
            outside them attention is causal. ``None``: the layer's own rule.
        query_ranges: global positions of a shard's queries; ``None``: bottom-right.
        video_layout: advisory; see :class:`VideoTokenLayout`. It counts the rows of a sequence
            without joint tokens, so a call that has some does not use it.
        packed_padding: advisory; see :class:`PackedPaddingMetadata`.
    """

    attn_mask: ArrayT | None = None
    joint_attn_mask: ArrayT | None = None
    joint_query: ArrayT | None = None
    joint_key: ArrayT | None = None
    joint_value: ArrayT | None = None
    joint_strategy: str = "front"
    extra: dict[str, Any] = field(default_factory=dict)
    full_attn_spans: Sequence[Sequence[tuple[int, int]]] | None = None
    query_ranges: tuple[QueryRange, ...] | None = None
    video_layout: VideoTokenLayout | None = None
    packed_padding: PackedPaddingMetadata[ArrayT] | None = None


class AttentionMetadataBuilder(Generic[ArrayT]):
    """Makes metadata for dense calls and refuses what contradicts itself before a layer runs."""

    def build(self, **values: Any) -> AttentionMetadata[ArrayT]:
        """Metadata with these fields.

        Raises:
            TensorError: an unknown field, or fields that contradict each other.
        """
        known = {f.name for f in fields(AttentionMetadata)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise TensorError(
                f"metadata: unknown field {unknown[0]!r}; expected some of "
                f"{', '.join(sorted(known))}"
            )
        metadata: AttentionMetadata[ArrayT] = AttentionMetadata(**values)
        check_joint(metadata)
        return metadata


def check_joint(metadata: AttentionMetadata[Any]) -> None:
    """Raise unless the joint fields go together.

    Raises:
        TensorError: names the field that is missing or wrong.
    """
    if metadata.joint_strategy not in JOINT_STRATEGIES:
        raise TensorError(
            f"joint_strategy: expected one of {', '.join(JOINT_STRATEGIES)}, "
            f"got {metadata.joint_strategy!r}"
        )
    if (metadata.joint_key is None) != (metadata.joint_value is None):
        missing = "joint_key" if metadata.joint_key is None else "joint_value"
        raise TensorError(f"{missing}: expected joint_key and joint_value together, got it as None")
    if metadata.joint_attn_mask is not None and metadata.joint_key is None:
        raise TensorError("joint_attn_mask: expected a joint_key that it masks, got None")


@dataclass(slots=True, eq=False)
class PoolCell(Generic[PoolT]):
    """Holds a pool, so that an engine that consumes it can put the new one back."""

    pool: PoolT


@dataclass(frozen=True, slots=True, eq=False)
class PagedAttentionContext(Generic[ArrayT, PoolT, BatchT]):
    """One paged call, prepared by a worker: the arguments of ``Engine.forward_paged``."""

    cell: PoolCell[PoolT]
    layer: Layer
    query: ArrayT  #: [T, Hq, D]
    key: ArrayT | None  #: [T, Hkv, D]
    value: ArrayT | None  #: [T, Hkv, Dv]
    batch: BatchT
    softcap: float = 0.0
    k_scale: float = 1.0
    v_scale: float = 1.0


def platform_of(array: object) -> str:
    """The platform of an array: a key of :data:`PLATFORM_METHODS` where it is known.

    Reads ``array.device`` as torch (``.type``) and JAX (``.platform``) spell it.
    """
    device = getattr(array, "device", None)
    for attribute in ("type", "platform"):
        name = getattr(device, attribute, None)
        if isinstance(name, str):
            return PLATFORM_ALIASES.get(name, name)
    return str(device)


class AttentionBackend(ABC):
    """States what an attention implementation can do. A flag that says yes is kept."""

    accept_output_buffer: ClassVar[bool] = False
    supports_piecewise_spans: ClassVar[bool] = False  #: takes ``full_attn_spans``
    supports_paged_kv: ClassVar[bool] = False  #: has ``forward_paged``
    supports_prefix_kv_slicing: ClassVar[bool] = False  #: takes ``extra["valid_kv_length"]``
    supported_platforms: ClassVar[tuple[str, ...] | None] = None  #: ``None``: any

    @staticmethod
    @abstractmethod
    def get_name() -> str:
        """The name that messages and selections use."""

    @staticmethod
    @abstractmethod
    def get_impl_cls() -> type[AttentionImpl[Any]]:
        """The class whose instances attend."""

    @staticmethod
    @abstractmethod
    def get_metadata_cls() -> type[AttentionMetadata[Any]]:
        """The class of ``attn_metadata``."""

    @staticmethod
    @abstractmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder[Any]]:
        """The class that builds ``attn_metadata``."""

    @staticmethod
    @abstractmethod
    def get_supported_head_sizes() -> list[int]:
        """Head sizes that are served; an empty list for any."""

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Whether a head size is served."""
        sizes = cls.get_supported_head_sizes()
        return not sizes or head_size in sizes

    @classmethod
    def indexes_kv_by_block_stride(cls) -> bool | None:
        """Whether pages are found by the block stride, which demands a block-outermost layout.

        ``False`` forbids one. A backend that follows any stride sets the attribute itself to
        ``None``: it demands and forbids nothing. Ask through
        :func:`layout_core.diffusion.block_stride_demand`, which knows both forms.
        """
        return False

    @classmethod
    def supports_attention_mask(cls, attention_spec: object | None = None) -> bool:
        """Whether an ``attn_mask`` is served (for the kernel that a spec selects)."""
        return False

    @classmethod
    def supports_packed_mask_free(cls) -> bool:
        """Whether a ``[real, pad]`` packing runs on ``packed_padding`` without a mask."""
        return False

    @classmethod
    def supports_multi_doc_packed_varlen(cls) -> bool:
        """Whether documents packed by ``cu_seqlens`` never see each other."""
        return False

    @classmethod
    def validate_available(cls) -> None:
        """Raise where the backend cannot run here, before a model is built.

        Raises:
            MissingPackageError: says what to install.
        """
        return  # a hook: most backends need nothing more than what imported them


def check_backend_available(
    backend: type[AttentionBackend], platform: str, head_sizes: Iterable[int] = ()
) -> None:
    """Raise where a backend cannot run a model here; call it before the model is built.

    Args:
        backend: the class that was selected.
        platform: where the model will run, as a framework or :data:`PLATFORM_METHODS` spells it.
        head_sizes: of the model's layers.

    Raises:
        MissingPackageError: what the backend needs is not installed; says what to install.
        PlatformError: a platform that is not in ``supported_platforms``.
        UnsupportedError: a head size that ``supports_head_size`` denies.
    """
    name = backend.get_name()
    backend.validate_available()
    platform = PLATFORM_ALIASES.get(platform, platform)
    served = backend.supported_platforms
    if served is not None and platform not in served:
        raise PlatformError(
            f"backend {name}: platform {platform!r} is not in supported_platforms, which is "
            f"{', '.join(served)}"
        )
    for size in head_sizes:
        if not backend.supports_head_size(size):
            sizes = ", ".join(str(s) for s in backend.get_supported_head_sizes())
            raise UnsupportedError(
                f"backend {name}: supports_head_size({size}) is False; it serves {sizes}"
            )


def check_backend_serves(
    backend: type[AttentionBackend],
    metadata: AttentionMetadata[Any] | None,
    *,
    attention_spec: object | None = None,
    paged: bool = False,
) -> None:
    """Raise unless a backend says that it serves this call.

    Advisory fields (``packed_padding``, ``video_layout``, unknown ``extra`` keys) need no flag.

    Raises:
        UnsupportedError: names the backend and the flag.
    """
    name = backend.get_name()
    if paged and not backend.supports_paged_kv:
        raise UnsupportedError(
            f"backend {name}: a paged call needs supports_paged_kv, which is False"
        )
    if metadata is None:
        return
    masked = metadata.attn_mask is not None or metadata.joint_attn_mask is not None
    if masked and not backend.supports_attention_mask(attention_spec):
        raise UnsupportedError(
            f"backend {name}: attn_mask needs supports_attention_mask(), which is False"
        )
    if metadata.full_attn_spans is not None and not backend.supports_piecewise_spans:
        raise UnsupportedError(
            f"backend {name}: full_attn_spans needs supports_piecewise_spans, which is False"
        )
    extra = metadata.extra
    if extra.get("valid_kv_length") is not None and not backend.supports_prefix_kv_slicing:
        raise UnsupportedError(
            f"backend {name}: extra['valid_kv_length'] needs supports_prefix_kv_slicing, which is "
            "False"
        )
    bounds = extra.get("cu_seqlens_q")
    # two documents may be [real, pad], which a mask or packed_padding serves too
    if bounds is not None and len(bounds) > 3 and not backend.supports_multi_doc_packed_varlen():
        raise UnsupportedError(
            f"backend {name}: {len(bounds) - 1} documents in extra['cu_seqlens_q'] need "
            "supports_multi_doc_packed_varlen(), which is False"
        )


class AttentionImpl(ABC, Generic[ArrayT]):
    """Attends for one layer.

    Args:
        num_heads: query heads.
        head_size: elements of a head.
        softmax_scale: multiplies the scores.
        causal: a query sees no key past its position; full spans override it.
        num_kv_heads: KV heads; ``None``: as many as query heads.
        prefix: the layer's name, for messages.
        qkv_layout: ``None`` or ``BSND``: batch, tokens, heads, head size.
        backend_kwargs: options of single backends.
        extra: ignored.
    """

    _supported_kv_cache_dtypes: ClassVar[dict[str, set[str]]] = {}
    """For each platform the names that :meth:`supports_kv_cache_dtype` says yes to."""

    @abstractmethod
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        softmax_scale: float,
        causal: bool = False,
        num_kv_heads: int | None = None,
        prefix: str = "",
        qkv_layout: str | None = None,
        backend_kwargs: dict[str, Any] | None = None,
        **extra: Any,
    ) -> None: ...

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None, platform_key: str) -> bool:
        """Whether dense K/V are quantised to this type on a platform; ``None`` always is."""
        if kv_cache_dtype is None:
            return True
        return kv_cache_dtype in cls._supported_kv_cache_dtypes.get(platform_key, set())

    def platform(self, query: ArrayT) -> str:
        """The platform that a call runs on: a key of :data:`PLATFORM_METHODS`."""
        return platform_of(query)

    def forward(
        self,
        query: ArrayT,
        key: ArrayT,
        value: ArrayT,
        attn_metadata: AttentionMetadata[ArrayT] | None = None,
    ) -> ArrayT:
        """Dense attention on the platform of the query.

        Args:
            query: ``[B, Sq, Hq, D]``.
            key, value: ``[B, Sk, Hkv, D]`` and ``[B, Sk, Hkv, Dv]``.
            attn_metadata: masks, documents, spans, ...; ``None``: the layer's rule alone.

        Returns:
            ``[B, Sj + Sq, Hq, Dv]`` (``Sj`` is 0 without joint queries); zero where a query sees
            nothing.

        Raises:
            PlatformError: no implementation for the platform.
            UnsupportedError: ``extra["kv_cache_dtype"]`` that ``supports_kv_cache_dtype`` denies.
        """
        platform = self.platform(query)
        method = PLATFORM_METHODS.get(platform)
        if method is None:
            raise self._no_platform(platform)
        dtype = None if attn_metadata is None else attn_metadata.extra.get("kv_cache_dtype")
        if not self.supports_kv_cache_dtype(dtype, platform):
            raise UnsupportedError(
                f"{type(self).__name__}: extra['kv_cache_dtype'] needs "
                f"supports_kv_cache_dtype({dtype!r}, {platform!r}), which is False"
            )
        call: Callable[..., ArrayT] = getattr(self, method)
        return call(query, key, value, attn_metadata)

    def forward_paged(self, context: PagedAttentionContext[ArrayT, Any, Any]) -> ArrayT:
        """One paged call that a worker prepared; the new pool goes into ``context.cell``.

        Returns:
            ``[T, Hq, Dv]``.

        Raises:
            UnsupportedError: the backend's ``supports_paged_kv`` is False.
        """
        raise UnsupportedError(
            f"{type(self).__name__}: a paged call needs supports_paged_kv, which is False"
        )

    def _no_platform(self, platform: str) -> PlatformError:
        served = [
            name
            for name, method in PLATFORM_METHODS.items()
            if getattr(type(self), method) is not getattr(AttentionImpl, method)
        ]
        return PlatformError(
            f"{type(self).__name__}: no implementation for platform {platform!r}; it has one for "
            f"{', '.join(served) or 'none'}"
        )

    def forward_cuda(
        self,
        query: ArrayT,
        key: ArrayT,
        value: ArrayT,
        attn_metadata: AttentionMetadata[ArrayT] | None = None,
    ) -> ArrayT:
        """:meth:`forward` on a CUDA GPU."""
        raise self._no_platform("cuda")

    def forward_hip(
        self,
        query: ArrayT,
        key: ArrayT,
        value: ArrayT,
        attn_metadata: AttentionMetadata[ArrayT] | None = None,
    ) -> ArrayT:
        """:meth:`forward` on a ROCm GPU: CUDA's."""
        return self.forward_cuda(query, key, value, attn_metadata)

    def forward_musa(
        self,
        query: ArrayT,
        key: ArrayT,
        value: ArrayT,
        attn_metadata: AttentionMetadata[ArrayT] | None = None,
    ) -> ArrayT:
        """:meth:`forward` on a MUSA GPU: CUDA's."""
        return self.forward_cuda(query, key, value, attn_metadata)

    def forward_npu(
        self,
        query: ArrayT,
        key: ArrayT,
        value: ArrayT,
        attn_metadata: AttentionMetadata[ArrayT] | None = None,
    ) -> ArrayT:
        """:meth:`forward` on an NPU."""
        raise self._no_platform("npu")

    def forward_xpu(
        self,
        query: ArrayT,
        key: ArrayT,
        value: ArrayT,
        attn_metadata: AttentionMetadata[ArrayT] | None = None,
    ) -> ArrayT:
        """:meth:`forward` on an XPU."""
        raise self._no_platform("xpu")

    def forward_cpu(
        self,
        query: ArrayT,
        key: ArrayT,
        value: ArrayT,
        attn_metadata: AttentionMetadata[ArrayT] | None = None,
    ) -> ArrayT:
        """:meth:`forward` on the CPU."""
        raise self._no_platform("cpu")
