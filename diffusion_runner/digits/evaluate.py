"""Scores the digits model: `python -m diffusion_runner.digits.evaluate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from diffusion_runner.digits.classifier import DigitClassifier, train_classifier
from diffusion_runner.digits.data import load_digits_split
from diffusion_runner.digits.score import score
from diffusion_runner.model.reference import generate_dense
from diffusion_runner.model.schedule import DEFAULT_GUIDANCE, DEFAULT_STEPS
from diffusion_runner.model.text import DIGIT_WORDS, digit_prompt, phrasings
from diffusion_runner.model.weights import load_weights

# Not among the phrasings of the training: what the model does with words it has not met.
UNSEEN_PHRASING = "please sketch {} for me"


def evaluate(
    path: Path | None = None,
    *,
    count: int = 500,
    seed: int = 1,
    steps: int = DEFAULT_STEPS,
    guidance: float = DEFAULT_GUIDANCE,
) -> dict[str, Any]:
    """Scores of the weights at `path` (by default those we ship), ready for JSON.

    `agreement` is the one to watch: the share of `count` pictures, as many of each digit, that
    the classifier reads as their prompt says.
    """
    model = load_weights(path)
    judge = train_classifier()
    digits = np.arange(count) % len(DIGIT_WORDS)

    def generate(prompts: list[str]) -> NDArray[np.float32]:
        return generate_dense(prompts, seed, steps, guidance, model=model)

    images = generate([digit_prompt(int(digit)) for digit in digits])
    known = [(text, digit) for digit in range(len(DIGIT_WORDS)) for text in phrasings(digit)]
    unseen = [UNSEEN_PHRASING.format(DIGIT_WORDS[digit]) for digit in digits[:100]]
    return {
        "count": count,
        "seed": seed,
        "steps": steps,
        "guidance": guidance,
        "agreement": score(images, digits, judge),
        "agreement_by_digit": _by_digit(images, digits, judge),
        "agreement_all_phrasings": score(
            generate([text for text, _ in known]), [digit for _, digit in known], judge
        ),
        "num_all_phrasings": len(known),
        "agreement_unseen_phrasing": score(generate(unseen), digits[: len(unseen)], judge),
        "classifier_held_out_accuracy": judge.held_out_accuracy,
        "classifier_num_held_out": judge.num_held_out,
        **_nearest(images),
    }


def _by_digit(
    images: NDArray[np.float32], digits: NDArray[np.integer], judge: DigitClassifier
) -> list[float]:
    right = judge.classify(images) == digits
    return [float(np.mean(right[digits == digit])) for digit in np.unique(digits)]


def _nearest(images: NDArray[np.float32]) -> dict[str, float]:
    """Median distance (root of the summed squares) to the nearest training digit.

    Of generated pictures, and, to compare, of held-out real ones. Far below the latter would
    mean that the model recites its training data.
    """
    train, held_out = load_digits_split()
    known = train.images.reshape(len(train.images), -1)

    def median(pictures: NDArray[np.float32]) -> float:
        flat = pictures.reshape(len(pictures), 1, -1)
        return float(np.median(np.linalg.norm(flat - known, axis=-1).min(axis=1)))

    return {
        "nearest_train_distance_generated": median(images),
        "nearest_train_distance_held_out": median(held_out.images),
    }


def main(
    weights: Annotated[
        Path | None, typer.Option(help="A weights file. By default the one we ship.")
    ] = None,
    count: Annotated[int, typer.Option(min=10, help="Pictures to score.")] = 500,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the noise.")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="Euler steps.")] = DEFAULT_STEPS,
    guidance: Annotated[float, typer.Option(help="Guidance scale.")] = DEFAULT_GUIDANCE,
) -> None:
    """Generate digits with dense attention and let an independent classifier read them."""
    scores = evaluate(weights, count=count, seed=seed, steps=steps, guidance=guidance)
    typer.echo(json.dumps(scores, indent=2))


if __name__ == "__main__":
    typer.run(main)
