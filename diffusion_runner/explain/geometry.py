"""What is explained: a model's cache, from flags or from a config, in each layout.

A layout that cannot hold the cache keeps its place, with the reason that the core gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from diffusion_runner.errors import RunError
from layout_core import (
    DTYPES,
    DType,
    FullAttentionSpec,
    IllegalCombinationError,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheLayout,
    ResolvedLayout,
    StrideError,
    make_config,
    resolve_layout,
)

DEFAULT_DTYPE = DTYPES["bfloat16"]


@dataclass(frozen=True, slots=True)
class Geometry:
    """A cache before a layout is chosen. The defaults are small enough to be drawn whole.

    Args:
        layers, blocks: >= 1; blocks count the null block.
        heads: KV heads of this rank.
        head_size, head_size_v: elements of K and of V; ``None`` means as K.
        block_size: tokens of a block.
        dtype: element type of the pool.
        page_size_padded: bytes of a page with its padding; ``None`` for none.
        kernel_block_size: tokens of the kernel blocks that a block is split into; ``None``
            for no split.
        groups: block tables that the layers are dealt to in equal parts, in order.
    """

    layers: int = 3
    blocks: int = 4
    heads: int = 2
    head_size: int = 64
    head_size_v: int | None = None
    block_size: int = 4
    dtype: DType = DEFAULT_DTYPE
    page_size_padded: int | None = None
    kernel_block_size: int | None = None
    groups: int = 1

    def __post_init__(self) -> None:
        for name in ("layers", "blocks", "groups"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise RunError(f"{name}: expected an int >= 1, got {value!r}")
        if self.layers % self.groups:
            raise RunError(
                f"groups: expected a divisor of the {self.layers} layers, got {self.groups}"
            )

    def cache(self) -> Cache:
        """The groups that these numbers describe.

        Raises:
            SpecError: a number that no spec takes, by name.
        """
        spec = FullAttentionSpec(
            block_size=self.block_size,
            num_kv_heads=self.heads,
            head_size=self.head_size,
            head_size_v=self.head_size if self.head_size_v is None else self.head_size_v,
            dtype=self.dtype,
            page_size_padded=self.page_size_padded,
        )
        each = self.layers // self.groups
        groups = tuple(
            KVCacheGroupSpec([f"layers.{i}" for i in range(g * each, (g + 1) * each)], spec)
            for g in range(self.groups)
        )
        kernel = None if self.kernel_block_size is None else (self.kernel_block_size,) * self.groups
        return Cache(groups, self.blocks, None, kernel)


@dataclass(frozen=True, slots=True)
class Cache:
    """Groups and blocks, to be laid out."""

    groups: tuple[KVCacheGroupSpec, ...]
    num_blocks: int
    config: KVCacheConfig | None  #: where they came from a config: it, with its own layout
    kernel_block_sizes: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Variant:
    """One layout of a cache: its plan, or why the layout cannot hold it."""

    layout: KVCacheLayout
    plan: ResolvedLayout | None
    refusal: str | None = None
    carried: bool = False  #: the layout that the config itself carries


def read_config(path: Path, kernel_block_size: int | None = None) -> Cache:
    """A cache from a file that ``KVCacheConfig.to_json`` wrote.

    Raises:
        RunError: the file cannot be read.
        ConfigError: its text is no such config, by field.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"config: cannot read {path}: {error}") from error
    config = KVCacheConfig.from_json(text)
    if not any(group.layer_names for group in config.kv_cache_groups):
        raise RunError(f"config: expected at least one layer with a cache in {path}, got none")
    groups = tuple(config.kv_cache_groups)
    kernel = None if kernel_block_size is None else (kernel_block_size,) * len(groups)
    return Cache(groups, config.num_blocks, config, kernel)


def lay_out(cache: Cache, layouts: Sequence[KVCacheLayout]) -> tuple[Variant, ...]:
    """The cache in each layout. The layout that a config carries is resolved from it as it is.

    Raises:
        LayoutError: anything but a layout that cannot hold this cache, or all of them refuse.
    """
    variants = tuple(_variant(cache, layout) for layout in layouts)
    if all(variant.plan is None for variant in variants):
        raise RunError("; ".join(dict.fromkeys(f"{v.refusal}" for v in variants)))
    return variants


def _variant(cache: Cache, layout: KVCacheLayout) -> Variant:
    kernel = cache.kernel_block_sizes
    carried = cache.config is not None and cache.config.kv_cache_layout is not None
    if carried and cache.config is not None:
        carried = KVCacheLayout.parse(cache.config.kv_cache_layout) is layout
        if carried:
            # what it carries must be right: an error in it is the user's to know
            return Variant(
                layout, resolve_layout(cache.config, kernel_block_sizes=kernel), carried=True
            )
    try:
        config = make_config(cache.groups, cache.num_blocks, layout)
        return Variant(layout, resolve_layout(config, kernel_block_sizes=kernel))
    except (IllegalCombinationError, StrideError) as error:  # shown in the layout's place
        return Variant(layout, None, str(error))
