"""The commands ``explain`` and ``advise``: flags, and what is called with them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from diffusion_runner.explain.figures import DEFAULT_RANKS, DEFAULT_TRANSFER_BLOCKS
from diffusion_runner.explain.geometry import Geometry

_SMALL = Geometry()
_CACHE = "The cache"
_SHOW = "What is shown"
_LOOK_UP = "Look up"

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        help="A KVCacheConfig as JSON (its to_json), in place of the flags below.",
        rich_help_panel=_CACHE,
        dir_okay=False,
    ),
]


def _size(help_text: str, default: object) -> Any:
    return typer.Option(
        help=f"{help_text} \\[default: {default}]",
        rich_help_panel=_CACHE,
        show_default=False,
    )


LayersOption = Annotated[int | None, _size("Layers.", _SMALL.layers)]
BlocksOption = Annotated[int | None, _size("Blocks, the null block included.", _SMALL.blocks)]
HeadsOption = Annotated[int | None, _size("KV heads of this rank.", _SMALL.heads)]
HeadSizeOption = Annotated[
    int | None, _size("Elements of K of a head and token.", _SMALL.head_size)
]
HeadSizeVOption = Annotated[int | None, _size("Elements of V.", "as K")]
BlockSizeOption = Annotated[int | None, _size("Tokens of a block.", _SMALL.block_size)]
DTypeOption = Annotated[str | None, _size("Element type of the pool.", _SMALL.dtype)]
PaddedOption = Annotated[int | None, _size("Bytes of a page with its padding.", "no padding")]
KernelOption = Annotated[
    int | None, _size("Tokens of the kernel blocks that a block is split into.", "no split")
]
GroupsOption = Annotated[
    int | None, _size("Block tables that the layers are dealt to, in equal parts.", _SMALL.groups)
]
TransferOption = Annotated[
    int, typer.Option("--transfer", help="Blocks of a row, or of a transfer.")
]
RanksOption = Annotated[
    int, typer.Option(help="Tensor-parallel ranks that the heads are dealt to.")
]
JsonOption = Annotated[
    Path | None, typer.Option("--json", help="Also write the figures as JSON.", dir_okay=False)
]


def register(app: typer.Typer, console: Console) -> None:
    """Add both commands to the command line; they print to ``console``."""

    @app.command()
    def explain(
        config: ConfigOption = None,
        layers: LayersOption = None,
        blocks: BlocksOption = None,
        heads: HeadsOption = None,
        head_size: HeadSizeOption = None,
        head_size_v: HeadSizeVOption = None,
        block_size: BlockSizeOption = None,
        dtype: DTypeOption = None,
        page_size_padded: PaddedOption = None,
        kernel_block_size: KernelOption = None,
        groups: GroupsOption = None,
        layout: Annotated[
            list[str] | None,
            typer.Option(
                help="A layout to show; give it several times for several. Without it, all six "
                "side by side.",
                show_default=False,
                rich_help_panel=_SHOW,
            ),
        ] = None,
        out: Annotated[
            list[Path] | None,
            typer.Option(
                help="Draw it: a name that ends in .svg, .png or .html (one page that finds "
                "cells, with nothing outside of it). Give it several times for several.",
                show_default=False,
                dir_okay=False,
                rich_help_panel=_SHOW,
            ),
        ] = None,
        block: Annotated[
            int | None,
            typer.Option(
                help="The block whose runs are marked. \\[default: the first that can be owned]",
                show_default=False,
                rich_help_panel=_SHOW,
            ),
        ] = None,
        show: Annotated[
            str | None,
            typer.Option(
                metavar="L,B,H,N",
                help="Most indices of each axis that are drawn; the rest is marked as left out.",
                show_default=False,
                rich_help_panel=_SHOW,
            ),
        ] = None,
        theme: Annotated[
            str,
            typer.Option(
                help="Of SVG and PNG: light or dark. A page follows its reader's.",
                rich_help_panel=_SHOW,
            ),
        ] = "light",
        cell: Annotated[
            str | None,
            typer.Option(
                metavar="'L B H N'",
                help="Where this cell lies: layer, block, head and token, such as '0 1 0 2'.",
                show_default=False,
                rich_help_panel=_LOOK_UP,
            ),
        ] = None,
        address: Annotated[
            str | None,
            typer.Option(
                metavar="BYTE",
                help="Which cell owns this byte of the allocation, such as 0x1F400.",
                show_default=False,
                rich_help_panel=_LOOK_UP,
            ),
        ] = None,
        diff: Annotated[
            tuple[str, str] | None,
            typer.Option(
                metavar="A B",
                help="Two layouts: which cells they keep at different bytes.",
                show_default=False,
                rich_help_panel=_LOOK_UP,
            ),
        ] = None,
        transfer: TransferOption = DEFAULT_TRANSFER_BLOCKS,
        ranks: RanksOption = DEFAULT_RANKS,
        json: JsonOption = None,
    ) -> None:
        """Show what a layout does: the allocation as a picture, its runs, who owns a byte.

        Without flags a cache small enough to be drawn whole. Try
        `pagestride explain --out layouts.html`, and `--address 0x1400`.
        """
        from diffusion_runner.explain import execute

        flags = {name: value for name, value in locals().items() if name in execute.GEOMETRY_FLAGS}
        request = execute.Request(
            cache=execute.cache_of(config, flags),
            layouts=execute.chosen_layouts(layout, diff),
            out=tuple(out or ()),
            json=json,
            block=block,
            cell=cell,
            address=address,
            diff=diff is not None,
            shown=execute.parse_shown(show),
            transfer=transfer,
            ranks=ranks,
            theme=theme,
        )
        execute.run_explain(request, console=console)

    @app.command()
    def advise(
        use: Annotated[
            str | None,
            typer.Option(
                help="attention, offload, transfer or reshard. Without it, all four.",
                show_default=False,
            ),
        ] = None,
        config: ConfigOption = None,
        layers: LayersOption = None,
        blocks: BlocksOption = None,
        heads: HeadsOption = None,
        head_size: HeadSizeOption = None,
        head_size_v: HeadSizeVOption = None,
        block_size: BlockSizeOption = None,
        dtype: DTypeOption = None,
        page_size_padded: PaddedOption = None,
        kernel_block_size: KernelOption = None,
        groups: GroupsOption = None,
        transfer: TransferOption = DEFAULT_TRANSFER_BLOCKS,
        ranks: RanksOption = DEFAULT_RANKS,
        json: JsonOption = None,
    ) -> None:
        """Rank the six layouts for a use, by counted runs, and say why."""
        from diffusion_runner.explain import execute

        flags = {name: value for name, value in locals().items() if name in execute.GEOMETRY_FLAGS}
        execute.run_advise(
            execute.cache_of(config, flags),
            use,
            transfer=transfer,
            ranks=ranks,
            json_path=json,
            console=console,
        )
