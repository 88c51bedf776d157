"""What ``pagestride explain`` and ``advise`` do with their flags: checked, then called."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from diffusion_runner.errors import RunError
from diffusion_runner.explain.excerpt import DEFAULT_SHOWN, Shown
from diffusion_runner.explain.figures import DEFAULT_RANKS, DEFAULT_TRANSFER_BLOCKS
from diffusion_runner.explain.geometry import Cache, Geometry, read_config
from diffusion_runner.explain.scene import THEMES
from layout_core import DType, KVCacheLayout

if TYPE_CHECKING:
    from diffusion_runner.explain.build import Explained
    from diffusion_runner.explain.diff import Difference
    from diffusion_runner.explain.locate import CellQuery

GEOMETRY_FLAGS = tuple(item.name for item in fields(Geometry))
MOST_CELLS = 20_000
"""More than a picture can show, and than a browser likes to."""

SUFFIXES = (".svg", ".png", ".html")


@dataclass(frozen=True, slots=True)
class Request:
    """One call of ``pagestride explain``."""

    cache: Cache
    layouts: tuple[KVCacheLayout, ...]
    out: tuple[Path, ...] = ()
    json: Path | None = None
    block: int | None = None
    cell: str | None = None
    address: str | None = None
    diff: bool = False  #: two layouts, compared
    shown: Shown = DEFAULT_SHOWN
    transfer: int = DEFAULT_TRANSFER_BLOCKS
    ranks: int = DEFAULT_RANKS
    theme: str = "light"


def cache_of(config: Path | None, flags: dict[str, Any]) -> Cache:
    """The cache that the flags describe, or that a config carries.

    Args:
        config: a file of ``KVCacheConfig.to_json``, or ``None``.
        flags: values of :class:`Geometry` by name; ``None`` where the flag was not given.

    Raises:
        RunError: a config and flags that contradict it.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    if config is not None:
        kernel = given.pop("kernel_block_size", None)
        if given:
            names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise RunError(
                f"config: it says what the cache holds, so expected no {names} beside it"
            )
        return read_config(config, kernel)
    if "dtype" in given:
        given["dtype"] = DType.parse(given["dtype"])
    return Geometry(**given).cache()


def chosen_layouts(
    layouts: Sequence[str] | None, diff: tuple[str, str] | None
) -> tuple[KVCacheLayout, ...]:
    """The layouts that are shown: those named, the two that are compared, or all six.

    Raises:
        RunError: both kinds of choice, or a layout compared with itself.
        UnknownLayoutError: a name that is no layout.
    """
    if diff is not None:
        if layouts:
            raise RunError(
                "layout: --diff names its two layouts, so expected no --layout beside it"
            )
        pair = (KVCacheLayout.parse(diff[0]), KVCacheLayout.parse(diff[1]))
        if pair[0] is pair[1]:
            raise RunError(
                f"diff: expected two layouts, got {diff[0]} and {diff[1]}, which are one"
            )
        return pair
    if not layouts:
        return tuple(KVCacheLayout)
    return tuple(dict.fromkeys(KVCacheLayout.parse(name) for name in layouts))


def parse_shown(text: str | None) -> Shown:
    """``"l,b,h,n"``: most indices of each axis that are drawn; ``None`` for the default.

    Raises:
        RunError: anything but four integers >= 2.
    """
    if text is None:
        return DEFAULT_SHOWN
    parts = text.replace(",", " ").split()
    if len(parts) != 4 or not all(part.isdecimal() and int(part) >= 2 for part in parts):
        raise RunError(f"show: expected four integers >= 2 'l,b,h,n', got {text!r}")
    layers, blocks, heads, tokens = map(int, parts)
    if layers * blocks * heads * tokens > MOST_CELLS:
        raise RunError(f"show: expected at most {MOST_CELLS:,} cells in all, got {text!r}")
    return Shown(layers, blocks, heads, tokens, whole=1)


def run_explain(request: Request, *, console: Console) -> None:
    """Resolve, print, and write the files that were asked for; nothing is written if it fails."""
    from diffusion_runner.explain import report
    from diffusion_runner.explain.build import explain
    from diffusion_runner.explain.diff import difference, pale_where_equal
    from diffusion_runner.explain.locate import parse_address, parse_cell

    for path in request.out:
        if path.suffix not in SUFFIXES:
            raise RunError(f"out: expected a name that ends in {', '.join(SUFFIXES)}, got {path}")
    if request.theme not in THEMES:
        raise RunError(f"theme: expected one of {', '.join(THEMES)}, got {request.theme!r}")
    cell = None if request.cell is None else parse_cell(request.cell)
    address = None if request.address is None else parse_address(request.address)
    explained = explain(
        request.cache,
        request.layouts,
        block=request.block,
        cell=cell,
        shown=request.shown,
        transfer=request.transfer,
        ranks=request.ranks,
    )
    found = None
    if request.diff:
        refusals = [e.variant.refusal for e in explained.entries if e.variant.refusal]
        if refusals:
            raise RunError(f"diff: {refusals[0]}")
        found = difference(*explained.plans)
        explained = pale_where_equal(explained, found)
    record = report.record(explained, cell=cell, address=address, found=found)
    files = [(path, _content(path, explained, cell, found, request)) for path in request.out]
    if request.json is not None:
        files.append((request.json, json.dumps(record, indent=2) + "\n"))
    for path, content in files:
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(content, encoding="utf-8")
    report.show(explained, cell=cell, address=address, found=found, console=console)
    for path, _ in files:
        console.print(f"written: {path}", soft_wrap=True)


def _content(
    path: Path,
    explained: Explained,
    cell: CellQuery | None,
    found: Difference | None,
    request: Request,
) -> str | bytes:
    from diffusion_runner.explain.build import picture
    from diffusion_runner.explain.diff import diff_picture

    if path.suffix == ".html":
        from diffusion_runner.explain.page import page_text

        return page_text(explained, None if cell is None else cell.key)
    scene = picture(explained) if found is None else diff_picture(explained, found)
    if path.suffix == ".svg":
        from diffusion_runner.explain.svg import svg_text

        return svg_text(scene, THEMES[request.theme])
    from diffusion_runner.explain.png import png_bytes

    return png_bytes(scene, THEMES[request.theme])


def run_advise(
    cache: Cache,
    use: str | None,
    *,
    transfer: int,
    ranks: int,
    json_path: Path | None,
    console: Console,
) -> None:
    """Rank, print, and write JSON where it was asked for."""
    from diffusion_runner.advise import Use, advise
    from diffusion_runner.explain import report
    from diffusion_runner.explain.geometry import lay_out
    from diffusion_runner.explain.picture import summary

    if use is not None and use not in set(Use):
        raise RunError(f"use: expected one of {', '.join(Use)}, got {use!r}")
    uses = tuple(Use) if use is None else (Use(use),)
    advices = [advise(cache, item, transfer=transfer, ranks=ranks) for item in uses]
    variants = lay_out(cache, tuple(KVCacheLayout))
    line = summary(next(v.plan for v in variants if v.plan is not None))[0]
    if json_path is not None:
        record = {"cache": line, "uses": [advice.as_dict() for advice in advices]}
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    report.show_advice(advices, line, console=console)
