"""The records that a control plane sends to its workers: tensors, groups, config.

They are plain and mutable, as vLLM's are, and prove nothing by themselves: a worker checks a
config against its own layout, groups and specs when it adopts or resolves it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from layout_core.specs import KVCacheSpec


@dataclass
class KVCacheTensor:
    """Where a set of layers of one spec lies in the allocation.

    Layer ``layers[l]``'s block ``b`` starts at ``offset + l*layer_stride + b*block_stride``.

    Args:
        size: bytes of the whole allocation, equal on all tensors of a config.
        layers: layer names, in L order.
        layer_stride: bytes from one layer to the next.
        block_stride: bytes from one manager block to the next.
        offset: byte of block 0 of the first layer.
    """

    size: int
    layers: list[str]
    layer_stride: int
    block_stride: int
    offset: int = 0


@dataclass
class KVCacheGroupSpec:
    """Layers that share one block table.

    Args:
        layer_names: the layers, in order.
        kv_cache_spec: what each stores; a wrapper where they differ in page size.
        is_eagle_group: the group holds a draft model's layers.
        enable_kv_transfer: the group takes part in external K/V transfer.
    """

    layer_names: list[str]
    kv_cache_spec: KVCacheSpec
    is_eagle_group: bool = False
    enable_kv_transfer: bool = True


@dataclass
class KVCacheConfig:
    """A worker's whole cache: how many blocks, where each layer lies, who shares a table.

    Args:
        num_blocks: manager blocks, the null block included.
        kv_cache_tensors: placements; groups overlay each other from byte 0.
        kv_cache_groups: the groups.
        prefix_cache_retention_interval: carried for the scheduler.
        kv_cache_layout: name of the resolved layout; ``None`` until it was resolved.
        hash_block_size, cache_hit_alignment_tokens: carried for the scheduler (vLLM 0.32).
        kv_tp_replicas: tensor-parallel ranks that hold the same K/V (vLLM 0.32); carried.
    """

    num_blocks: int
    kv_cache_tensors: list[KVCacheTensor] = field(default_factory=list)
    kv_cache_groups: list[KVCacheGroupSpec] = field(default_factory=list)
    prefix_cache_retention_interval: int | None = None
    kv_cache_layout: str | None = None
    hash_block_size: int | None = None
    cache_hit_alignment_tokens: int | None = None
    kv_tp_replicas: int = 1

    def to_json(self) -> str:
        """The config as JSON text; :meth:`from_json` gives an equal config back."""
        from layout_core.carrying import config_to_json

        return config_to_json(self)

    @classmethod
    def from_json(cls, text: str) -> KVCacheConfig:
        """A config from the text of :meth:`to_json`.

        Raises:
            ConfigError: text that is no such config, or that carries a field which changes
                addressing or ownership and is not known here, by name.
        """
        from layout_core.carrying import config_from_json

        return config_from_json(text)
