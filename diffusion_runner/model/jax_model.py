"""The digits model in JAX. `torch_model.py` is the same model, line by line.

The layers are equal, so they are one `scan` over stacked weights: one layer is compiled, not
`num_layers` of them.

The model computes everything but attention token by token, so it takes packed tokens of any
rows. Attention is the caller's: `attend` is called once for each layer and owns the K/V cache,
the mask and the softmax. All of it can be traced by `jax.jit` and `jax.lax.scan`; the state is
whatever pytree `attend` threads through, the pool for one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from diffusion_runner.model.config import DigitsConfig
from diffusion_runner.model.weights import layer_weights, num_layers, time_frequencies

LAYERS = "layers"
"""Where `Params` holds the layers' weights: a dict of `[num_layers, ...]` arrays."""

Params = dict[str, Any]
State = TypeVar("State")

# attend(state, layer, query [T, Hq, D], key [T, Hkv, D], value [T, Hkv, D])
#     -> (output [T, Hq, D], state)
# `layer` is a traced int32 scalar.
Attend = Callable[[State, Array, Array, Array, Array], tuple[Array, State]]


def load_params(
    weights: Mapping[str, NDArray[np.float32]], device: jax.Device | None = None
) -> Params:
    """The weights as float32 arrays on `device`, layers stacked, and the time frequencies."""
    shared = {name: value for name, value in weights.items() if not name.startswith("layers.")}
    params: Params = {name: jax.device_put(value, device) for name, value in shared.items()}
    layers = [layer_weights(weights, layer) for layer in range(num_layers(weights))]
    params[LAYERS] = {
        name: jax.device_put(np.stack([layer[name] for layer in layers]), device)
        for name in layers[0]
    }
    frequencies = time_frequencies(len(weights["time_in.weight"]) // 2)
    params["time_frequencies"] = jax.device_put(frequencies, device)
    return params


def forward(
    params: Params,
    config: DigitsConfig,
    token_ids: Array,
    is_image: Array,
    position_ids: Array,
    patches: Array,
    times: Array,
    attend: Attend[State],
    state: State,
) -> tuple[Array, State]:
    """The velocity at every token, and the state that the last `attend` returned.

    `token_ids`, `is_image`, `position_ids`: `[T]`, as in `inputs.TokenBatch`.
    `patches`: `[T, patch_dim]` float32, the noisy patch at image tokens, anything elsewhere.
    `times`: `[T]` float32 in [0, 1]; read at image tokens only.

    Returns `[T, patch_dim]` float32; what lies at other than image tokens means nothing.
    Prompt tokens read neither patches nor times, so their K/V are the same at every step.
    """
    heads, kv_heads = config.num_heads, config.num_kv_heads
    image = is_image[:, None]

    prompt_index = jnp.where(is_image, 0, position_ids)
    image_index = jnp.where(is_image, position_ids, 0)
    text = params["token_embedding"][token_ids] + params["prompt_positions"][prompt_index]
    picture = _linear(patches, params["patch_in.weight"]) + params["image_positions"][image_index]
    x = jnp.where(image, picture, text)

    angles = jnp.where(is_image, times, 0.0)[:, None] * params["time_frequencies"]
    features = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)
    time = jax.nn.silu(_linear(features, params["time_in.weight"]) + params["time_in.bias"])
    modulation = _linear(time, params["modulation.weight"])

    def block(carry: tuple[Array, State], at: tuple[Array, dict[str, Array]]) -> Any:
        x, state = carry
        layer, weight = at
        # Zero at prompt tokens: they are neither shifted, scaled nor gated by the time.
        change = (modulation + weight["modulation.bias"]) * image
        shift1, scale1, gate1, shift2, scale2, gate2 = jnp.split(change, 6, axis=-1)

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
        y = jax.nn.silu(_linear(y, weight["mlp_gate.weight"])) * _linear(y, weight["mlp_up.weight"])
        x = x + _linear(y, weight["mlp_down.weight"]) * (1 + gate2)
        return (x, state), None

    layers = (jnp.arange(config.num_layers, dtype=jnp.int32), params[LAYERS])
    (x, state), _ = jax.lax.scan(block, (x, state), layers)
    velocity = _linear(_rms_norm(x, params["final_norm"]), params["patch_out.weight"])
    return velocity + params["patch_out.bias"], state


def _linear(x: Array, weight: Array) -> Array:
    """`[..., in]` times `[in, out]`, in float32 throughout (JAX would use TF32 on a GPU)."""
    return jnp.matmul(x, weight, precision=jax.lax.Precision.HIGHEST)


def _rms_norm(x: Array, weight: Array) -> Array:
    """Root-mean-square norm over the last axis."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * weight
