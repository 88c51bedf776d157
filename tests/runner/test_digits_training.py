"""The data, the judge, the training loop, and what the shipped weights draw."""

from __future__ import annotations

import json

import numpy as np
import pytest
from rich.progress import Progress

from diffusion_runner.digits.classifier import ClassifierError, train_classifier
from diffusion_runner.digits.data import load_digits_split
from diffusion_runner.digits.score import score
from diffusion_runner.digits.train import draw_prompts, learning_rate, train_weights
from diffusion_runner.model.config import DigitsConfig
from diffusion_runner.model.reference import generate_dense
from diffusion_runner.model.text import PromptTooLongError, digit_prompt
from diffusion_runner.model.weights import DEFAULT_WEIGHTS

TINY = DigitsConfig(
    num_layers=1, hidden_size=16, num_heads=2, num_kv_heads=1, head_size=8, mlp_size=16
)


def test_the_split_is_fixed_and_disjoint() -> None:
    train, held_out = load_digits_split()
    assert (len(train.images), len(held_out.images)) == (1437, 360)
    assert train.images.dtype == np.float32
    assert (train.images.min(), train.images.max()) == (0, 1)
    again, _ = load_digits_split()
    np.testing.assert_array_equal(again.images, train.images)
    known = {image.tobytes() for image in train.images}
    assert not any(image.tobytes() in known for image in held_out.images)


def test_the_judge_reads_real_digits() -> None:
    judge = train_classifier()
    _, held_out = load_digits_split()
    assert judge.num_held_out == 360
    assert judge.held_out_accuracy >= 0.98
    assert score(held_out.images, held_out.labels, judge) == judge.held_out_accuracy
    assert score(held_out.images, (held_out.labels + 1) % 10, judge) < 0.02


def test_a_judge_that_is_not_good_enough_is_refused() -> None:
    with pytest.raises(ClassifierError, match=r"of 360 held-out digits right, 100\.10% are"):
        train_classifier(required_accuracy=1.001)


def test_scores_of_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="no images to score"):
        score(np.zeros((0, 8, 8), np.float32), [])
    with pytest.raises(ValueError, match=r"got \[2, 8, 8\] and \[3\]"):
        score(np.zeros((2, 8, 8), np.float32), [1, 2, 3])


def test_the_shipped_weights_draw_what_the_prompt_says() -> None:
    digits = np.arange(100) % 10
    images = generate_dense([digit_prompt(digit) for digit in digits], seed=11, steps=10)
    assert images.shape == (100, 8, 8)
    assert images.dtype == np.float32
    assert 0 <= images.min() < 0.01
    assert 0.99 < images.max() <= 1
    assert score(images, digits) >= 0.9
    # No two alike: each picture comes from its own noise.
    assert len({image.tobytes() for image in images}) == 100


def test_a_picture_does_not_depend_on_its_neighbours() -> None:
    alone = generate_dense(["the digit 4"], seed=3, steps=4)
    beside = generate_dense(["the digit 4", "a handwritten nine"], seed=3, steps=4)
    np.testing.assert_allclose(beside[:1], alone, atol=1e-5, rtol=0)


def test_bad_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="guidance must be a finite number, got nan"):
        generate_dense(["7"], seed=0, guidance=float("nan"))
    with pytest.raises(PromptTooLongError):
        generate_dense(["7" * 100], seed=0)
    assert generate_dense([], seed=0).shape == (0, 8, 8)


def test_the_scores_beside_the_weights_keep_the_promise() -> None:
    report = json.loads(DEFAULT_WEIGHTS.with_suffix(".json").read_text())
    assert report["scores"]["count"] >= 500
    assert report["scores"]["agreement"] >= 0.95
    assert report["scores"]["classifier_held_out_accuracy"] >= 0.98
    assert report["file_bytes"] == DEFAULT_WEIGHTS.stat().st_size
    assert report["train_seconds"] <= 1800


def test_training_is_seeded_and_learns() -> None:
    train, _ = load_digits_split()

    def run(seed: int, steps: int) -> tuple[dict[str, np.ndarray], float]:
        progress = Progress(disable=True)
        return train_weights(train, TINY, steps=steps, seed=seed, progress=progress)

    first, early = run(0, 3)
    again, _ = run(0, 3)
    other, _ = run(1, 3)
    for name, weight in first.items():
        np.testing.assert_allclose(again[name], weight, atol=1e-6, rtol=0)
    assert np.abs(first["patch_in.weight"] - other["patch_in.weight"]).max() > 0.1
    _, late = run(0, 120)
    assert late < early - 0.2


def test_some_prompts_are_dropped_and_the_others_name_the_label() -> None:
    generator = np.random.default_rng(0)
    labels = np.arange(2000) % 10
    batch = draw_prompts(labels, DigitsConfig(), generator)
    chosen = batch.image_prompt.numpy()
    assert 0.08 < np.mean(chosen == 0) < 0.16
    kept = chosen > 0
    np.testing.assert_array_equal(chosen[kept] - 1, labels[kept])
    assert batch.prompt_mask[0].sum() == 1


def test_the_learning_rate_rises_and_falls() -> None:
    rates = [learning_rate(step, 1000) for step in range(1000)]
    assert rates[0] < rates[50] < rates[99]
    assert rates[150] > rates[500] > rates[999]
    assert rates[999] < 1e-7
