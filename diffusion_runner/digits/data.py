"""The handwritten digits that come with scikit-learn: 1,797 images of 8x8 pixels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

HELD_OUT_FRACTION = 0.2
SPLIT_SEED = 0
_MAX_GREY = 16.0  # the data set's pixels are counts from 0 to 16


@dataclass(frozen=True, eq=False)
class Digits:
    """`images` `[N, 8, 8]` float32 in [0, 1] (0 is the background), `labels` `[N]` int64, 0..9."""

    images: NDArray[np.float32]
    labels: NDArray[np.int64]


def load_digits_split() -> tuple[Digits, Digits]:
    """The training digits and the held-out ones, always the same split, equal shares of each.

    Neither the diffusion model nor the classifier is trained on a held-out digit.
    """
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]
    from sklearn.model_selection import train_test_split  # type: ignore[import-untyped]

    images, labels = load_digits(return_X_y=True)
    pixels = (images.reshape(-1, 8, 8) / _MAX_GREY).astype(np.float32)
    train_images, test_images, train_labels, test_labels = train_test_split(
        pixels,
        labels.astype(np.int64),
        test_size=HELD_OUT_FRACTION,
        random_state=SPLIT_SEED,
        stratify=labels,
    )
    return Digits(train_images, train_labels), Digits(test_images, test_labels)
