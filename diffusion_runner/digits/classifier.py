"""The judge: a support vector classifier of real digits. It knows nothing of the model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diffusion_runner.digits.data import load_digits_split

REQUIRED_ACCURACY = 0.98


class ClassifierError(RuntimeError):
    """The classifier is not good enough to judge by."""


@dataclass(frozen=True)
class DigitClassifier:
    """`held_out_accuracy` is the share, in [0, 1], of held-out real digits that it gets right."""

    held_out_accuracy: float
    num_held_out: int
    _svc: Any = field(repr=False)

    def classify(self, images: NDArray[np.float32]) -> NDArray[np.int64]:
        """`[R, 8, 8]` pixels in [0, 1] to `[R]` digits, 0..9."""
        if len(images) == 0:
            return np.empty(0, np.int64)
        return np.asarray(self._svc.predict(images.reshape(len(images), -1)), np.int64)


def train_classifier(required_accuracy: float = REQUIRED_ACCURACY) -> DigitClassifier:
    """An RBF classifier of the training digits (under a second), tried on the held-out ones.

    Raises `ClassifierError` if it gets fewer than `required_accuracy` of those right.
    """
    from sklearn.svm import SVC  # type: ignore[import-untyped]

    train, held_out = load_digits_split()
    svc = SVC(kernel="rbf", C=10.0, gamma="scale")
    svc.fit(train.images.reshape(len(train.images), -1), train.labels)
    guesses = svc.predict(held_out.images.reshape(len(held_out.images), -1))
    accuracy = float(np.mean(guesses == held_out.labels))
    if accuracy < required_accuracy:
        raise ClassifierError(
            f"the classifier gets {accuracy:.2%} of {len(held_out.labels)} held-out digits right, "
            f"{required_accuracy:.2%} are required"
        )
    return DigitClassifier(accuracy, len(held_out.labels), svc)
