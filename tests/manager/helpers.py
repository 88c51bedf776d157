"""Configs, rows and a model of the pool's memory for the block manager's tests."""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm
from typing import Any

from block_manager import DiffusionKVCacheManager, DiffusionKVMetadata, DiffusionKVRequest
from layout_core import CrossAttentionSpec, FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from layout_core.resolve import make_config


def config(num_blocks: int, *block_sizes: int, cross: Sequence[int] = ()) -> KVCacheConfig:
    """A config with one layer in each group; ``cross`` names groups of cross-attention."""
    sizes = block_sizes or (4,)
    cells = lcm(*sizes)  # equal page sizes: shorter blocks have more heads
    groups = []
    for index, size in enumerate(sizes):
        kind = CrossAttentionSpec if index in cross else FullAttentionSpec
        spec = kind(block_size=size, num_kv_heads=cells // size, head_size=8, dtype="float16")
        groups.append(KVCacheGroupSpec([f"layer.{index}"], spec))
    return make_config(groups, num_blocks, "BLNHC")


def manager(num_blocks: int, *block_sizes: int, **kwargs: Any) -> DiffusionKVCacheManager:
    """A manager with prefix caching, unless told otherwise, over :func:`config`."""
    sizes = block_sizes or (4,)
    cross = kwargs.pop("cross", ())
    own = [size for index, size in enumerate(sizes) if index not in cross]
    kwargs.setdefault("enable_prefix_caching", True)
    kwargs.setdefault("max_model_len", 4096)
    kwargs.setdefault("scheduler_block_size", lcm(*own))
    kwargs.setdefault("hash_block_size", min(own))
    return DiffusionKVCacheManager(config(num_blocks, *sizes, cross=cross), **kwargs)


def row(
    name: str,
    sequence_id: int = 0,
    *,
    prefix: Sequence[int] | int = 8,
    target: int = 4,
    rest: int = 0,
    **kwargs: Any,
) -> DiffusionKVRequest:
    """A row; ``prefix`` gives its tokens, or their number (then 0, 1, 2, ...)."""
    tokens = range(prefix) if isinstance(prefix, int) else prefix
    return DiffusionKVRequest(
        f"{name}/{sequence_id}",
        sequence_id=sequence_id,
        prefix_len=len(tokens),
        target_len=target,
        seq_len=len(tokens) + target + rest,
        cache_token_ids=tuple(tokens),
        **kwargs,
    )


def rows(name: str, count: int, **kwargs: Any) -> list[DiffusionKVRequest]:
    """``count`` rows with unlike tokens."""
    length = kwargs.pop("prefix", 8)
    return [row(name, i, prefix=range(1000 * i, 1000 * i + length), **kwargs) for i in range(count)]


def admit(
    the_manager: DiffusionKVCacheManager, name: str, the_rows: Sequence[DiffusionKVRequest]
) -> DiffusionKVMetadata:
    """Reserve, and insist that it worked."""
    metadata = the_manager.reserve_request(name, the_rows)
    assert metadata is not None
    return metadata


class Memory:
    """What the pool's blocks hold: a value for each (block, offset). No layout, no bytes."""

    def __init__(self) -> None:
        self.cells: dict[tuple[int, int], object] = {}

    def write(self, block_ids: Sequence[int], size: int, position: int, value: object) -> None:
        self.cells[block_ids[position // size], position % size] = value

    def read(self, block_ids: Sequence[int], size: int, position: int) -> object:
        return self.cells.get((block_ids[position // size], position % size))

    def copy_blocks(self, pairs: Sequence[tuple[int, int]], size: int) -> None:
        sources = {source for source, _ in pairs}
        targets = [target for _, target in pairs]
        assert len(set(targets)) == len(targets)
        assert sources.isdisjoint(targets)
        for source, target in pairs:
            for offset in range(size):
                self.cells[target, offset] = self.cells.get((source, offset))
