"""What the block manager reads of a KV cache config: blocks, block sizes, who uses a group.

Works on our configs and on vLLM's, by attribute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from layout_core.errors import ConfigError, RequestError


class KVCacheConfigLike(Protocol):
    """``layout_core.KVCacheConfig`` or vLLM's: both have these attributes."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def kv_cache_groups(self) -> Sequence[Any]: ...


@dataclass(frozen=True, slots=True)
class CacheGeometry:
    """Block sizes of the groups, and which groups a sequence or a context occupies.

    A row that does not occupy a group has an empty block list there.
    """

    num_blocks: int  #: physical blocks, the null block included
    block_sizes: tuple[int, ...]  #: tokens of a block, for each group
    sequence_groups: tuple[int, ...]
    context_groups: tuple[int, ...]  #: of roles that ``role_groups`` does not name
    role_groups: Mapping[str, tuple[int, ...]]

    @classmethod
    def from_config(
        cls,
        kv_cache_config: KVCacheConfigLike,
        role_groups: Mapping[str, Sequence[int]] | None = None,
    ) -> CacheGeometry:
        """Read a config.

        Groups of cross-attention layers belong to contexts alone, all others to sequences.
        Where there is no cross-attention group, a context (a reference image) is read by the
        layers that read the sequences, so it occupies their groups.

        Args:
            kv_cache_config: ours or vLLM's.
            role_groups: for a context's ``cache_role``, the groups it occupies, where that
                rule does not hold. Groups named here do not become closed to sequences.

        Raises:
            ConfigError: no groups, a bad block size, or a group index out of range.
        """
        num_blocks = kv_cache_config.num_blocks
        groups = tuple(kv_cache_config.kv_cache_groups)
        if type(num_blocks) is not int or not 1 <= num_blocks <= 1 << 31:
            raise ConfigError(
                f"kv_cache_config.num_blocks: expected an int in [1, 2**31], got {num_blocks!r}"
            )
        if not groups:
            raise ConfigError("kv_cache_config.kv_cache_groups: expected at least one group")
        block_sizes = []
        for index, group in enumerate(groups):
            size = group.kv_cache_spec.block_size
            if type(size) is not int or size < 1:
                raise ConfigError(f"group {index}: block_size: expected an int >= 1, got {size!r}")
            block_sizes.append(size)
        cross = tuple(i for i, g in enumerate(groups) if _is_cross_attention(g.kv_cache_spec))
        sequence = tuple(i for i in range(len(groups)) if i not in cross)
        roles: dict[str, tuple[int, ...]] = {}
        for role, indices in (role_groups or {}).items():
            for index in indices:
                if not 0 <= index < len(groups):
                    raise ConfigError(
                        f"role_groups[{role!r}]: expected groups in [0, {len(groups)}), got {index}"
                    )
            roles[role] = tuple(indices)
        return cls(num_blocks, tuple(block_sizes), sequence, cross or sequence, roles)

    def groups_of_role(self, cache_role: str) -> tuple[int, ...]:
        """Groups that a context of this role occupies."""
        return self.role_groups.get(cache_role, self.context_groups)

    def blocks_for(self, num_tokens: int, groups: Sequence[int]) -> tuple[int, ...]:
        """Blocks of a row of ``num_tokens``, for each group; 0 in groups it does not occupy."""
        if num_tokens < 0:
            raise RequestError(f"num_tokens: expected >= 0, got {num_tokens}")
        if len(self.block_sizes) == 1:
            return (-(-num_tokens // self.block_sizes[0]) if groups else 0,)
        return tuple(
            [
                -(-num_tokens // size) if index in groups else 0
                for index, size in enumerate(self.block_sizes)
            ]
        )


def _is_cross_attention(spec: Any) -> bool:
    specs = getattr(spec, "kv_cache_specs", None)  # a group of unlike specs of one type
    if specs:
        return all(_is_cross_attention(each) for each in specs.values())
    return any(base.__name__ == "CrossAttentionSpec" for base in type(spec).__mro__)
