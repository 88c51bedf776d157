"""The numbers that fix the shape of the digits model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

BYTE_VALUES = 256


@dataclass(frozen=True)
class DigitsConfig:
    """Sizes of one digits model. All are counts, except where a unit is named.

    A sequence is `[prompt | image]`. The prompt is one begin-of-text token and the UTF-8 bytes
    of a text; the image is `num_image_tokens` square patches of `patch_size` x `patch_size`
    pixels, row by row.
    """

    num_layers: int = 4
    hidden_size: int = 96
    num_heads: int = 6
    num_kv_heads: int = 2
    head_size: int = 32
    mlp_size: int = 256
    time_features: int = 32
    patch_size: int = 2  # pixels
    image_size: int = 8  # pixels; images are square
    max_prompt_tokens: int = 48  # the begin-of-text token counts
    vocab_size: int = BYTE_VALUES + 1

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{field.name} must be a positive int, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads ({self.num_heads}) must be a multiple of "
                f"num_kv_heads ({self.num_kv_heads})"
            )
        if self.image_size % self.patch_size:
            raise ValueError(
                f"image_size ({self.image_size}) must be a multiple of "
                f"patch_size ({self.patch_size})"
            )
        if self.time_features % 2:
            raise ValueError(f"time_features ({self.time_features}) must be even")
        if self.vocab_size <= BYTE_VALUES:
            raise ValueError(
                f"vocab_size ({self.vocab_size}) must exceed {BYTE_VALUES}: "
                "every byte and the begin-of-text token need an id"
            )

    @property
    def bos_token_id(self) -> int:
        """The begin-of-text token: the first id after the byte values."""
        return BYTE_VALUES

    @property
    def num_image_tokens(self) -> int:
        """Patches of one image."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def patch_dim(self) -> int:
        """Pixels of one patch."""
        return self.patch_size**2

    @property
    def max_sequence_tokens(self) -> int:
        """Tokens of the longest `[prompt | image]` sequence."""
        return self.max_prompt_tokens + self.num_image_tokens

    def to_metadata(self) -> dict[str, str]:
        """All fields as strings, as safetensors metadata wants them."""
        return {field.name: str(getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str]) -> DigitsConfig:
        """The inverse of `to_metadata`. Other keys are ignored; a missing field raises."""
        values: dict[str, int] = {}
        for field in fields(cls):
            if field.name not in metadata:
                raise ValueError(f"the weights' metadata lacks {field.name!r}")
            text = metadata[field.name]
            try:
                values[field.name] = int(text)
            except ValueError:
                raise ValueError(
                    f"the weights' metadata has {field.name}={text!r}, expected an int"
                ) from None
        return cls(**values)
