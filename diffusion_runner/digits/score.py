"""How often the independent classifier reads a generated picture as the digit asked for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from diffusion_runner.digits.classifier import DigitClassifier, train_classifier


def score(
    images: NDArray[np.float32],
    digits: Sequence[int] | NDArray[np.integer],
    classifier: DigitClassifier | None = None,
) -> float:
    """The share, in [0, 1], of `images` `[R, 8, 8]` that are read as `digits` `[R]`.

    Pixels are in [0, 1]. Without a `classifier` one is trained, which takes under a second.
    """
    wanted = np.asarray(digits)
    if images.ndim != 3 or wanted.shape != images.shape[:1]:
        raise ValueError(
            f"expected images [R, 8, 8] and digits [R], got {list(images.shape)} "
            f"and {list(wanted.shape)}"
        )
    if len(images) == 0:
        raise ValueError("there are no images to score")
    judge = classifier or train_classifier()
    return float(np.mean(judge.classify(images) == wanted))
