"""Prompts: their tokens, and the phrasings of a digit that the model was trained on."""

from __future__ import annotations

from diffusion_runner.errors import RunError
from diffusion_runner.model.config import DigitsConfig

DIGIT_WORDS = (
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
)

# The first is what `digit_prompt` gives. They differ in length on purpose: rows of one batch
# then differ in length too. `{}` is filled by a word and by a numeral.
PHRASINGS = (
    "a handwritten {}",
    "the digit {}",
    "{}",
    "the number {}",
    "a {}",
    "digit {}",
    "number {}",
    "write {}",
    "draw a {}",
    "a {} written by hand",
    "a picture of the number {}",
    "an image of a handwritten {}",
    "a small grey picture of the digit {}",
)


class PromptTooLongError(RunError):
    """A prompt needs more tokens than the model has prompt positions."""


def encode_prompt(text: str, config: DigitsConfig) -> list[int]:
    """The begin-of-text token, then the UTF-8 bytes of `text` as they are.

    The empty text, which is the unconditional prompt of classifier-free guidance, gives the
    begin-of-text token alone.
    """
    tokens = [config.bos_token_id, *text.encode("utf-8")]
    if len(tokens) > config.max_prompt_tokens:
        shown = text if len(text) <= 24 else text[:24] + "..."
        raise PromptTooLongError(
            f"prompt {shown!r} is {len(tokens)} tokens long (begin-of-text and "
            f"{len(tokens) - 1} bytes), the model's limit is {config.max_prompt_tokens}"
        )
    return tokens


def phrasings(digit: int) -> list[str]:
    """Every text the model was trained on for `digit` (0..9), in lower case."""
    _check_digit(digit)
    fillers = (DIGIT_WORDS[digit], str(digit))
    return [phrasing.format(filler) for phrasing in PHRASINGS for filler in fillers]


def digit_prompt(digit: int) -> str:
    """The default prompt for `digit` (0..9): "a handwritten seven"."""
    _check_digit(digit)
    return PHRASINGS[0].format(DIGIT_WORDS[digit])


def prompt_digit(text: str) -> int | None:
    """The digit (0..9) that a known phrasing asks for; None for any other text.

    Case and surrounding white space do not matter.
    """
    wanted = text.strip().lower()
    for digit in range(len(DIGIT_WORDS)):
        if wanted in phrasings(digit):
            return digit
    return None


def _check_digit(digit: int) -> None:
    if not 0 <= digit < len(DIGIT_WORDS):
        raise ValueError(f"digit must be in 0..9, got {digit!r}")
