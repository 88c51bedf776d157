"""What the scheduler sends to the workers: which blocks each row of a request owns.

Fields and names are those of vLLM-Omni's payloads, so that either side can read the other's.
``block_ids`` is a tuple with one list of block ids for each KV cache group, in position order.
They are plain records, owned by whoever received them: the manager keeps no reference.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class DiffusionKVContextMetadata:
    """Blocks of a named context, which rows of its request may share."""

    context_id: str
    cache_role: str
    num_tokens: int
    block_ids: tuple[list[int], ...]


@dataclass(slots=True)
class DiffusionKVSequenceMetadata:
    """Blocks of one sequence ``[prefix | target | rest]`` of ``seq_len`` tokens.

    ``[0, cached_prefix_len)`` holds finished K/V; step 0 queries the rest.
    """

    sequence_id: int
    prefix_len: int
    target_len: int
    seq_len: int
    block_ids: tuple[list[int], ...]
    cached_prefix_len: int = 0
    context_ids: tuple[str, ...] = ()
    num_computed_tokens: int = 0
    first_key: int = 0  #: positions before it were evicted; not a field of vLLM-Omni's


@dataclass(slots=True)
class DiffusionKVMetadata:
    """All rows of one request, as of one allocation generation.

    A generation is unique in its manager and grows with every change of the request.
    """

    request_id: str
    allocation_generation: int
    sequences: tuple[DiffusionKVSequenceMetadata, ...]
    contexts: tuple[DiffusionKVContextMetadata, ...] = ()


@dataclass(slots=True)
class DiffusionKVUpdate:
    """A changed allocation, and what to copy before the next write.

    ``copies`` has, for each group, ``(src, dst)`` pairs for the engine's ``copy_blocks``; run
    them before anything is written through the new metadata.
    """

    metadata: DiffusionKVMetadata
    copies: tuple[list[tuple[int, int]], ...]
