"""Which transformers keep their text K/V the same from step to step, and which do not, and why.

A cross-attention transformer projects the prompt's hidden states once in each layer, and neither
the timestep nor the image enters them: their K/V can be kept. In a joint transformer the text
tokens are a part of the sequence: from the second block on they have seen the noisy image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import diffusers
import torch

from layout_core.errors import UnsupportedError

Projected = tuple[torch.Tensor, torch.Tensor]
"""K ``[T, H, D]`` and V ``[T, H, Dv]``."""


@dataclass(frozen=True, slots=True)
class Family:
    """How one kind of attention module projects; what is around it stays its own."""

    processors: tuple[str, ...]  #: stock classes that this replaces, by name
    query: Callable[[Any, torch.Tensor], torch.Tensor]  #: ``[B, Q, C]`` -> ``[B, Q, H, D]``
    text: Callable[[Any, torch.Tensor], Projected]  #: ``[T, C]``, packed tokens
    image: Callable[[Any, torch.Tensor], Projected] | None
    projections: tuple[str, ...]  #: submodules that K and V depend on; some may be absent
    plain: tuple[tuple[str, Any], ...] = ()  #: attributes that must have exactly this value


@dataclass(frozen=True, slots=True)
class ModelKind:
    """A transformer of diffusers: where its cross-attention is and what its call is given."""

    blocks: str  #: attribute that holds the blocks
    attention: str  #: attribute of a block
    family: Family
    mask: str | None = None  #: argument that hides text tokens
    image: str | None = None  #: argument with a second context, of an image


@dataclass(frozen=True, slots=True)
class Layer:
    """One cross-attention layer."""

    name: str  #: dotted, from the transformer; also the layer's name in the plan
    module: Any
    family: Family

    def weights(self) -> Iterator[tuple[Any, Any]]:
        """What K and V follow from beside the prompt: each part, and the state that it is in.

        A weight's state is the number of times it was written, an adapter's are its scales and
        which are on.
        """
        for name in self.family.projections:
            projection = getattr(self.module, name, None)
            if projection is None:
                continue
            # most projections have no submodules; ``parameters`` costs ten times as much
            leaf = not projection._modules
            found = projection._parameters.values() if leaf else projection.parameters()
            for weight in found:
                if weight is not None:
                    yield weight, None if weight.is_inference() else weight._version
            for part in () if leaf else projection.modules():
                if isinstance(getattr(part, "scaling", None), dict):  # a layer of peft
                    scales = tuple(part.scaling.items())
                    yield part, (scales, tuple(part.active_adapters), part.disable_adapters)


def _pixart_query(attn: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    return _heads(attn, attn.to_q(hidden_states))


def _pixart_text(attn: Any, states: torch.Tensor) -> Projected:
    key, value = _text(attn, states)
    return _heads(attn, key), _heads(attn, value)


def _wan_query(attn: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    return _heads(attn, attn.norm_q(attn.to_q(hidden_states)))


def _wan_text(attn: Any, states: torch.Tensor) -> Projected:
    key, value = _text(attn, states)
    return _heads(attn, attn.norm_k(key)), _heads(attn, value)


def _wan_image(attn: Any, states: torch.Tensor) -> Projected:
    if getattr(attn, "fused_projections", False):
        key, value = attn.to_added_kv(states).chunk(2, dim=-1)
    else:
        key, value = attn.add_k_proj(states), attn.add_v_proj(states)
    return _heads(attn, attn.norm_added_k(key)), _heads(attn, value)


def _text(attn: Any, states: torch.Tensor) -> Projected:
    if getattr(attn, "fused_projections", False):
        key, value = attn.to_kv(states).chunk(2, dim=-1)
        return key, value
    return attn.to_k(states), attn.to_v(states)


def _heads(attn: Any, projected: torch.Tensor) -> torch.Tensor:
    return projected.view(*projected.shape[:-1], attn.heads, -1)


PIXART: Final = Family(
    processors=("AttnProcessor2_0", "FusedAttnProcessor2_0"),
    query=_pixart_query,
    text=_pixart_text,
    image=None,
    projections=("to_k", "to_v", "to_kv"),
    plain=(
        ("group_norm", None),
        ("spatial_norm", None),
        ("norm_cross", None),
        ("norm_q", None),
        ("norm_k", None),
        ("add_k_proj", None),
        ("residual_connection", False),
        ("rescale_output_factor", 1.0),
    ),
)

WAN: Final = Family(
    processors=("WanAttnProcessor",),
    query=_wan_query,
    text=_wan_text,
    image=_wan_image,
    projections=(
        "to_k", "to_v", "to_kv", "norm_k", "add_k_proj", "add_v_proj", "to_added_kv",
        "norm_added_k",
    ),
)  # fmt: skip

WAN_TEXT_TOKENS: Final = 512
"""Wan's attention takes the last 512 context tokens as text and what precedes them as image."""

KINDS: Final[dict[str, ModelKind]] = {
    "PixArtTransformer2DModel": ModelKind(
        "transformer_blocks", "attn2", PIXART, mask="encoder_attention_mask"
    ),
    "WanTransformer3DModel": ModelKind("blocks", "attn2", WAN, image="encoder_hidden_states_image"),
}
"""The transformers that are served, by class."""

ONE_SEQUENCE: Final[dict[str, str]] = {
    "CogVideoXTransformer3DModel": "transformer_blocks.0.attn1",
    "CogView3PlusTransformer2DModel": "transformer_blocks.0.attn1",
    "CogView4Transformer2DModel": "transformer_blocks.0.attn1",
    "Lumina2Transformer2DModel": "layers.0.attn",
}
"""Joint transformers that append the text to the image's own sequence, and where."""

SERVED_VERSIONS: Final = ("0.40", "0.41", "0.42")
"""Versions of diffusers whose stock processors do what the families here do."""

_MODULATIONS: Final = ("norm1_context", "txt_mod", "double_stream_modulation_txt")
"""Submodules that scale and shift text tokens by the timestep, where they have weights."""


def check_version(version: str | None = None) -> None:
    """Raise unless the installed diffusers, or this version of it, is one that was compared."""
    version = diffusers.__version__ if version is None else version
    if ".".join(version.split(".")[:2]) not in SERVED_VERSIONS:
        raise UnsupportedError(
            f"diffusers: expected one of {', '.join(SERVED_VERSIONS)}, whose processors were "
            f"compared with these, got {version}"
        )


def kind_of(transformer: Any) -> ModelKind:
    """The kind of a transformer.

    Raises:
        UnsupportedError: it is not served. It names the edges by which the timestep or the
            image reaches the text's K/V, where they are known.
    """
    cls = type(transformer)
    name = cls.__name__
    if cls.__module__.partition(".")[0] == "diffusers":
        if name in KINDS:
            return KINDS[name]
        edges = joint_edges(transformer)
        if edges:
            raise UnsupportedError(
                f"transformer: {name} has no text K/V that outlives a step: {'; '.join(edges)}. "
                f"Served are {', '.join(KINDS)}, whose text is read by cross-attention alone"
            )
    raise UnsupportedError(
        f"transformer: {cls.__module__}.{name} is not known to keep its text K/V the same at "
        f"every step; served are {', '.join(KINDS)} of diffusers"
    )


def joint_edges(transformer: Any) -> list[str]:
    """By which edges the image or the timestep reaches the text tokens: one of each sort."""
    edges = []
    modules = dict(transformer.named_modules())
    for path, module in modules.items():
        if getattr(module, "add_q_proj", None) is not None:
            edges.append(
                f"in {path} the text tokens are queries (add_q_proj) and attend to image tokens"
            )
            break
    one = ONE_SEQUENCE.get(type(transformer).__name__)
    if one in modules:
        edges.append(f"in {one} text and image tokens are one sequence and attend to each other")
    for path, module in modules.items():
        if path.rpartition(".")[2] in _MODULATIONS and any(True for _ in module.parameters()):
            edges.append(f"{path} modulates the text tokens by the timestep")
            break
    return edges


def layers_of(transformer: Any, kind: ModelKind) -> tuple[Layer, ...]:
    """The cross-attention layers of a transformer, with stock processors.

    Raises:
        UnsupportedError: a block without one, or a layer that does more than its family's
            stock processor; it names layer, attribute and value.
    """
    layers = []
    for index, block in enumerate(getattr(transformer, kind.blocks)):
        name = f"{kind.blocks}.{index}.{kind.attention}"
        attn = getattr(block, kind.attention, None)
        if attn is None:
            raise UnsupportedError(f"transformer: {name}: there is no cross-attention here")
        processor = type(attn.processor)
        stock = processor.__module__.partition(".")[0] == "diffusers"
        if not stock or processor.__name__ not in kind.family.processors:
            raise UnsupportedError(
                f"transformer: {name}: expected a stock {' or '.join(kind.family.processors)}, "
                f"got {processor.__module__}.{processor.__name__}, whose work would be lost"
            )
        for attribute, expected in kind.family.plain:
            value = getattr(attn, attribute, expected)
            if value != expected:
                raise UnsupportedError(
                    f"transformer: {name}: {attribute}: expected {expected!r}, got {value!r}"
                )
        layers.append(Layer(name, attn, kind.family))
    if not layers:
        raise UnsupportedError(f"transformer: {kind.blocks}: there are no blocks")
    return tuple(layers)
