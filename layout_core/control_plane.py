"""The two ends of one adoption: what a worker answers, and what the control plane makes of it.

The transport is the caller's (a pipe, a queue, an RPC): a config travels as JSON text, and a
reply as a small picklable record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from layout_core.configs import ConfigLike
from layout_core.diffusion import adopt_kv_cache_layout
from layout_core.errors import AdoptionError, LayoutError
from layout_core.layouts import KVCacheLayout
from layout_core.tensors import KVCacheConfig


@dataclass(frozen=True, slots=True)
class WorkerReply:
    """What one worker answers to a config."""

    rank: int
    layout: str | None  #: name of the adopted layout; ``None`` where it was refused
    error: str | None = None  #: class and message of the refusal


def serve_adoption(
    rank: int, vllm_config: ConfigLike, config_json: str, send: Callable[[WorkerReply], None]
) -> KVCacheConfig:
    """In a worker: read a config, adopt its layout, answer, and return it for allocation.

    A refusal is answered first and then raised, so that the worker stops and the control
    plane knows why.

    Args:
        rank: this worker's rank.
        vllm_config: this worker's config.
        config_json: text of :meth:`KVCacheConfig.to_json`.
        send: hands the reply to the control plane.

    Raises:
        LayoutError: whatever reading or adopting raised.
    """
    try:
        config = KVCacheConfig.from_json(config_json)
        layout = adopt_kv_cache_layout(vllm_config, config)
    except LayoutError as error:
        send(WorkerReply(rank, None, f"{type(error).__name__}: {error}"))
        raise
    send(WorkerReply(rank, layout.name))
    return config


def collect_replies(
    replies: Iterable[WorkerReply], num_workers: int, layout: KVCacheLayout | str
) -> None:
    """In the control plane: raise unless every worker adopted the layout.

    Args:
        replies: in any order.
        num_workers: ranks are ``[0, num_workers)``.
        layout: what they were sent.

    Raises:
        AdoptionError: names every rank that refused, with its reason, that adopted another
            layout, that answered twice, or that did not answer.
    """
    expected = KVCacheLayout.parse(layout).name
    by_rank: dict[int, WorkerReply] = {}
    faults = []
    for reply in replies:
        if reply.rank in by_rank or not 0 <= reply.rank < num_workers:
            faults.append(f"rank {reply.rank}: an answer that is not expected")
            continue
        by_rank[reply.rank] = reply
    for rank in range(num_workers):
        answer = by_rank.get(rank)
        if answer is None:
            faults.append(f"rank {rank}: no answer")
        elif answer.error is not None:
            faults.append(f"rank {rank}: {answer.error}")
        elif answer.layout != expected:
            faults.append(f"rank {rank}: adopted {answer.layout}, expected {expected}")
    if faults:
        raise AdoptionError(
            f"workers: {len(faults)} of {num_workers} did not adopt layout {expected}: "
            + "; ".join(faults)
        )
