"""How the heads of a layer are divided over ranks: padding, replication and who owns what.

A layer whose heads do not divide is padded: KV head ``h`` still serves query heads
``[h * group, (h + 1) * group)``, so an engine needs to know nothing of it. Padded heads hold
zeros, and their outputs are cut off.
"""

from __future__ import annotations

from dataclasses import dataclass

from layout_core.errors import SpecError


@dataclass(frozen=True, slots=True)
class HeadPlan:
    """Heads of one layer over ``ranks``; counts include padding unless they say otherwise."""

    ranks: int
    real_heads: int  #: query heads of the model
    real_kv_heads: int  #: KV heads of the model
    num_heads: int  #: query heads of all ranks
    num_kv_heads: int  #: distinct KV heads of all ranks

    @property
    def replicas(self) -> int:
        """Ranks that hold the same KV head; above 1 only where there are more ranks than heads."""
        return max(1, self.ranks // self.num_kv_heads)

    @property
    def heads_per_rank(self) -> int:
        """Query heads of one rank."""
        return self.num_heads // self.ranks

    @property
    def kv_heads_per_rank(self) -> int:
        """KV heads of one rank; at least 1."""
        return max(1, self.num_kv_heads // self.ranks)

    @property
    def owners(self) -> tuple[tuple[int, ...], ...]:
        """For each rank the KV heads that it holds, ascending; padded ones included."""
        per_rank, replicas = self.kv_heads_per_rank, self.replicas
        return tuple(
            tuple(range(rank // replicas * per_rank, (rank // replicas + 1) * per_rank))
            for rank in range(self.ranks)
        )

    @property
    def sources(self) -> tuple[tuple[int, int], ...]:
        """For each KV head of the model ``(rank, index on the rank)`` to gather it from, once."""
        per_rank, replicas = self.kv_heads_per_rank, self.replicas
        return tuple(
            (head // per_rank * replicas, head % per_rank) for head in range(self.real_kv_heads)
        )

    def query_head(self, head: int) -> int | None:
        """The model's query head at a place in ``[0, num_heads)``; ``None`` for a padded one.

        Raises:
            SpecError: ``head`` is out of range.
        """
        if not 0 <= head < self.num_heads:
            raise SpecError(f"head: expected an int in [0, {self.num_heads}), got {head!r}")
        group = self.num_heads // self.num_kv_heads
        real_group = self.real_heads // self.real_kv_heads
        kv_head, place = divmod(head, group)
        if kv_head >= self.real_kv_heads or place >= real_group:
            return None
        return kv_head * real_group + place


def pad_heads(num_heads: int, num_kv_heads: int, ranks: int) -> HeadPlan:
    """The least padding with which every rank gets as many whole heads as any other.

    KV heads are padded to a multiple of the ranks, or, where there are fewer heads than ranks,
    to a divisor of the ranks, and then replicated. Query heads follow: a KV head keeps its group,
    which is padded to a multiple of the replicas that share it.

    Args:
        num_heads: query heads of the model, a multiple of ``num_kv_heads``.
        num_kv_heads: KV heads of the model; >= 1.
        ranks: of tensor parallelism; >= 1.

    Raises:
        SpecError: names the argument.
    """
    for name, value in (
        ("num_heads", num_heads),
        ("num_kv_heads", num_kv_heads),
        ("ranks", ranks),
    ):
        if type(value) is not int or value < 1:
            raise SpecError(f"{name}: expected an int >= 1, got {value!r}")
    if num_heads % num_kv_heads:
        raise SpecError(
            f"num_heads: expected a multiple of the {num_kv_heads} KV heads, got {num_heads}"
        )
    if num_kv_heads >= ranks:
        kv_heads = -(-num_kv_heads // ranks) * ranks
    else:
        kv_heads = next(n for n in range(num_kv_heads, ranks + 1) if ranks % n == 0)
    replicas = max(1, ranks // kv_heads)
    group = -(-num_heads // num_kv_heads // replicas) * replicas
    return HeadPlan(ranks, num_heads, num_kv_heads, kv_heads * group, kv_heads)
