"""One HTML page with everything in it: pictures, figures, and a finder for cells and bytes.

It names no other file and no host, so it can be mailed, and opened without a network.
"""

from __future__ import annotations

import json
from html import escape
from importlib import resources
from typing import Any

from diffusion_runner.explain.build import Explained, panels
from diffusion_runner.explain.figures import human_bytes
from diffusion_runner.explain.picture import legend, summary
from diffusion_runner.explain.scene import CSS, DARK, LIGHT, Theme
from diffusion_runner.explain.svg import svg_text
from layout_core import KVCacheLayout, ResolvedLayout

LEGEND_WIDTH = 640.0


def page_text(explained: Explained, cell: str | None = None) -> str:
    """The page.

    Args:
        explained: what is shown.
        cell: ``"l b h n"`` of the cell that is found at first; ``None``: the first cell of the
            marked block.
    """
    excerpts = [entry.excerpt for entry in explained.entries if entry.excerpt is not None]
    drawn = []
    half = len(KVCacheLayout) // 2
    for index, (entry, scene) in enumerate(zip(explained.entries, panels(explained))):
        svg = svg_text(scene, CSS, prefix=f"p{index}")
        name = entry.variant.layout.name
        svg = svg.replace("<svg ", f'<svg data-layout="{name}" ', 1)
        # in two columns, side by side: what differs in the order of L and B alone
        place = index % half * 2 + index // half
        order = f' style="--place: {place}"' if len(explained.entries) == 2 * half else ""
        drawn.append(f"<figure{order}>{svg}</figure>")
    line, how = summary(explained.plans[0])
    first = cell or f"0 {explained.block} 0 0"
    data = {
        "plans": [plan_record(plan) for plan in explained.plans],
        "first": [int(part) for part in first.split()],
    }
    values = {
        "TITLE": escape(explained.title),
        "LIGHT": _variables(LIGHT),
        "DARK": _variables(DARK),
        "SUMMARY": escape(line),
        "HOW": escape(how),
        "PANELS": "\n".join(drawn),
        "LEGEND": svg_text(legend(excerpts, explained.look, LEGEND_WIDTH), CSS, prefix="legend"),
        "TABLE": _table(explained),
        "NOTES": _notes(explained),
        # a name with "</script>" would end the element
        "DATA": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
        "SCRIPT": _resource("page.js"),
    }
    template = _resource("page.html")
    # split first, so that nothing that is filled in is taken for a place to fill
    parts = template.split("__")
    return "".join(values.get(part, part) if i % 2 else part for i, part in enumerate(parts))


def _resource(name: str) -> str:
    return (resources.files("diffusion_runner.explain") / name).read_text(encoding="utf-8")


def _variables(theme: Theme) -> str:
    return " ".join(f"--{name}: {value};" for name, value in theme.items())


def plan_record(plan: ResolvedLayout) -> dict[str, Any]:
    """The numbers of a plan that the page's finder addresses by; equal layers share a kind."""
    kinds: dict[str, int] = {}
    layers = []
    for view in plan.layers:
        packed = view.key_bytes + view.value_bytes != view.shape[3]
        kind = json.dumps(
            {
                "shape": view.shape,
                "strides": view.strides,
                "ratio": view.blocks_per_manager_block,
                "key": -1 if packed else view.key_bytes,
            }
        )
        number = kinds.setdefault(kind, len(kinds))
        layers.append([view.name, view.group, view.offset, number])
    return {
        "layout": plan.layout.name,
        "size": plan.size_bytes,
        "groups": len(plan.groups),
        "null_block": plan.null_block,
        "layers": layers,
        "kinds": [json.loads(kind) for kind in kinds],
    }


def _table(explained: Explained) -> str:
    found = [e for e in explained.entries if e.figures is not None]
    names = "".join(f"<th>{e.variant.layout.name}</th>" for e in found)
    rows = []
    for line in zip(*(e.figures for e in found if e.figures is not None)):
        best = min(figure.count for figure in line)
        cells = "".join(
            f"<td{_best(figure.count == best, line)}>{figure.count:,} "
            f'<span class="muted">× {human_bytes(figure.longest)}</span></td>'
            for figure in line
        )
        rows.append(f"<tr><td>{escape(line[0].title)}</td>{cells}</tr>")
    padding = "".join(
        f"<td>{human_bytes(e.figures.padding.unused)}</td>" for e in found if e.figures
    )
    rows.append(f"<tr><td>bytes wasted on padding</td>{padding}</tr>")
    return f"<table><thead><tr><th></th>{names}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _best(is_best: bool, line: tuple[Any, ...]) -> str:
    some_worse = len({figure.count for figure in line}) > 1
    return ' class="best"' if is_best and some_worse else ""


def _notes(explained: Explained) -> str:
    refused = [e.variant for e in explained.entries if e.variant.refusal]
    lines = "".join(f'<p class="muted">{escape(v.refusal or "")}</p>' for v in refused)
    return f"<h2>Refused</h2>{lines}" if refused else ""
