"""How many generated digits an independent classifier reads as what the prompt asked for."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console

from diffusion_runner.digits.classifier import train_classifier
from diffusion_runner.errors import RunError
from diffusion_runner.model.text import prompt_digit
from diffusion_runner.run import RunResult, generate
from diffusion_runner.settings import RunSettings

REQUIRED_AGREEMENT = 0.95


@dataclass(frozen=True, eq=False)
class EngineScore:
    """Agreement of the classifier with the prompts on generated digits."""

    result: RunResult
    count: int
    agreed: int
    held_out_accuracy: float  #: of the classifier on real digits it was not trained on
    by_digit: tuple[tuple[int, int], ...]  #: (agreed, drawn) for digits 0 to 9

    @property
    def agreement(self) -> float:
        return self.agreed / self.count

    @property
    def passes(self) -> bool:
        return self.agreement >= REQUIRED_AGREEMENT


def score_engine(settings: RunSettings, count: int, *, console: Console) -> EngineScore:
    """Draw ``count`` digits and let the classifier read them.

    The classifier is trained on real digits and refuses to judge below its own required
    accuracy on held-out ones.

    Args:
        settings: prompts must be known phrasings of a digit.
        count: how many of the drawn pictures are read, >= 1 and at most those drawn.
    """
    if not 1 <= count <= settings.num_images:
        raise RunError(f"count: expected 1 to {settings.num_images}, got {count}")
    wanted = [prompt_digit(prompt) for prompt in settings.prompts]
    unknown = [prompt for prompt, digit in zip(settings.prompts, wanted) if digit is None]
    if unknown:
        raise RunError(f"prompts: {unknown[0]!r} is not a phrasing of a digit, so it has no score")
    classifier = train_classifier()
    result = generate(settings, console=console)
    digits = [digit for _ in range(settings.count) for digit in wanted if digit is not None]
    read = classifier.classify(result.images[:count])
    hits = [int(r) == d for r, d in zip(read, digits[:count])]
    by_digit = tuple(
        (
            sum(hit for hit, d in zip(hits, digits) if d == digit),
            sum(d == digit for d in digits[:count]),
        )
        for digit in range(10)
    )
    return EngineScore(result, count, sum(hits), classifier.held_out_accuracy, by_digit)
