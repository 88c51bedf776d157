"""What one call of the model gets: the tokens of all rows, packed one row after another.

NumPy only, so that both engines are fed the same arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from diffusion_runner.model.config import DigitsConfig


@dataclass(frozen=True)
class TokenRow:
    """One row `[prompt | image]`, and how much of it this step computes.

    `prompt_tokens` come from `encode_prompt`. The row contributes its tokens from `first_token`
    on: 0 for all of them, `len(prompt_tokens)` for the image alone, and in between where a
    cache holds the first `first_token` tokens of the prompt already.
    """

    prompt_tokens: tuple[int, ...]
    first_token: int = 0

    def num_tokens(self, config: DigitsConfig) -> int:
        """Tokens that the row contributes to the batch."""
        return config.num_image_tokens + len(self.prompt_tokens) - self.first_token


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """`T` packed tokens. The first `num_tokens` are real, the others padding at the end.

    `token_ids` `[T]` int32: byte or begin-of-text id; 0 at image tokens and padding.
    `is_image` `[T]` bool.
    `position_ids` `[T]` int32: index into the prompt's positions, or, where `is_image`, into
        the image's; so an image's positions do not depend on the length of its prompt.
    `image_token_index` `[T]` int32: `row * num_image_tokens + i` for patch `i` of `row`; -1
        at prompt tokens and padding.
    `query_lens` `[R]` int32: tokens that each row contributes; they sum to `num_tokens`.
    """

    token_ids: NDArray[np.int32]
    is_image: NDArray[np.bool_]
    position_ids: NDArray[np.int32]
    image_token_index: NDArray[np.int32]
    query_lens: NDArray[np.int32]
    num_tokens: int

    @property
    def num_rows(self) -> int:
        """Rows in the batch."""
        return len(self.query_lens)

    def image_token_positions(self) -> NDArray[np.int32]:
        """Where the image tokens lie: `[R * num_image_tokens]` indices into `[T]`.

        In the order of `image_token_index`, so `velocity[positions]` reshapes to
        `[R, num_image_tokens, patch_dim]`.
        """
        return np.flatnonzero(self.is_image).astype(np.int32)

    def spread_patches(self, patches: NDArray[np.float32]) -> NDArray[np.float32]:
        """`[R, num_image_tokens, patch_dim]` to `[T, patch_dim]`, zeros at the other tokens."""
        flat = patches.reshape(-1, patches.shape[-1])
        spread = np.zeros((len(self.token_ids), flat.shape[-1]), dtype=np.float32)
        spread[self.is_image] = flat[self.image_token_index[self.is_image]]
        return spread


def build_token_batch(
    rows: Sequence[TokenRow], config: DigitsConfig, *, pad_to: int | None = None
) -> TokenBatch:
    """Packs `rows` one after another, then pads to `pad_to` tokens if that is given.

    Padding gives the static shapes that a compiled step wants. Padded tokens are text with
    id 0 at position 0; nothing may read what the model computes for them.
    """
    if not rows:
        raise ValueError("a batch needs at least one row")
    for index, row in enumerate(rows):
        if not 1 <= len(row.prompt_tokens) <= config.max_prompt_tokens:
            raise ValueError(
                f"row {index} has {len(row.prompt_tokens)} prompt tokens, "
                f"expected 1..{config.max_prompt_tokens}"
            )
        if not 0 <= row.first_token <= len(row.prompt_tokens):
            raise ValueError(
                f"row {index} starts at token {row.first_token}, "
                f"expected 0..{len(row.prompt_tokens)}: its image tokens are always computed"
            )
    lengths = [row.num_tokens(config) for row in rows]
    num_tokens = sum(lengths)
    total = num_tokens if pad_to is None else pad_to
    if total < num_tokens:
        raise ValueError(f"cannot pad {num_tokens} tokens to {pad_to}")

    image = config.num_image_tokens
    token_ids = np.zeros(total, dtype=np.int32)
    is_image = np.zeros(total, dtype=np.bool_)
    position_ids = np.zeros(total, dtype=np.int32)
    image_token_index = np.full(total, -1, dtype=np.int32)
    start = 0
    for index, row in enumerate(rows):
        prompt = row.prompt_tokens[row.first_token :]
        stop = start + len(prompt)
        token_ids[start:stop] = prompt
        position_ids[start:stop] = np.arange(row.first_token, len(row.prompt_tokens))
        start = stop
        stop = start + image
        is_image[start:stop] = True
        position_ids[start:stop] = np.arange(image)
        image_token_index[start:stop] = index * image + np.arange(image)
        start = stop
    return TokenBatch(
        token_ids=token_ids,
        is_image=is_image,
        position_ids=position_ids,
        image_token_index=image_token_index,
        query_lens=np.asarray(lengths, dtype=np.int32),
        num_tokens=num_tokens,
    )
