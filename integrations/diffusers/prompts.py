"""What a call gives as its prompt: told apart from other prompts, and cut into contexts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from integrations.diffusers.models import WAN_TEXT_TOKENS
from layout_core.errors import TensorError, UnsupportedError

HIDDEN_BIAS: Final = -9000.0
"""A bias from here on hides a token: diffusers' is -10000, and -9984 once rounded to bfloat16."""


class Snapshot:
    """A tensor as it was: recognised without looking while nobody wrote to it, else compared.

    torch counts the writes to a tensor. It counts none through ``.data`` or a NumPy view, and
    keeps no count for a tensor made under ``torch.inference_mode``, which is always compared.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._copy = tensor.detach().clone()
        self._seen: tuple[torch.Tensor, int] | None = None
        self._remember(tensor)

    def same(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has the values that were taken. Waits for the device to compare."""
        if self._seen is not None:
            seen, version = self._seen
            if seen is tensor and version == tensor._version:
                return True
        copy = self._copy
        if (tensor.shape, tensor.dtype, tensor.device) != (copy.shape, copy.dtype, copy.device):
            return False
        if not torch.equal(tensor, copy):
            return False
        self._remember(tensor)
        return True

    def _remember(self, tensor: torch.Tensor) -> None:
        self._seen = None if tensor.is_inference() else (tensor, tensor._version)


@dataclass(frozen=True, slots=True)
class Given:
    """The arguments of a call that its contexts follow from; an argument may be ``None``."""

    text: torch.Tensor  #: ``[B, S, C]``, before any projection of the transformer's own
    mask: torch.Tensor | None  #: ``[B, S]`` of 0 and 1, or a bias ``[B, 1, S]``
    image: torch.Tensor | None  #: ``[B * parts, I, C]``

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        return (self.text, self.mask, self.image)


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """Packed tokens of the distinct contexts of one part, and which context each row reads."""

    part: str  #: ``text`` or ``image``
    start: int  #: the part's first token of a row of hidden states, as attention is given them
    tokens: torch.Tensor  #: int64 ``[T]``: rows of ``[B * S]`` hidden states, context by context
    lengths: tuple[int, ...]  #: tokens of each context
    rows: tuple[int, ...]  #: ``[B]``: the context that a row reads


def read_given(arguments: Mapping[str, Any], *, mask: str | None, image: str | None) -> Given:
    """The prompt among the arguments of a call.

    Raises:
        TensorError: there is none, or it is of another shape.
    """
    text = arguments.get("encoder_hidden_states")
    if not isinstance(text, torch.Tensor) or text.dim() != 3:
        raise TensorError(
            f"encoder_hidden_states: expected a tensor [batch, tokens, channels], got "
            f"{_described(text)}"
        )
    hidden = None if mask is None else arguments.get(mask)
    if hidden is not None:
        batch, tokens = text.shape[:2]
        if not isinstance(hidden, torch.Tensor) or tuple(hidden.shape) not in (
            (batch, tokens),
            (batch, 1, tokens),
        ):
            raise TensorError(
                f"{mask}: expected a tensor [{batch}, {tokens}] or [{batch}, 1, {tokens}], as "
                f"encoder_hidden_states has it, got {_described(hidden)}"
            )
    return Given(text, hidden, None if image is None else arguments.get(image))


def cut_contexts(given: Given, batch: int, tokens: int) -> tuple[Cut, ...]:
    """The distinct contexts of a prompt. Asks the device, once for each prompt.

    Equal rows (several pictures of one prompt) share a context. Tokens that a mask hides are
    left out wherever they stand: a context has no order, as its keys carry no positions.

    Args:
        given: the call's prompt.
        batch, tokens: of the hidden states that attention is given, the image's tokens first.

    Raises:
        TensorError: another batch than the prompt's; a mask that hides a whole row.
        UnsupportedError: a bias that weighs tokens, rather than hiding some.
    """
    if given.text.shape[0] != batch:
        raise TensorError(
            f"encoder_hidden_states: the prompt has {given.text.shape[0]} rows, attention is "
            f"given {batch}"
        )
    columns = [given.text.reshape(batch, -1)]
    kept = None if given.mask is None else _kept(given.mask)
    if kept is not None:
        columns.append(kept)
    start = 0
    if given.image is not None:
        start = tokens - WAN_TEXT_TOKENS
        if given.image.shape[0] % batch:
            raise TensorError(
                f"encoder_hidden_states_image: expected a multiple of {batch} rows, as "
                f"encoder_hidden_states has, got {given.image.shape[0]}"
            )
        columns.append(given.image.reshape(batch, -1))
    if start < 0 or (given.image is not None and start == 0):
        raise UnsupportedError(
            f"encoder_hidden_states: beside an image, Wan's attention takes the last "
            f"{WAN_TEXT_TOKENS} of all context tokens as text; got {tokens} in all"
        )
    first = _first_equal(columns, batch)
    unique = sorted(set(first))
    rows = tuple(unique.index(row) for row in first)
    device = given.text.device
    cuts = []
    if start:
        cuts.append(_cut("image", 0, [torch.arange(start)] * len(unique), unique, rows, tokens))
    everything = torch.arange(start, tokens)
    if kept is None:
        positions = [everything] * len(unique)
    else:
        seen = kept.cpu()
        positions = [torch.nonzero(seen[row]).reshape(-1) for row in unique]
    cuts.append(_cut("text", start, positions, unique, rows, tokens))
    return tuple(
        Cut(cut.part, cut.start, cut.tokens.to(device), cut.lengths, cut.rows) for cut in cuts
    )


def _cut(
    part: str,
    start: int,
    positions: list[torch.Tensor],
    unique: list[int],
    rows: tuple[int, ...],
    tokens: int,
) -> Cut:
    lengths = tuple(len(each) for each in positions)
    for row, length in zip(unique, lengths):
        if not length:
            raise TensorError(
                f"encoder_attention_mask: row {row} hides all of its {tokens} tokens; attention "
                "over no token has no value"
            )
    packed = torch.cat([row * tokens + each for row, each in zip(unique, positions)])
    return Cut(part, start, packed, lengths, rows)


def _kept(mask: torch.Tensor) -> torch.Tensor:
    """bool ``[B, S]``: the tokens that are seen."""
    if mask.dim() == 3:
        seen, hidden = mask[:, 0] == 0, mask[:, 0] <= HIDDEN_BIAS
        what = f"a bias of 0 (seen) or {HIDDEN_BIAS:g} and less (hidden)"
    else:
        seen, hidden = mask == 1, mask == 0
        what = "1 (seen) or 0 (hidden)"
    if not bool((seen | hidden).all()):
        raise UnsupportedError(
            f"encoder_attention_mask: expected {what} for each token; other values weigh "
            "tokens, which paged attention does not"
        )
    return seen


def _first_equal(columns: list[torch.Tensor], batch: int) -> list[int]:
    """For each row, the first row that equals it in all columns."""
    first: list[int] = []
    for row in range(batch):
        for earlier in sorted(set(first)):
            if all(torch.equal(column[row], column[earlier]) for column in columns):
                first.append(earlier)
                break
        else:
            first.append(row)
    return first


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor {list(value.shape)}"
    return repr(value) if value is None else type(value).__name__
