"""The digits model in torch. `jax_model.py` is the same model, line by line.

The model computes everything but attention token by token, so it takes packed tokens of any
rows. Attention is the caller's: `attend` is called once for each layer and owns the K/V cache,
the mask and the softmax.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from diffusion_runner.model.config import DigitsConfig
from diffusion_runner.model.weights import layer_weights, time_frequencies

Params = dict[str, Tensor]
State = TypeVar("State")

# attend(state, layer, query [T, Hq, D], key [T, Hkv, D], value [T, Hkv, D])
#     -> (output [T, Hq, D], state)
Attend = Callable[[State, int, Tensor, Tensor, Tensor], tuple[Tensor, State]]


def load_params(
    weights: Mapping[str, NDArray[np.float32]], device: torch.device | str = "cpu"
) -> Params:
    """The weights as float32 tensors on `device`, and the fixed time frequencies."""
    params = {name: torch.tensor(value, device=device) for name, value in weights.items()}
    frequencies = time_frequencies(len(weights["time_in.weight"]) // 2)
    params["time_frequencies"] = torch.tensor(frequencies, device=device)
    return params


def forward(
    params: Params,
    config: DigitsConfig,
    token_ids: Tensor,
    is_image: Tensor,
    position_ids: Tensor,
    patches: Tensor,
    times: Tensor,
    attend: Attend[State],
    state: State,
) -> tuple[Tensor, State]:
    """The velocity at every token, and the state that the last `attend` returned.

    `token_ids`, `is_image`, `position_ids`: `[T]`, as in `inputs.TokenBatch`.
    `patches`: `[T, patch_dim]` float32, the noisy patch at image tokens, anything elsewhere.
    `times`: `[T]` float32 in [0, 1]; read at image tokens only.

    Returns `[T, patch_dim]` float32; what lies at other than image tokens means nothing.
    Prompt tokens read neither patches nor times, so their K/V are the same at every step.
    """
    heads, kv_heads = config.num_heads, config.num_kv_heads
    image = is_image[:, None]

    prompt_index = torch.where(is_image, 0, position_ids)
    image_index = torch.where(is_image, position_ids, 0)
    text = params["token_embedding"][token_ids] + params["prompt_positions"][prompt_index]
    picture = _linear(patches, params["patch_in.weight"]) + params["image_positions"][image_index]
    x = torch.where(image, picture, text)

    angles = torch.where(is_image, times, 0.0)[:, None] * params["time_frequencies"]
    features = torch.cat([torch.cos(angles), torch.sin(angles)], dim=-1)
    time = functional.silu(_linear(features, params["time_in.weight"]) + params["time_in.bias"])
    modulation = _linear(time, params["modulation.weight"])

    for layer in range(config.num_layers):
        weight = layer_weights(params, layer)
        # Zero at prompt tokens: they are neither shifted, scaled nor gated by the time.
        change = (modulation + weight["modulation.bias"]) * image
        shift1, scale1, gate1, shift2, scale2, gate2 = torch.chunk(change, 6, dim=-1)

        y = _rms_norm(x, weight["attention_norm"]) * (1 + scale1) + shift1
        query = _linear(y, weight["query.weight"]).reshape(-1, heads, config.head_size)
        key = _linear(y, weight["key.weight"]).reshape(-1, kv_heads, config.head_size)
        value = _linear(y, weight["value.weight"]).reshape(-1, kv_heads, config.head_size)
        query = _rms_norm(query, weight["query_norm"])
        key = _rms_norm(key, weight["key_norm"])
        output, state = attend(state, layer, query, key, value)
        output = output.reshape(-1, heads * config.head_size)
        x = x + _linear(output, weight["attention_out.weight"]) * (1 + gate1)

        y = _rms_norm(x, weight["mlp_norm"]) * (1 + scale2) + shift2
        y = functional.silu(_linear(y, weight["mlp_gate.weight"])) * _linear(
            y, weight["mlp_up.weight"]
        )
        x = x + _linear(y, weight["mlp_down.weight"]) * (1 + gate2)

    velocity = _linear(_rms_norm(x, params["final_norm"]), params["patch_out.weight"])
    return velocity + params["patch_out.bias"], state


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    """`[..., in]` times `[in, out]`, in float32 throughout (torch's default keeps TF32 off)."""
    return x @ weight


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Root-mean-square norm over the last axis."""
    return x * torch.rsqrt(torch.mean(x * x, dim=-1, keepdim=True) + 1e-6) * weight
