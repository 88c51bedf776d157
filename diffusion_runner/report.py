"""What the commands print, and the JSON that they write."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from diffusion_runner.compare import Comparison
from diffusion_runner.doctor import Report
from diffusion_runner.run import RunResult
from diffusion_runner.scoring import REQUIRED_AGREEMENT, EngineScore
from diffusion_runner.settings import PICTURE_TOLERANCE
from layout_core import KVCacheLayout

if TYPE_CHECKING:
    from backends.torch_cuda.choice import Choice


def run_record(result: RunResult) -> dict[str, Any]:
    """The figures of a run as JSON carries them."""
    settings = result.settings
    return {
        "backend": settings.backend,
        "layout": result.layout.name,
        "device": result.device,
        "kernel": result.kernel,
        "seconds": result.seconds,
        "compile_seconds": result.compile_seconds,
        "pool_bytes": result.pool_bytes,
        "num_blocks": result.num_blocks,
        "block_size": settings.block_size,
        "kv_dtype": settings.kv_dtype.name,
        "steps": settings.steps,
        "guidance": settings.guidance,
        "seed": settings.seed,
        "images": settings.num_images,
        "rows_per_request": result.rows_per_request,
        "prefix_reuse": settings.prefix_reuse,
        "query_tokens": result.query_tokens,
        "query_tokens_without_reuse": result.query_tokens_without_reuse,
        "prefix_tokens": result.prefix_tokens,
        "prefix_hit_tokens": result.prefix_hit_tokens,
    }


def print_run(result: RunResult, out: Path, *, console: Console) -> None:
    """A few lines: what ran, what it computed, where the picture lies."""
    settings = result.settings
    saved = 1 - result.query_tokens / result.query_tokens_without_reuse
    table = Table.grid(padding=(0, 2))
    table.add_row("engine", f"{settings.backend} on {result.device}, kernel {result.kernel}")
    table.add_row(
        "pool",
        f"{result.layout.name}, {result.num_blocks} blocks of {settings.block_size} tokens, "
        f"{result.pool_bytes:,} bytes, {settings.kv_dtype}",
    )
    table.add_row(
        "pictures",
        f"{settings.num_images}, {result.rows_per_request} row(s) each, {settings.steps} steps, "
        f"guidance {settings.guidance:g}, seed {settings.seed}",
    )
    table.add_row(
        "query tokens",
        f"{result.query_tokens:,} computed; {result.query_tokens_without_reuse:,} without prefix "
        f"reuse ({saved:.0%} saved)",
    )
    table.add_row(
        "prefix hits",
        f"{result.prefix_hit_tokens:,} of {result.prefix_tokens:,} prompt tokens came from pages "
        "that an earlier request had written",
    )
    compiled = f" and {result.compile_seconds:.2f} s compiling" if result.compile_seconds else ""
    table.add_row("time", f"{result.seconds:.2f} s denoising{compiled}")
    table.add_row("picture", str(out))
    console.print(table)


def write_run_json(result: RunResult, path: Path) -> None:
    _write(path, run_record(result))


def print_comparison(comparison: Comparison, out: Path | None, *, console: Console) -> None:
    """The table of runs, and the verdict."""
    table = Table(title="the same noise through both engines, in all six layouts")
    for heading, justify in (
        ("backend", "left"),
        ("layout", "left"),
        ("device", "left"),
        ("kernel", "left"),
        ("seconds", "right"),
        ("compiling", "right"),
        ("pool bytes", "right"),
        ("max |diff|", "right"),
        ("", "left"),
    ):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    for run in comparison.runs:
        result = run.result
        table.add_row(
            result.settings.backend,
            result.layout.name,
            result.device,
            result.kernel,
            f"{result.seconds:.2f}",
            f"{result.compile_seconds:.2f}",
            f"{result.pool_bytes:,}",
            f"{run.max_abs_diff:.2e}",
            "[green]same[/]" if run.agrees else "[red]differs[/]",
        )
    console.print(table)
    differing = sum(not run.agrees for run in comparison.runs)
    verdict = (
        f"{differing} of {len(comparison.runs)} runs differ from the first by more than"
        if differing
        else f"all {len(comparison.runs)} runs agree within"
    )
    console.print(f"{verdict} {PICTURE_TOLERANCE:g} (pixels in \\[0, 1])")
    if out is not None:
        console.print(f"pictures: {out}")


def write_comparison_json(comparison: Comparison, path: Path) -> None:
    """``{"tolerance": ..., "runs": [...]}``; each run with its ``max_abs_diff``."""
    runs = [{**run_record(run.result), "max_abs_diff": run.max_abs_diff} for run in comparison.runs]
    _write(path, {"tolerance": PICTURE_TOLERANCE, "agrees": comparison.agrees, "runs": runs})


def print_score(score: EngineScore, *, console: Console) -> None:
    """Agreement, digit by digit."""
    table = Table(title=f"read by the classifier, {score.result.settings.backend}")
    table.add_column("digit")
    table.add_column("agreed", justify="right")
    for digit, (agreed, drawn) in enumerate(score.by_digit):
        table.add_row(str(digit), f"{agreed} of {drawn}")
    console.print(table)
    console.print(
        f"{score.agreed} of {score.count} generated digits ({score.agreement:.1%}) are read as "
        f"the prompt says; at least {REQUIRED_AGREEMENT:.0%} are required"
    )
    console.print(
        f"the classifier itself reads {score.held_out_accuracy:.1%} of held-out real digits"
    )


def write_score_json(score: EngineScore, path: Path) -> None:
    _write(
        path,
        {
            **run_record(score.result),
            "count": score.count,
            "agreed": score.agreed,
            "agreement": score.agreement,
            "classifier_held_out_accuracy": score.held_out_accuracy,
            "by_digit": [list(pair) for pair in score.by_digit],
        },
    )


def print_layouts(*, console: Console) -> None:
    """The six layouts with their properties, from the enum itself."""
    table = Table(title="KV cache layouts, outermost axis first (C is the K ‖ V of one token)")
    for heading in (
        "layout",
        "alias",
        "layer\ncompact",
        "block\noutermost",
        "block\ncompact",
        "block\ncontiguous",
        "runs of one block\nover all layers",
    ):
        table.add_column(heading)
    from layout_core import LAYOUT_ALIASES

    aliases = {canonical: alias for alias, canonical in LAYOUT_ALIASES.items()}
    for layout in KVCacheLayout:
        flags = (
            layout.is_layer_compact,
            layout.is_block_outermost,
            layout.is_block_compact,
            layout.is_block_contiguous,
        )
        runs = "1" if layout.is_block_outermost else "L" if layout.is_block_compact else "L·H"
        table.add_row(
            layout.name,
            aliases.get(layout.name, ""),
            *("yes" if flag else "-" for flag in flags),
            runs,
        )
    console.print(table)
    console.print(
        "L layers, B blocks, H KV heads, N tokens of a block, C bytes of one head and token.\n"
        "layer compact: a layer is one region. block outermost: a block of all layers is one "
        "region (offload, transfer).\nblock compact: a page is one run. block contiguous: that "
        "run goes head by head."
    )


def print_doctor(report: Report, *, as_json: bool, console: Console) -> None:
    """Versions and engines; or the same as JSON, for a bug report."""
    if as_json:
        print(json.dumps(report.as_dict(), indent=2))
        return
    console.print(f"Python {report.python} on {report.platform} ({report.processor})")
    versions = Table(title="packages")
    versions.add_column("package")
    versions.add_column("version")
    for name, version in report.packages:
        versions.add_row(name, version or "[dim]not installed[/]")
    console.print(versions)
    engines = Table(title="engines")
    for heading in ("backend", "device", "state", "kernels"):
        engines.add_column(heading)
    for entry in report.backends:
        state = "[green]works[/]" if entry.works else "[yellow]cannot run[/]"
        engines.add_row(entry.backend, entry.device, state, ", ".join(entry.kernels))
    console.print(engines)
    for entry in report.backends:
        if entry.problem is not None:
            console.print(f"{entry.backend} on {entry.device}: {entry.problem}", soft_wrap=True)


def print_choice(choice: Choice, *, as_json: bool, console: Console) -> None:
    """Which kernel serves a step, and why not the others."""
    if as_json:
        print(json.dumps(asdict(choice), indent=2))
        return
    console.print(f"torch_cuda on {choice.device}: kernel [bold]{choice.kernel}[/]")
    if choice.assumed is not None:
        major, minor = choice.assumed.capability
        console.print(
            f"no CUDA device is here; one of compute capability {major}.{minor} with "
            f"{choice.assumed.num_sms} processors was assumed",
            soft_wrap=True,
        )
    table = Table()
    table.add_column("kernel")
    table.add_column("why not")
    for name, reason in choice.kernels:
        table.add_row(name, "[green]taken[/]" if reason is None else escape(reason))
    console.print(table)
    for note in choice.notes:
        console.print(escape(note), soft_wrap=True)


def _write(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
