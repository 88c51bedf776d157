"""What ``pagestride explain`` and ``advise`` print, and the JSON that they write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from diffusion_runner.advise import Advice, Use
from diffusion_runner.explain.build import Explained
from diffusion_runner.explain.diff import Difference
from diffusion_runner.explain.figures import human_bytes
from diffusion_runner.explain.locate import CellQuery, byte_record, describe_byte, find_cell
from diffusion_runner.explain.picture import summary


def record(
    explained: Explained,
    *,
    cell: CellQuery | None,
    address: int | None,
    found: Difference | None,
) -> dict[str, Any]:
    """Everything that is printed, as JSON carries it."""
    layouts = []
    for entry in explained.entries:
        variant = entry.variant
        item: dict[str, Any] = {"layout": variant.layout.name}
        if variant.plan is None or entry.figures is None:
            layouts.append({**item, "refused": variant.refusal})
            continue
        padding = entry.figures.padding
        item["size_bytes"] = variant.plan.size_bytes
        item["runs"] = {figure.key: figure.as_dict() for figure in entry.figures}
        item["padding_bytes"] = padding.unused
        item["padding_bytes_by_group"] = list(padding.by_group)
        if cell is not None:
            item["cell"] = find_cell(variant.plan, cell).as_dict()
        if address is not None:
            item["address"] = byte_record(variant.plan, address)
        layouts.append(item)
    out: dict[str, Any] = {"cache": summary(explained.plans[0])[0], "layouts": layouts}
    if cell is not None:
        out["cell"] = cell.key
    if found is not None:
        out["diff"] = found.as_dict()
    return out


def show(
    explained: Explained,
    *,
    cell: CellQuery | None,
    address: int | None,
    found: Difference | None,
    console: Console,
) -> None:
    """The figures as a table; where a cell lies; who owns a byte; where two layouts disagree."""
    console.print(escape(summary(explained.plans[0])[0]), style="bold", soft_wrap=True)
    console.print(_figures(explained))
    for entry in explained.entries:
        if entry.variant.refusal:
            console.print(f"[yellow]refused[/] {escape(entry.variant.refusal)}", soft_wrap=True)
    if cell is not None:
        console.print(_cell_table(explained, cell))
    if address is not None:
        console.print(f"byte {address:#x} ({address:,})", style="bold")
        for plan in explained.plans:
            text = escape(describe_byte(plan, address))
            console.print(f"{plan.layout.name}  {text}", soft_wrap=True)
    if found is not None:
        _show_difference(found, console)


def _figures(explained: Explained) -> Table:
    table = Table(title="contiguous runs, and the size of the longest")
    table.add_column("")
    entries = [entry for entry in explained.entries if entry.figures is not None]
    for entry in entries:
        table.add_column(entry.variant.layout.name, justify="right")
    for line in zip(*(entry.figures for entry in entries if entry.figures is not None)):
        best = min(figure.count for figure in line)
        some_worse = len({figure.count for figure in line}) > 1
        table.add_row(
            line[0].title,
            *(
                f"[green]{f.count:,}[/]\n[dim]{human_bytes(f.longest)}[/]"
                if f.count == best and some_worse
                else f"{f.count:,}\n[dim]{human_bytes(f.longest)}[/]"
                for f in line
            ),
        )
    table.add_row(
        "bytes wasted on padding",
        *(human_bytes(e.figures.padding.unused) for e in entries if e.figures is not None),
    )
    return table


def _cell_table(explained: Explained, cell: CellQuery) -> Table:
    place = find_cell(explained.plans[0], cell)
    null = ", in the null block: held back, never written" if place.null else ""
    table = Table(
        title=f"layer {cell.layer} ({escape(place.name)}), block {cell.block}, head {cell.head}, "
        f"token {cell.token}{null}"
    )
    for heading in ("layout", "first byte", "V from", "past the last"):
        table.add_column(heading, justify="left" if heading == "layout" else "right")
    for plan in explained.plans:
        place = find_cell(plan, cell)
        table.add_row(
            plan.layout.name,
            f"{place.start:#x}",
            f"{place.start + place.key_bytes:#x}",
            f"{place.stop:#x}",
        )
    return table


def _show_difference(found: Difference, console: Console) -> None:
    first, second = found.first.layout.name, found.second.layout.name
    share = found.moved / found.cells
    console.print(
        f"{first} and {second}: {found.moved:,} of {found.cells:,} cells ({share:.0%}) lie "
        "elsewhere" + (", first these:" if found.examples else "; they are the same memory"),
        style="bold",
        soft_wrap=True,
    )
    if not found.examples:
        return
    table = Table()
    for heading in ("cell (l b h n)", first, second):
        table.add_column(heading, justify="left" if "cell" in heading else "right")
    for moved in found.examples:
        table.add_row(moved.cell.key, f"{moved.first:#x}", f"{moved.second:#x}")
    console.print(table)


_WHY = {
    Use.ATTENTION: "Between layouts the engines' own times differ little (README, Figures): runs "
    "count most where each is a copy of its own.",
    Use.OFFLOAD: "Each run is one copy between the device and the host.",
    Use.TRANSFER: "Each run is one descriptor or one message between workers.",
    Use.RESHARD: "Each rank takes its own heads, so a run ends wherever another rank's begin.",
}


def show_advice(advices: Sequence[Advice], cache: str, *, console: Console) -> None:
    """One ranked table for each use, with the reasons."""
    console.print(cache, style="bold", soft_wrap=True)
    for advice in advices:
        table = Table(title=f"{advice.use}: {advice.counted}")
        table.add_column("", justify="right")
        table.add_column("layout")
        table.add_column("runs", justify="right")
        table.add_column("why", overflow="fold")
        for item in advice.ranked:
            if item.place is None:
                table.add_row(
                    "-", f"[dim]{item.layout.name}[/]", "-", f"[dim]{escape(item.reason)}[/]"
                )
                continue
            name = f"[green]{item.layout.name}[/]" if item.place == 1 else item.layout.name
            table.add_row(str(item.place), name, f"{item.runs:,}", item.reason)
        console.print(table)
        ties = ", then ".join(f"{name}" for name in advice.ties)
        console.print(f"{_WHY[advice.use]} Equal counts are ordered by {ties}.", soft_wrap=True)
