"""The pictures without any paging: dense attention in torch, every step computed in full.

Nothing here knows of blocks, pools or layouts, and no K/V outlives the call that made it. The
tests compare the paged engines with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diffusion_runner.model.config import DigitsConfig
from diffusion_runner.model.inputs import TokenRow, build_token_batch
from diffusion_runner.model.noise import initial_noise
from diffusion_runner.model.patches import patchify, to_pixels, unpatchify
from diffusion_runner.model.schedule import (
    DEFAULT_GUIDANCE,
    DEFAULT_STEPS,
    check_guidance,
    euler_step,
    guide,
    timesteps,
)
from diffusion_runner.model.text import encode_prompt
from diffusion_runner.model.torch_model import Params, forward, load_params
from diffusion_runner.model.weights import Weights, load_weights

REQUESTS_PER_PASS = 16  # bounds the padded scores: 2 rows each, at most 64 x 64 for each head


@dataclass(frozen=True, eq=False)
class DenseAttention:
    """Attention over whole rows `[prompt | image]`, padded to the longest, with a plain mask.

    `index`: `[R, S]`, where token `i` of row `r` lies among the packed tokens; 0 past its end.
    `real`: `[R, S]` bool, True inside a row.
    `mask`: `[R, S, S]` bool, True where query (second axis) sees key (third axis): a prompt
    token sees itself and what lies before it, an image token sees its whole row.
    """

    index: Tensor
    real: Tensor
    mask: Tensor

    @classmethod
    def for_rows(cls, prefix_lens: Sequence[int], seq_lens: Sequence[int]) -> DenseAttention:
        """For R packed rows; row `r` is `seq_lens[r]` tokens, its prompt `prefix_lens[r]`."""
        prefix, length = torch.tensor(prefix_lens), torch.tensor(seq_lens)
        start = torch.cumsum(length, 0) - length
        position = torch.arange(int(length.max()))
        real = position < length[:, None]
        causal = position[None, :] <= position[:, None]
        in_image = position >= prefix[:, None]
        mask = (causal | in_image[:, :, None]) & real[:, None, :]
        return cls(torch.where(real, start[:, None] + position, 0), real, mask)

    def attend(
        self, state: None, layer: int, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, None]:
        """`query` `[T, Hq, D]`, `key` and `value` `[T, Hkv, D]`, to `[T, Hq, D]`."""
        groups = query.shape[1] // key.shape[1]
        q = query[self.index]
        k = key[self.index].repeat_interleave(groups, dim=2)
        v = value[self.index].repeat_interleave(groups, dim=2)
        scores = torch.einsum("rqhd,rkhd->rhqk", q, k) * query.shape[-1] ** -0.5
        scores = scores.masked_fill(~self.mask[:, None], -torch.inf)
        output = torch.einsum("rhqk,rkhd->rqhd", torch.softmax(scores, dim=-1), v)
        return output[self.real], state


def generate_dense(
    prompts: Sequence[str],
    seed: int,
    steps: int = DEFAULT_STEPS,
    guidance: float = DEFAULT_GUIDANCE,
    *,
    model: tuple[DigitsConfig, Weights] | None = None,
) -> NDArray[np.float32]:
    """One picture for each prompt: `[R, 8, 8]` float32 pixels in [0, 1].

    Picture `i` starts from `initial_noise(seed, ...)[i]`. `model` is what `load_weights` gave;
    by default the weights we ship.
    """
    check_guidance(guidance)
    config, weights = load_weights() if model is None else model
    params = load_params(weights)
    tokens = [encode_prompt(prompt, config) for prompt in prompts]
    noise = patchify(initial_noise(seed, len(prompts), config.image_size), config)
    pictures = [np.empty((0, config.image_size, config.image_size), np.float32)]
    for start in range(0, len(tokens), REQUESTS_PER_PASS):
        chosen = slice(start, start + REQUESTS_PER_PASS)
        sample = _sample(params, config, tokens[chosen], noise[chosen], steps, guidance)
        pictures.append(to_pixels(unpatchify(sample, config)))
    return np.concatenate(pictures)


@torch.no_grad()
def _sample(
    params: Params,
    config: DigitsConfig,
    prompts: Sequence[Sequence[int]],
    noise: NDArray[np.float32],
    steps: int,
    guidance: float,
) -> NDArray[np.float32]:
    """`[R, P, patch_dim]` noise to the model's values of the pictures, of the same shape."""
    # Two rows for each request: all conditional rows first, then all unconditional ones.
    empty = tuple(encode_prompt("", config))
    rows = [TokenRow(tuple(prompt)) for prompt in prompts] + [TokenRow(empty)] * len(prompts)
    batch = build_token_batch(rows, config)
    attention = DenseAttention.for_rows(
        [len(row.prompt_tokens) for row in rows], batch.query_lens.tolist()
    )
    token_ids, is_image, position_ids, image_token_index = (
        torch.from_numpy(array)
        for array in (
            batch.token_ids,
            batch.is_image,
            batch.position_ids,
            batch.image_token_index,
        )
    )
    sample = torch.from_numpy(noise)
    for time, next_time in pairwise(timesteps(steps)):
        both = torch.cat([sample, sample]).reshape(-1, config.patch_dim)
        velocity, _ = forward(
            params,
            config,
            token_ids,
            is_image,
            position_ids,
            both[image_token_index.clamp(min=0)],
            torch.full((len(token_ids),), time),
            attention.attend,
            None,
        )
        conditional, unconditional = velocity[is_image].reshape(2, *sample.shape)
        sample = euler_step(sample, guide(unconditional, conditional, guidance), time, next_time)
    return sample.numpy()
