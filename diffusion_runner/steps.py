"""The rows of a batch and what each denoise step asks of them: framework-free.

Every request is one or two CFG rows ``[prompt | image]``. The first step queries from the end
of what the prefix cache already holds; later steps query the image alone and read the prompt
from its pages. Without prefix reuse, every step queries everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from block_manager import DiffusionKVMetadata
from diffusion_runner.cache import blocks_of
from diffusion_runner.model.config import DigitsConfig
from diffusion_runner.model.inputs import TokenBatch, TokenRow, build_token_batch
from layout_core import Bucket, PagedAttentionRow


@dataclass(frozen=True, slots=True)
class CfgRow:
    """One row: its tokens and how much of its prompt is in pages already."""

    request_id: str
    sequence_id: int
    prompt_tokens: tuple[int, ...]
    cached_prefix_len: int

    def seq_len(self, config: DigitsConfig) -> int:
        return len(self.prompt_tokens) + config.num_image_tokens


@dataclass(frozen=True, eq=False)
class StepInputs:
    """One kind of step: the rows for the engine and the tokens for the model."""

    rows: tuple[PagedAttentionRow, ...]
    spans: tuple[tuple[tuple[int, int], ...], ...]
    tokens: TokenBatch
    bucket: Bucket  #: static shapes, so that another wave of a run compiles nothing new

    @property
    def num_query_tokens(self) -> int:
        return self.tokens.num_tokens


def rows_of(metadata: DiffusionKVMetadata, prompts: Sequence[Sequence[int]]) -> tuple[CfgRow, ...]:
    """Rows of one admitted request; ``prompts[i]`` belongs to sequence ``i``."""
    return tuple(
        CfgRow(
            request_id=metadata.request_id,
            sequence_id=sequence.sequence_id,
            prompt_tokens=tuple(prompts[sequence.sequence_id]),
            cached_prefix_len=sequence.cached_prefix_len,
        )
        for sequence in metadata.sequences
    )


def first_step(rows: Sequence[CfgRow], config: DigitsConfig, block_size: int) -> StepInputs:
    """Queries ``[cached_prefix_len, seq_len)`` of every row, padded as if nothing were cached."""
    padded = sum(row.seq_len(config) for row in rows)
    return _step(rows, config, [row.cached_prefix_len for row in rows], block_size, padded)


def full_step(rows: Sequence[CfgRow], config: DigitsConfig, block_size: int) -> StepInputs:
    """Queries ``[0, seq_len)`` of every row: a step without prefix reuse."""
    return _step(rows, config, [0 for _ in rows], block_size)


def later_step(rows: Sequence[CfgRow], config: DigitsConfig, block_size: int) -> StepInputs:
    """Queries the image tokens ``[prefix_len, seq_len)`` of every row."""
    return _step(rows, config, [len(row.prompt_tokens) for row in rows], block_size)


def _step(
    rows: Sequence[CfgRow],
    config: DigitsConfig,
    starts: Sequence[int],
    block_size: int,
    padded_tokens: int | None = None,
) -> StepInputs:
    tokens = build_token_batch(
        [TokenRow(row.prompt_tokens, first_token=start) for row, start in zip(rows, starts)],
        config,
        pad_to=padded_tokens,
    )
    return StepInputs(
        rows=tuple(
            PagedAttentionRow(
                request_id=row.request_id,
                sequence_id=row.sequence_id,
                query_len=row.seq_len(config) - start,
                seq_len=row.seq_len(config),
                kv_start_pos=start,
            )
            for row, start in zip(rows, starts)
        ),
        # the image sees the prompt and itself fully: one full span; the prompt is causal
        spans=tuple(((len(row.prompt_tokens), row.seq_len(config)),) for row in rows),
        tokens=tokens,
        bucket=Bucket(
            tokens=len(tokens.token_ids),
            rows=len(rows),
            blocks=max(blocks_of(row.seq_len(config), block_size) for row in rows),
        ),
    )
