"""Whole runs: pictures against dense attention, engine against engine, with and without reuse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from diffusion_runner.errors import RunError
from diffusion_runner.model.reference import generate_dense
from diffusion_runner.model.text import PromptTooLongError
from diffusion_runner.run import Runner
from diffusion_runner.settings import PICTURE_TOLERANCE, RunSettings
from layout_core import DType, KVCacheLayout
from tests.runner.conftest import ENGINES

RunnerOf = Callable[[str], Runner]

# prompts of 20, 18, 2 and 27 tokens: rows of many lengths, none a multiple of the block size
PROMPTS = ("a handwritten seven", "the digit three 3", "7", "an image of a handwritten 4")
SETTINGS = RunSettings(prompts=PROMPTS, steps=4, block_size=8, batch_size=4)

both_engines = pytest.mark.parametrize("name", ENGINES)


@pytest.fixture(scope="module")
def dense() -> np.ndarray:
    return generate_dense(list(PROMPTS), SETTINGS.seed, SETTINGS.steps, SETTINGS.guidance)


@both_engines
@pytest.mark.parametrize("layout", [KVCacheLayout.LBNHC, KVCacheLayout.BHLNC], ids=str)
def test_pictures_equal_dense_attention(
    runner_of: RunnerOf, dense: np.ndarray, name: str, layout: KVCacheLayout
) -> None:
    result = runner_of(name).generate(replace(SETTINGS, backend=name, layout=layout))
    assert result.images.shape == (4, 8, 8)
    assert float(np.abs(result.images - dense).max()) <= PICTURE_TOLERANCE
    assert result.images.min() >= 0.0
    assert result.images.max() <= 1.0
    assert result.images.std() > 0.1  # a picture, not a grey field


@both_engines
def test_no_prefix_reuse_draws_the_same_and_computes_more(runner_of: RunnerOf, name: str) -> None:
    reuse = runner_of(name).generate(replace(SETTINGS, backend=name))
    without = runner_of(name).generate(replace(SETTINGS, backend=name, prefix_reuse=False))
    assert float(np.abs(reuse.images - without.images).max()) <= PICTURE_TOLERANCE
    prompt_tokens = sum(len(prompt) + 1 for prompt in PROMPTS) + len(PROMPTS)  # and empty prompts
    image_tokens = 16 * 2 * len(PROMPTS)
    assert without.query_tokens == SETTINGS.steps * (prompt_tokens + image_tokens)
    assert reuse.query_tokens == prompt_tokens + SETTINGS.steps * image_tokens
    assert reuse.query_tokens_without_reuse == without.query_tokens
    assert without.prefix_hit_tokens == 0


@both_engines
def test_a_second_request_computes_only_the_unaligned_tail(runner_of: RunnerOf, name: str) -> None:
    prompt = "a handwritten seven"  # 20 tokens: two full blocks of 8, and 4 that no block holds
    one_by_one = replace(
        SETTINGS, backend=name, prompts=(prompt,), count=2, batch_size=1, guidance=2.0
    )
    cached = runner_of(name).generate(one_by_one)
    uncached = runner_of(name).generate(replace(one_by_one, prefix_caching=False))
    assert cached.prefix_hit_tokens == 16
    assert uncached.prefix_hit_tokens == 0
    assert uncached.query_tokens - cached.query_tokens == 16
    assert np.array_equal(cached.images, uncached.images)  # to the last bit


@both_engines
def test_prompts_that_begin_alike_share_blocks(runner_of: RunnerOf, name: str) -> None:
    shared = replace(
        SETTINGS,
        backend=name,
        prompts=("a handwritten six", "a handwritten seven"),  # 15 bytes and begin-of-text alike
        batch_size=1,
    )
    result = runner_of(name).generate(shared)
    alone = runner_of(name).generate(replace(shared, prefix_caching=False))
    assert result.prefix_hit_tokens == 16
    assert np.array_equal(result.images, alone.images)


@both_engines
def test_a_small_pool_draws_the_same_in_more_waves(runner_of: RunnerOf, name: str) -> None:
    settings = replace(SETTINGS, backend=name, prompts=PROMPTS[:2], prefix_caching=False)
    together = runner_of(name).generate(settings)
    # a request of 20 + 16 tokens and its empty row of 17 need 5 + 3 blocks
    apart = runner_of(name).generate(replace(settings, pool_blocks=9))
    assert apart.num_blocks == 9
    assert float(np.abs(together.images - apart.images).max()) <= PICTURE_TOLERANCE


def test_guidance_of_at_most_one_runs_one_row(runner_of: RunnerOf) -> None:
    one = runner_of("torch_cuda").generate(replace(SETTINGS, guidance=1.0))
    two = runner_of("torch_cuda").generate(replace(SETTINGS, guidance=2.0))
    assert (one.rows_per_request, two.rows_per_request) == (1, 2)
    assert one.query_tokens < two.query_tokens
    expected = generate_dense(list(PROMPTS), SETTINGS.seed, SETTINGS.steps, 1.0)
    assert float(np.abs(one.images - expected).max()) <= PICTURE_TOLERANCE


@both_engines
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_pools_draw_nearly_the_same(runner_of: RunnerOf, name: str, dtype: str) -> None:
    settings = replace(SETTINGS, backend=name)
    wide = runner_of(name).generate(settings)
    narrow = runner_of(name).generate(replace(settings, kv_dtype=DType.parse(dtype)))
    assert narrow.pool_bytes == wide.pool_bytes // 2
    # rounding K and V to 8 bits moves pixels by some hundredths over the steps
    assert 0.0 < float(np.abs(wide.images - narrow.images).max()) < 0.15


def test_bad_runs_name_what_is_wrong(runner_of: RunnerOf) -> None:
    runner = runner_of("torch_cuda")
    with pytest.raises(RunError, match=r"one request needs 8 blocks of 8 tokens .* got 8"):
        runner.generate(replace(SETTINGS, prompts=PROMPTS[:1], pool_blocks=8))
    with pytest.raises(PromptTooLongError, match=r"101 tokens long .* limit is 48"):
        runner.generate(replace(SETTINGS, prompts=("x" * 100,)))
    with pytest.raises(RunError, match="guidance: expected a finite number >= 0, got nan"):
        replace(SETTINGS, guidance=float("nan"))
    with pytest.raises(RunError, match="steps: expected an int >= 1, got 0"):
        replace(SETTINGS, steps=0)
    with pytest.raises(RunError, match="prompts: expected at least one prompt, got none"):
        replace(SETTINGS, prompts=())
    with pytest.raises(RunError, match="kv_dtype: expected one of float32, float16, bfloat16"):
        replace(SETTINGS, kv_dtype=DType.parse("int8"))
