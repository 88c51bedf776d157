"""What our two attention implementations for vLLM-Omni share."""

from __future__ import annotations

from typing import Any, Final

from vllm_omni.diffusion.attention.backends import abstract
from vllm_omni.diffusion.config import get_current_diffusion_config_or_none

from integrations.vllm_omni.parallel import ulysses_degree
from layout_core.attention import AttentionMetadataBuilder
from layout_core.errors import TensorError, UnsupportedError

PLATFORMS: Final = ("cuda", "unspecified")
"""vLLM-Omni's names for where our engines run; it has no platform for a CPU but this one."""


class OmniMetadataBuilder(AttentionMetadataBuilder[Any]):
    """Builds vLLM-Omni's metadata, checked as ours is."""

    def build(self, **values: Any) -> Any:
        super().build(**values)
        return abstract.AttentionMetadata(**values)


class OmniBackend:
    """What a backend of ours answers vLLM-Omni's selector; stands before the engine's own class."""

    supported_platforms = PLATFORMS

    @staticmethod
    def get_metadata_cls() -> type[abstract.AttentionMetadata]:
        return abstract.AttentionMetadata

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder[Any]]:
        return OmniMetadataBuilder


def check_construction(name: str) -> None:
    """Raise where the model that is being built would go past its attention backend.

    Raises:
        UnsupportedError: names the backend and the field of the parallel config.
    """
    config = get_current_diffusion_config_or_none()
    try:
        ulysses_degree(getattr(config, "parallel_config", None))
    except UnsupportedError as error:
        raise UnsupportedError(f"backend {name}: {error}") from error


def check_local_heads(impl: Any, query: Any) -> None:
    """Raise unless a dense call has all heads of its layer, or an equal share of them.

    Ulysses hands a rank ``num_heads / degree`` heads, in a layer that was built for all.

    Raises:
        TensorError: names layer, heads and head size.
    """
    shape = tuple(query.shape)
    if len(shape) != 4 or not shape[2] or impl.num_heads % shape[2] or shape[3] != impl.head_size:
        raise TensorError(
            f"query: layer {impl.prefix!r} expects [B, S, H, {impl.head_size}] with H dividing "
            f"{impl.num_heads}, got {list(shape)}"
        )
