"""Prompts, packing, patches, noise, schedule: everything around the model, in NumPy."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from diffusion_runner.model.config import DigitsConfig
from diffusion_runner.model.inputs import TokenRow, build_token_batch
from diffusion_runner.model.noise import initial_noise
from diffusion_runner.model.patches import patchify, to_model_range, to_pixels, unpatchify
from diffusion_runner.model.schedule import check_guidance, euler_step, guide, timesteps
from diffusion_runner.model.text import (
    PromptTooLongError,
    digit_prompt,
    encode_prompt,
    phrasings,
    prompt_digit,
)

CONFIG = DigitsConfig()


def test_the_config_survives_the_metadata() -> None:
    config = DigitsConfig(num_layers=7, hidden_size=48)
    assert DigitsConfig.from_metadata(config.to_metadata() | {"format": "pt"}) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, "num_layers must be a positive int, got 0"),
        ({"num_kv_heads": 4}, r"num_heads \(6\) must be a multiple of num_kv_heads \(4\)"),
        ({"patch_size": 3}, r"image_size \(8\) must be a multiple of patch_size \(3\)"),
        ({"time_features": 5}, r"time_features \(5\) must be even"),
        ({"vocab_size": 256}, r"vocab_size \(256\) must exceed 256"),
    ],
)
def test_a_config_that_cannot_be_is_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DigitsConfig(**change)


def test_metadata_without_a_field_or_with_a_bad_one_is_refused() -> None:
    metadata = CONFIG.to_metadata()
    with pytest.raises(ValueError, match="metadata has head_size='wide', expected an int"):
        DigitsConfig.from_metadata(metadata | {"head_size": "wide"})
    del metadata["head_size"]
    with pytest.raises(ValueError, match="metadata lacks 'head_size'"):
        DigitsConfig.from_metadata(metadata)


def test_a_prompt_is_begin_of_text_and_its_bytes() -> None:
    assert encode_prompt("", CONFIG) == [256]
    assert encode_prompt("7é", CONFIG) == [256, ord("7"), 0xC3, 0xA9]


def test_a_prompt_may_fill_the_limit_and_not_pass_it() -> None:
    limit = CONFIG.max_prompt_tokens
    assert len(encode_prompt("x" * (limit - 1), CONFIG)) == limit
    with pytest.raises(PromptTooLongError) as caught:
        encode_prompt("x" * limit, CONFIG)
    message = str(caught.value)
    assert f"{limit + 1} tokens long" in message
    assert f"the model's limit is {limit}" in message
    assert "\n" not in message
    assert isinstance(caught.value, ValueError)


def test_the_limit_counts_bytes_not_characters() -> None:
    with pytest.raises(PromptTooLongError, match=r"61 tokens long .* 60 bytes"):
        encode_prompt("é" * 30, CONFIG)


def test_a_prompt_of_many_lines_is_refused_in_one_line() -> None:
    with pytest.raises(PromptTooLongError) as caught:
        encode_prompt("a\nb" * 40, CONFIG)
    assert "\n" not in str(caught.value)


def test_every_phrasing_fits_and_names_its_digit() -> None:
    lengths = set()
    for digit in range(10):
        assert digit_prompt(digit) in phrasings(digit)
        for text in phrasings(digit):
            lengths.add(len(encode_prompt(text, CONFIG)))
            assert prompt_digit(text) == digit
            assert prompt_digit(f" {text.upper()}\n") == digit
    assert len(lengths) > 20, "rows of a batch should be able to differ in length"
    assert prompt_digit("a handwritten letter") is None
    assert prompt_digit("") is None
    assert digit_prompt(7) == "a handwritten seven"
    with pytest.raises(ValueError, match=r"digit must be in 0\.\.9, got 10"):
        digit_prompt(10)


def test_rows_are_packed_one_after_another() -> None:
    config = DigitsConfig(image_size=4)  # 4 image tokens
    rows = [TokenRow((256, 55)), TokenRow((256,), first_token=1), TokenRow((256,))]
    batch = build_token_batch(rows, config, pad_to=18)
    assert batch.token_ids.tolist() == [256, 55, 0, 0, 0, 0] + [0] * 4 + [256] + [0] * 7
    assert batch.is_image.tolist() == (
        [False] * 2 + [True] * 4 + [True] * 4 + [False] + [True] * 4 + [False] * 3
    )
    assert batch.position_ids.tolist() == ([0, 1, *range(4), *range(4), 0, *range(4), 0, 0, 0])
    assert batch.image_token_index.tolist() == (
        [-1, -1, 0, 1, 2, 3] + [4, 5, 6, 7] + [-1, 8, 9, 10, 11] + [-1] * 3
    )
    assert batch.query_lens.tolist() == [6, 4, 5]
    assert (batch.num_tokens, batch.num_rows) == (15, 3)
    for array in (batch.token_ids, batch.position_ids, batch.image_token_index):
        assert array.dtype == np.int32
    assert batch.is_image.dtype == np.bool_


def test_a_row_may_start_inside_its_prompt() -> None:
    """A prefix cache holds whole blocks, so it may have the front of a prompt and not its end."""
    config = DigitsConfig(image_size=4)
    batch = build_token_batch([TokenRow((256, 7, 8, 9), first_token=3)], config)
    assert batch.token_ids.tolist() == [9, 0, 0, 0, 0]
    assert batch.position_ids.tolist() == [3, 0, 1, 2, 3]
    assert batch.query_lens.tolist() == [5]


def test_patches_reach_their_tokens_and_come_back() -> None:
    rows = [TokenRow((256, 1, 2)), TokenRow((256,), first_token=1), TokenRow((256,))]
    batch = build_token_batch(rows, CONFIG, pad_to=70)
    shape = (3, CONFIG.num_image_tokens, CONFIG.patch_dim)
    patches = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    spread = batch.spread_patches(patches)
    assert spread.shape == (70, CONFIG.patch_dim)
    assert not spread[~batch.is_image].any()
    back = spread[batch.image_token_positions()].reshape(shape)
    np.testing.assert_array_equal(back, patches)


def test_a_batch_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one row"):
        build_token_batch([], CONFIG)
    with pytest.raises(ValueError, match="cannot pad 17 tokens to 16"):
        build_token_batch([TokenRow((256,))], CONFIG, pad_to=16)
    with pytest.raises(ValueError, match=r"row 1 has 49 prompt tokens, expected 1\.\.48"):
        build_token_batch([TokenRow((256,)), TokenRow((256,) * 49)], CONFIG)
    for first in (-1, 3):
        with pytest.raises(ValueError, match=rf"row 0 starts at token {first}, expected 0\.\.2"):
            build_token_batch([TokenRow((256, 7), first_token=first)], CONFIG)


def test_patchify_goes_row_by_row_and_back() -> None:
    images = np.arange(2 * 64, dtype=np.float32).reshape(2, 8, 8)
    patches = patchify(images, CONFIG)
    assert patches.shape == (2, 16, 4)
    assert patches[0, 0].tolist() == [0, 1, 8, 9]
    assert patches[0, 1].tolist() == [2, 3, 10, 11]
    assert patches[0, 4].tolist() == [16, 17, 24, 25]
    np.testing.assert_array_equal(unpatchify(patches, CONFIG), images)
    with pytest.raises(ValueError, match=r"images must be \[R, 8, 8\], got \[64, 2\]"):
        patchify(images.reshape(64, 2), CONFIG)
    with pytest.raises(ValueError, match=r"patches must be \[R, 16, 4\], got \[2, 8, 8\]"):
        unpatchify(images, CONFIG)


def test_pixels_to_the_model_and_back() -> None:
    pixels = np.linspace(0, 1, 64, dtype=np.float32).reshape(1, 8, 8)
    values = to_model_range(pixels)
    assert (values.min(), values.max()) == (-1, 1)
    np.testing.assert_allclose(to_pixels(values), pixels, atol=1e-6)
    assert to_pixels(np.float32([-3, 3])).tolist() == [0, 1]


def test_the_noise_of_an_image_depends_on_seed_and_index_alone() -> None:
    few, many = initial_noise(5, 3), initial_noise(5, 40)
    np.testing.assert_array_equal(few, many[:3])
    assert many.shape == (40, 8, 8)
    assert many.dtype == np.float32
    assert len({image.tobytes() for image in [*many, *initial_noise(6, 40)]}) == 80
    assert abs(float(many.mean())) < 0.1
    assert abs(float(many.std()) - 1) < 0.1
    with pytest.raises(ValueError, match="seed must not be negative, got -1"):
        initial_noise(-1, 1)


def test_euler_steps_along_a_constant_velocity_arrive() -> None:
    times = timesteps(7)
    assert (len(times), times[0], times[-1]) == (8, 0.0, 1.0)
    sample, noise = np.float64([1.0, -2.0]), np.float64([1.0, -2.0])
    target = np.float64([0.25, 4.0])
    for time, next_time in pairwise(times):
        sample = euler_step(sample, target - noise, time, next_time)
    np.testing.assert_allclose(sample, target)
    with pytest.raises(ValueError, match="number of steps must be at least 1, got 0"):
        timesteps(0)


def test_guidance() -> None:
    assert guide(2.0, 3.0, 0.0) == 2.0
    assert guide(2.0, 3.0, 1.0) == 3.0
    assert guide(2.0, 3.0, 2.5) == 4.5
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match=f"guidance must be a finite number, got {bad}"):
            check_guidance(bad)
