"""Sequence parallelism around a paged call: strict Ulysses, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from layout_core.errors import UnsupportedError


def ulysses_degree(parallel_config: Any) -> int:
    """The degree by which heads are divided, of a config whose parallelism we serve.

    Args:
        parallel_config: vLLM-Omni's ``DiffusionParallelConfig``; ``None`` is no parallelism.

    Returns:
        Ranks of strict Ulysses; 1 without.

    Raises:
        UnsupportedError: ring, all-gather or a mode of Ulysses other than ``strict``.
    """
    if parallel_config is None:
        return 1
    for field, name in (
        ("ring_degree", "ring attention"),
        ("allgather_degree", "all-gather of K/V"),
    ):
        degree = getattr(parallel_config, field, 1)
        if degree > 1:
            raise UnsupportedError(
                f"parallel_config.{field}: {name} is not served, expected 1, got {degree}; it "
                "keeps K/V where no page table can find it; use ulysses_degree with "
                "ulysses_mode='strict'"
            )
    ulysses = int(getattr(parallel_config, "ulysses_degree", 1))
    mode = getattr(parallel_config, "ulysses_mode", "strict")
    if ulysses > 1 and mode != "strict":
        raise UnsupportedError(
            f"parallel_config.ulysses_mode: expected 'strict', got {mode!r}; other modes divide "
            "heads or tokens unevenly"
        )
    return ulysses


def rank_local_spec(spec: Any, degree: int) -> Any:
    """What one rank of a strict Ulysses group stores: the KV heads divided by the degree.

    Args:
        spec: an attention spec, ours or vLLM's, with all KV heads of the layer.
        degree: ranks of the group; see :func:`ulysses_degree`.

    Raises:
        UnsupportedError: KV heads that the degree does not divide.
    """
    if degree < 1 or spec.num_kv_heads % degree:
        raise UnsupportedError(
            f"ulysses_degree: expected a divisor of the {spec.num_kv_heads} KV heads, got {degree}"
        )
    return replace(spec, num_kv_heads=spec.num_kv_heads // degree)
