"""The torch and the JAX model are one model, and prompts do not see what they must not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from diffusion_runner.digits.batch import shared_prompt_batch
from diffusion_runner.model import jax_model, torch_model
from diffusion_runner.model.config import DigitsConfig
from diffusion_runner.model.inputs import TokenBatch, TokenRow, build_token_batch
from diffusion_runner.model.reference import DenseAttention
from diffusion_runner.model.text import encode_prompt
from diffusion_runner.model.weights import Weights, load_weights

PROMPTS = ("a handwritten seven", "", "3", "an image of a handwritten eight")

Calls = list[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]]


@pytest.fixture(scope="module")
def model() -> tuple[DigitsConfig, Weights]:
    return load_weights()


def packed_mask(prefix_lens: list[int], seq_lens: list[int]) -> NDArray[np.bool_]:
    """`[T, T]`: which packed token sees which, written down token by token."""
    total = sum(seq_lens)
    mask = np.zeros((total, total), np.bool_)
    start = 0
    for prefix, length in zip(prefix_lens, seq_lens, strict=True):
        for token in range(length):
            visible = length if token >= prefix else token + 1
            mask[start + token, start : start + visible] = True
        start += length
    return mask


def inputs(config: DigitsConfig, seed: int = 0, pad_to: int | None = None) -> TokenBatch:
    rows = [TokenRow(tuple(encode_prompt(prompt, config))) for prompt in PROMPTS]
    return build_token_batch(rows, config, pad_to=pad_to)


def noisy_patches(config: DigitsConfig, batch: TokenBatch, seed: int) -> NDArray[np.float32]:
    shape = (batch.num_rows, config.num_image_tokens, config.patch_dim)
    patches = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    return batch.spread_patches(patches)


def batch_mask(config: DigitsConfig, batch: TokenBatch) -> NDArray[np.bool_]:
    """The mask of `inputs`; padded tokens, if any, see themselves."""
    lengths = batch.query_lens.tolist()
    padding = len(batch.token_ids) - batch.num_tokens
    image = config.num_image_tokens
    return packed_mask([n - image for n in lengths] + [1] * padding, lengths + [1] * padding)


def run_torch(
    model: tuple[DigitsConfig, Weights],
    batch: TokenBatch,
    patches: NDArray[np.float32],
    times: NDArray[np.float32],
    attend: Callable[..., Any] | None = None,
) -> tuple[NDArray[np.float32], Calls]:
    """The velocity, and what `attend` was given in each layer."""
    config, weights = model
    mask = torch.from_numpy(batch_mask(config, batch))

    def dense(state: Calls, layer: int, q: Any, k: Any, v: Any) -> tuple[Any, Calls]:
        assert layer == len(state)
        groups = q.shape[1] // k.shape[1]
        wide_k, wide_v = (x.repeat_interleave(groups, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, wide_k) * q.shape[-1] ** -0.5
        weight = torch.softmax(scores.masked_fill(~mask, -torch.inf), -1)
        out = torch.einsum("hqk,khd->qhd", weight, wide_v)
        return out, [*state, (q.numpy(), k.numpy(), v.numpy())]

    with torch.no_grad():
        velocity, state = torch_model.forward(
            torch_model.load_params(weights),
            config,
            *(
                torch.from_numpy(x)
                for x in (batch.token_ids, batch.is_image, batch.position_ids, patches, times)
            ),
            attend or dense,
            [],
        )
    return velocity.numpy(), state


def run_jax(
    model: tuple[DigitsConfig, Weights],
    batch: TokenBatch,
    patches: NDArray[np.float32],
    times: NDArray[np.float32],
) -> tuple[NDArray[np.float32], int]:
    """The velocity and the number of layers counted by the threaded state; under jit."""
    config, weights = model
    mask = jnp.asarray(batch_mask(config, batch))

    def dense(state: Any, layer: int, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        groups = q.shape[1] // k.shape[1]
        wide_k, wide_v = (jnp.repeat(x, groups, 1) for x in (k, v))
        scores = jnp.einsum("qhd,khd->hqk", q, wide_k) * q.shape[-1] ** -0.5
        weight = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)
        return jnp.einsum("hqk,khd->qhd", weight, wide_v), state + 1

    @jax.jit
    def step(params: Any, patches: Any, times: Any) -> Any:
        return jax_model.forward(
            params,
            config,
            batch.token_ids,
            batch.is_image,
            batch.position_ids,
            patches,
            times,
            dense,
            jnp.zeros((), jnp.int32),
        )

    velocity, count = step(jax_model.load_params(weights), patches, times)
    return np.asarray(velocity), int(count)


def test_torch_and_jax_agree(model: tuple[DigitsConfig, Weights]) -> None:
    config, _ = model
    batch = inputs(config, pad_to=160)
    patches = noisy_patches(config, batch, 0)
    times = np.linspace(0, 1, 160, dtype=np.float32)
    ours, calls = run_torch(model, batch, patches, times)
    theirs, count = run_jax(model, batch, patches, times)
    assert ours.shape == (160, config.patch_dim)
    assert len(calls) == count == config.num_layers >= 4
    query, key, value = calls[0]
    assert query.shape == (160, config.num_heads, config.head_size)
    assert key.shape == value.shape == (160, config.num_kv_heads, config.head_size)
    assert config.num_kv_heads < config.num_heads
    assert np.abs(ours).max() > 0.5, "a velocity of nothing would agree with everything"
    np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=0)


def test_the_jax_model_runs_in_a_scan(model: tuple[DigitsConfig, Weights]) -> None:
    config, weights = model
    batch = build_token_batch([TokenRow((256,))], config)
    params = jax_model.load_params(weights)

    def body(patches: Any, time: Any) -> tuple[Any, Any]:
        velocity, _ = jax_model.forward(
            params,
            config,
            batch.token_ids,
            batch.is_image,
            batch.position_ids,
            patches,
            jnp.full(len(batch.token_ids), time),
            lambda state, layer, q, k, v: (q, state),
            None,
        )
        return patches + velocity * 0.5, None

    patches, _ = jax.lax.scan(body, noisy_patches(config, batch, 0), jnp.asarray([0.0, 0.5]))
    assert bool(jnp.isfinite(patches).all())


def test_prompt_kv_depend_on_neither_step_nor_noise(model: tuple[DigitsConfig, Weights]) -> None:
    config, _ = model
    batch = inputs(config)
    prompt = ~batch.is_image
    length = len(batch.token_ids)
    _, first = run_torch(
        model, batch, noisy_patches(config, batch, 0), np.zeros(length, np.float32)
    )
    _, later = run_torch(
        model, batch, noisy_patches(config, batch, 1), np.full(length, 0.7, np.float32)
    )
    for (_, k0, v0), (_, k1, v1) in zip(first, later, strict=True):
        np.testing.assert_array_equal(k0[prompt], k1[prompt])
        np.testing.assert_array_equal(v0[prompt], v1[prompt])
        assert np.abs(k0 - k1)[batch.is_image].max() > 0.1
        assert np.abs(v0 - v1)[batch.is_image].max() > 0.1


def test_the_time_moves_image_tokens(model: tuple[DigitsConfig, Weights]) -> None:
    config, _ = model
    batch = inputs(config)
    patches, length = noisy_patches(config, batch, 0), len(batch.token_ids)
    early, _ = run_torch(model, batch, patches, np.full(length, 0.1, np.float32))
    late, _ = run_torch(model, batch, patches, np.full(length, 0.9, np.float32))
    assert np.abs(early - late)[batch.is_image].max() > 0.1


def test_three_ways_to_write_the_attention_agree(model: tuple[DigitsConfig, Weights]) -> None:
    """The mask by hand, the padded reference, and the training's shared prompts."""
    config, weights = model
    batch = inputs(config)
    patches = noisy_patches(config, batch, 0)
    times = np.full(len(batch.token_ids), 0.4, np.float32)
    by_hand, _ = run_torch(model, batch, patches, times)

    lengths = batch.query_lens.tolist()
    dense = DenseAttention.for_rows([n - config.num_image_tokens for n in lengths], lengths)
    padded, _ = run_torch(model, batch, patches, times, dense.attend)
    np.testing.assert_allclose(padded, by_hand, atol=1e-5, rtol=0)

    order = [2, 0, 3, 1]  # the packed images, against the order of the prompts
    shared = shared_prompt_batch([encode_prompt(p, config) for p in PROMPTS], order, config)
    images = patches[batch.is_image].reshape(len(PROMPTS), -1, config.patch_dim)[order]
    front = np.zeros((shared.num_prompt_tokens, config.patch_dim), np.float32)
    with torch.no_grad():
        velocity, _ = torch_model.forward(
            torch_model.load_params(weights),
            config,
            shared.token_ids,
            shared.is_image,
            shared.position_ids,
            torch.from_numpy(np.concatenate([front, images.reshape(-1, config.patch_dim)])),
            torch.full((len(shared.token_ids),), 0.4),
            shared.attend,
            None,
        )
    expected = by_hand[batch.is_image].reshape(len(PROMPTS), -1, config.patch_dim)[order]
    np.testing.assert_allclose(
        velocity[shared.is_image].reshape(expected.shape).numpy(), expected, atol=1e-5, rtol=0
    )
