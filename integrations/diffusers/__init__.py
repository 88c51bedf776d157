"""Keep the prompt's K/V of a diffusers transformer in pages: projected once, read at every step.

    cache = install(pipe.transformer, max_tokens=1024)
    with cache.request():
        image = pipe(prompt).images[0]
    cache.remove()

Importing this module imports neither torch nor diffusers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from layout_core.packages import check_installed

if TYPE_CHECKING:
    from integrations.diffusers.context_cache import ContextCache
    from layout_core import DType, Engine, KVCacheLayout

DEFAULT_BACKEND = "torch_cuda"
"""The engine that keeps the pages, unless another one is named."""


def install(
    transformer: Any,
    *,
    max_tokens: int,
    backend: str | Engine[Any, Any, Any] = DEFAULT_BACKEND,
    layout: KVCacheLayout | str | None = None,
    block_size: int = 16,
    dtype: DType | str | None = None,
    kernel: str = "auto",
) -> ContextCache:
    """Put the cross-attention of a transformer on pages; ``cache.remove()`` takes it off again.

    From now on the transformer runs inside ``with cache.request():`` alone. Its self-attention
    keeps the processors that it has.

    Args:
        transformer: a ``PixArtTransformer2DModel`` or a ``WanTransformer3DModel``, with its
            stock processors, where it is to run.
        max_tokens: context tokens that the pool holds at once, of all prompts of all open
            requests; each context takes whole blocks.
        backend: ``torch_cuda``, ``jax_gpu`` or a third party's flag, loaded for the device of
            the transformer; or an engine. An engine of another framework gets and gives
            tensors through DLPack.
        layout: of the pool; ``None`` is the control plane's default.
        block_size: tokens of a block.
        dtype: of K and V as they are projected; ``None`` is that of ``to_k``'s weight. Nothing
            is cast: K of another dtype raises.
        kernel: see ``Engine.prepare``.

    Raises:
        MissingPackageError: torch or diffusers is not installed.
        UnsupportedError: a transformer whose text K/V changes from step to step, or of a class
            that is not known to keep it constant, or with processors that are not stock. It
            names the edge, the class, or the layer.
        LayoutError: sizes, a layout, a backend or a device that cannot be. Nothing is
            installed where it raises.
    """
    check_installed("integrations.diffusers", ("torch", "diffusers"), "diffusers")
    from integrations.diffusers.context_cache import install_cache

    return install_cache(
        transformer,
        max_tokens=max_tokens,
        backend=backend,
        layout=layout,
        block_size=block_size,
        dtype=dtype,
        kernel=kernel,
    )
