"""One training batch, packed as `[prompts | images]`, where images share their prompts.

A prompt's K/V depend on nothing but the prompt, so many images can read one copy of them. That
saves most of the prompt work of a training step; it is the prefix cache's idea, differentiable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from diffusion_runner.model.config import DigitsConfig


@dataclass(frozen=True, eq=False)
class SharedPromptBatch:
    """N prompts and R images; image `r` belongs to prompt `image_prompt[r]`.

    Tokens are packed: first all prompts one after another, then all images, `T` in all.
    `token_ids`, `is_image`, `position_ids`: `[T]`, as the model takes them.
    `prompt_token`: `[N, L]`, where token `i` of prompt `n` lies in `[T]`; 0 past its end.
    `prompt_mask`: `[N, L]` bool, True inside a prompt.
    `image_prompt`: `[R]`.
    """

    token_ids: Tensor
    is_image: Tensor
    position_ids: Tensor
    prompt_token: Tensor
    prompt_mask: Tensor
    image_prompt: Tensor

    @property
    def num_prompt_tokens(self) -> int:
        """Packed prompt tokens; image tokens start there."""
        return int(self.prompt_mask.sum())

    def attend(
        self, state: None, layer: int, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, None]:
        """Prompts attend causally; an image attends to its prompt and to itself, fully."""
        start = self.num_prompt_tokens
        prompts = self._attend_prompts(query, key, value)
        images = self._attend_images(query[start:], key, value, start)
        return torch.cat([prompts[self.prompt_mask], images]), state

    def _attend_prompts(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        groups = query.shape[1] // key.shape[1]
        q, k, v = (_take(x, self.prompt_token).transpose(1, 2) for x in (query, key, value))
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        # Causality hides the padding too: it lies behind every real token.
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2)

    def _attend_images(self, query: Tensor, key: Tensor, value: Tensor, start: int) -> Tensor:
        rows, kv_heads, size = len(self.image_prompt), key.shape[1], key.shape[2]
        tokens, groups = len(query) // rows, query.shape[1] // kv_heads
        prompt_token = self.prompt_token[self.image_prompt]
        keys, values = (
            torch.cat(
                [_take(x, prompt_token), x[start:].reshape(rows, tokens, kv_heads, size)], dim=1
            ).transpose(1, 2)
            for x in (key, value)
        )
        mask = functional.pad(self.prompt_mask[self.image_prompt], (0, tokens), value=True)
        # All query heads of one KV head, and all tokens, see the same keys: one query axis.
        q = query.reshape(rows, tokens, kv_heads, groups, size).permute(0, 2, 3, 1, 4)
        q = q.reshape(rows, kv_heads, groups * tokens, size)
        out = functional.scaled_dot_product_attention(
            q, keys, values, attn_mask=mask[:, None, None, :]
        )
        out = out.reshape(rows, kv_heads, groups, tokens, size).permute(0, 3, 1, 2, 4)
        return out.reshape(rows * tokens, kv_heads * groups, size)


def _take(x: Tensor, index: Tensor) -> Tensor:
    """`x[index]` over the first axis. `index_select` has much the faster gradient."""
    return x.index_select(0, index.reshape(-1)).reshape(*index.shape, *x.shape[1:])


def shared_prompt_batch(
    prompts: Sequence[Sequence[int]], image_prompt: Sequence[int], config: DigitsConfig
) -> SharedPromptBatch:
    """Packs token ids of N prompts, and the R images that point to them."""
    lengths = [len(prompt) for prompt in prompts]
    longest, packed = max(lengths), sum(lengths)
    image_tokens = len(image_prompt) * config.num_image_tokens
    prompt_token = torch.zeros(len(prompts), longest, dtype=torch.long)
    prompt_mask = torch.zeros(len(prompts), longest, dtype=torch.bool)
    start = 0
    for index, length in enumerate(lengths):
        prompt_token[index, :length] = torch.arange(start, start + length)
        prompt_mask[index, :length] = True
        start += length
    ids = [token for prompt in prompts for token in prompt]
    prompt_positions = torch.cat([torch.arange(length) for length in lengths])
    image_positions = torch.arange(config.num_image_tokens).repeat(len(image_prompt))
    return SharedPromptBatch(
        token_ids=functional.pad(torch.tensor(ids), (0, image_tokens)),
        is_image=torch.arange(packed + image_tokens) >= packed,
        position_ids=torch.cat([prompt_positions, image_positions]),
        prompt_token=prompt_token,
        prompt_mask=prompt_mask,
        image_prompt=torch.tensor(image_prompt),
    )
