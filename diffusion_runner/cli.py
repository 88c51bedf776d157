"""The command line: ``pagestride run | compare | score | layouts | explain | advise | doctor``.

Commands only parse, call and print. Anything wrong with the input is one line on standard
error and exit status 2, before anything is written.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from diffusion_runner import settings as defaults
from diffusion_runner.errors import RunError
from diffusion_runner.explain.commands import register as register_explain
from diffusion_runner.model.schedule import DEFAULT_GUIDANCE, DEFAULT_STEPS
from layout_core import KVCacheLayout, LayoutError

if TYPE_CHECKING:
    from diffusion_runner.settings import RunSettings

BACKEND_VARIABLE = "PAGESTRIDE_BACKEND"
CACHE_VARIABLE = "PAGESTRIDE_COMPILATION_CACHE"
EXIT_DIFFERENT = 1
EXIT_BAD_INPUT = 2

app = typer.Typer(
    name="pagestride",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    help="A paged KV cache for diffusion transformers: one layout core, two engines.\n\n"
    "Try `pagestride run --backend torch_cuda --prompt 'a handwritten seven' --out seven.png`, "
    "then the same with `--backend jax_gpu`: the pictures agree.",
)

_PIPE_WIDTH = 120  # where output is no terminal, tables must not be cut to 80 columns


def _console(*, stderr: bool = False) -> Console:
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=_PIPE_WIDTH)


_out = _console()
_err = _console(stderr=True)

BackendOption = Annotated[
    str | None,
    typer.Option(
        "--backend",
        help=f"The engine: torch_cuda or jax_gpu. Without it, ${BACKEND_VARIABLE}; "
        "there is no default.",
        show_default=False,
    ),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(help="cpu or cuda. Without it the engine chooses; a GPU asked for must be there."),
]
LayoutOption = Annotated[
    str | None,
    typer.Option(
        "--layout",
        help="The physical layout to pin, see `pagestride layouts`. NHD and HND are aliases of "
        "LBNHC and LBHNC. Without it the backend's own: LBNHC for both engines.",
        show_default=False,
    ),
]
PromptOption = Annotated[
    list[str] | None,
    typer.Option(
        "--prompt",
        help="What to draw, in the words that the model knows: 'a handwritten seven', 'the digit "
        "7', 'draw a seven', '7'. Give it several times for several. Without it, the ten digits.",
        show_default=False,
    ),
]
StepsOption = Annotated[int, typer.Option(help="Denoise steps; the first also writes the prompt.")]
GuidanceOption = Annotated[
    float,
    typer.Option(
        help="Classifier-free guidance. More than 1 runs two rows for each picture (the prompt "
        "and the empty prompt), at most 1 runs one."
    ),
]
SeedOption = Annotated[int, typer.Option(help="Seed of the starting noise.")]
BlockSizeOption = Annotated[int, typer.Option(help="Tokens of a block.")]
JsonOption = Annotated[
    Path | None, typer.Option("--json", help="Also write the figures as JSON.", dir_okay=False)
]


@app.command()
def run(
    out: Annotated[Path, typer.Option(help="The PNG to write.", dir_okay=False)],
    backend: BackendOption = None,
    device: DeviceOption = None,
    layout: LayoutOption = None,
    prompt: PromptOption = None,
    count: Annotated[int, typer.Option(help="Pictures of each prompt.")] = 4,
    steps: StepsOption = DEFAULT_STEPS,
    guidance: GuidanceOption = DEFAULT_GUIDANCE,
    seed: SeedOption = defaults.DEFAULT_SEED,
    block_size: BlockSizeOption = defaults.DEFAULT_BLOCK_SIZE,
    batch_size: Annotated[
        int, typer.Option(help="Pictures that are drawn together, in one batch of rows.")
    ] = defaults.DEFAULT_BATCH_SIZE,
    kv_dtype: Annotated[
        str, typer.Option(help=f"Element type of the pool: {', '.join(defaults.KV_DTYPES)}.")
    ] = "float32",
    pool_blocks: Annotated[
        int | None,
        typer.Option(
            help="Blocks of the pool, the null block included. Without it the pool fits the batch.",
            show_default=False,
        ),
    ] = None,
    prefix_reuse: Annotated[
        bool,
        typer.Option(
            "--prefix-reuse/--no-prefix-reuse",
            help="Read the prompt's K/V from its pages after the first step, or recompute it at "
            "every step. The pictures are the same.",
        ),
    ] = True,
    prefix_caching: Annotated[
        bool,
        typer.Option(
            "--prefix-caching/--no-prefix-caching",
            help="Share full blocks between prompts that begin alike.",
        ),
    ] = True,
    compilation_cache: Annotated[
        Path | None,
        typer.Option(
            help="Keep compiled programs in this folder, so that the next process compiles "
            f"nothing; jax_gpu only. Without it, ${CACHE_VARIABLE}; without both, no cache.",
            file_okay=False,
            show_default=False,
        ),
    ] = None,
    json: JsonOption = None,
) -> None:
    """Draw digits with one engine."""
    from diffusion_runner.report import print_run, write_run_json
    from diffusion_runner.run import generate, save_pictures

    settings = _settings(
        prompts=prompt,
        count=count,
        backend=_backend(backend),
        device=device,
        layout=layout,
        steps=steps,
        guidance=guidance,
        seed=seed,
        block_size=block_size,
        batch_size=batch_size,
        prefix_reuse=prefix_reuse,
        prefix_caching=prefix_caching,
        kv_dtype=kv_dtype,
        pool_blocks=pool_blocks,
        compilation_cache=compilation_cache or _cache_folder(_backend(backend)),
    )
    result = generate(settings, console=_err)
    save_pictures(result, out)
    if json is not None:
        write_run_json(result, json)
    print_run(result, out, console=_out)


@app.command()
def compare(
    out: Annotated[
        Path | None, typer.Option(help="A PNG with one line of pictures for each run.")
    ] = None,
    device: DeviceOption = None,
    prompt: PromptOption = None,
    steps: StepsOption = DEFAULT_STEPS,
    guidance: GuidanceOption = DEFAULT_GUIDANCE,
    seed: SeedOption = defaults.DEFAULT_SEED,
    block_size: BlockSizeOption = defaults.DEFAULT_BLOCK_SIZE,
    json: JsonOption = None,
) -> None:
    """Draw the same digits with both engines in all six layouts, and compare them.

    Exits with status 1 when a pixel differs by more than the written tolerance.
    """
    from diffusion_runner.compare import compare_all, save_comparison
    from diffusion_runner.report import print_comparison, write_comparison_json

    base = _settings(
        prompts=prompt,
        device=device,
        steps=steps,
        guidance=guidance,
        seed=seed,
        block_size=block_size,
    )
    comparison = compare_all(base, console=_err)
    if out is not None:
        save_comparison(comparison, out)
    if json is not None:
        write_comparison_json(comparison, json)
    print_comparison(comparison, out, console=_out)
    if not comparison.agrees:
        raise typer.Exit(EXIT_DIFFERENT)


@app.command()
def score(
    backend: BackendOption = None,
    device: DeviceOption = None,
    layout: LayoutOption = None,
    count: Annotated[int, typer.Option(help="Digits to draw, shared over the ten prompts.")] = 500,
    steps: StepsOption = DEFAULT_STEPS,
    guidance: GuidanceOption = DEFAULT_GUIDANCE,
    seed: SeedOption = defaults.DEFAULT_SEED,
    json: JsonOption = None,
) -> None:
    """Let an independent classifier read generated digits.

    A support vector machine trained on the real digits says how many of the generated ones show
    what the prompt asked for. Exits with status 1 below 95 %.
    """
    from diffusion_runner.report import print_score, write_score_json
    from diffusion_runner.scoring import score_engine

    settings = _settings(
        prompts=None,
        count=-(-count // 10),
        backend=_backend(backend or "torch_cuda"),
        device=device,
        layout=layout,
        steps=steps,
        guidance=guidance,
        seed=seed,
        batch_size=50,
    )
    result = score_engine(settings, count, console=_err)
    if json is not None:
        write_score_json(result, json)
    print_score(result, console=_out)
    if not result.passes:
        raise typer.Exit(EXIT_DIFFERENT)


@app.command()
def layouts() -> None:
    """Show the six layouts and what each is good for."""
    from diffusion_runner.report import print_layouts

    print_layouts(console=_out)


@app.command()
def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print JSON, for a bug report.")] = False,
    queries: Annotated[
        int | None,
        typer.Option(
            help="Explain instead which kernel torch_cuda takes for rows of so many queries.",
            show_default=False,
        ),
    ] = None,
    keys: Annotated[
        int | None, typer.Option(help="Keys of each row; as many as queries without it.")
    ] = None,
    rows: Annotated[int, typer.Option(help="Rows of the step.")] = 1,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 16,
    kv_heads: Annotated[int, typer.Option(help="KV heads.")] = 8,
    head_size: Annotated[int, typer.Option(help="Elements of a head.")] = 128,
    block_size: BlockSizeOption = 64,
    layout: LayoutOption = None,
    dtype: Annotated[str, typer.Option(help="Element type of the pool.")] = "bfloat16",
    causal: Annotated[bool, typer.Option("--causal", help="Causal rows.")] = False,
    bucket: Annotated[
        bool, typer.Option("--bucket", help="Padded to fixed shapes, as for a CUDA graph.")
    ] = False,
    device: DeviceOption = None,
) -> None:
    """Show which engines, kernels, devices and versions are there, and what to install.

    With `--queries`: which kernel serves such a step, and why not the others.
    """
    from diffusion_runner.doctor import examine, explain_kernels
    from diffusion_runner.report import print_choice, print_doctor

    if queries is None:
        print_doctor(examine(), as_json=json, console=_out)
        return
    choice = explain_kernels(
        device,
        dtype=dtype,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        block_size=block_size,
        layout=layout,
        rows=rows,
        queries=queries,
        keys=keys,
        causal=causal,
        bucket=bucket,
    )
    print_choice(choice, as_json=json, console=_out)


@app.command()
def bench(
    suites: Annotated[
        list[str] | None,
        typer.Argument(
            help="core, attention, write, copy, denoise, memory, growth. Without any, all of them.",
            show_default=False,
        ),
    ] = None,
    backend: Annotated[
        list[str] | None,
        typer.Option("--backend", help="An engine to time; may be repeated. Without it, both."),
    ] = None,
    device: DeviceOption = None,
    layout: Annotated[
        list[str] | None,
        typer.Option("--layout", help="A layout to time; may be repeated. Without it, all six."),
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option("--dtype", help="float32, float16 or bfloat16; may be repeated."),
    ] = None,
    threads: Annotated[int, typer.Option(help="Threads of torch's CPU kernels.")] = 2,
    tables: Annotated[
        str, typer.Option(help="Block ids of a row: shuffled (as they come to be) or ascending.")
    ] = "shuffled",
    quick: Annotated[
        bool, typer.Option("--quick", help="Small sizes, to see that it runs; nothing to publish.")
    ] = False,
    json: JsonOption = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Also draw the figures as a PNG.", dir_okay=False)
    ] = None,
) -> None:
    """Time both engines beside named peers, in one process, as ratios.

    Rounds are interleaved: a ratio compares times of the same round, so that a machine that slows
    down slows both sides. Losses are shown beside wins.
    """
    from diffusion_runner.bench import record
    from diffusion_runner.bench.options import Options, make_options, open_bench
    from diffusion_runner.bench.suites import check_suites, measure

    names = check_suites(suites or ())
    defaults_of = Options()
    options = make_options(
        engines=tuple(backend or defaults_of.engines),
        device=device,
        dtypes=tuple(dtype or defaults_of.dtypes),
        layouts=tuple(layout or defaults_of.layouts),
        threads=threads,
        tables=tables,
        quick=quick,
    )
    results = measure(open_bench(options), names, report=lambda name: _err.print(f"suite {name}"))
    record.show(results, _out)
    if json is not None:
        record.save(results, json)
    if plot is not None:
        from diffusion_runner.bench.plots import save_plot

        save_plot(results, plot)


register_explain(app, _out)


def _cache_folder(backend: str) -> Path | None:
    """The folder that the environment names, for a backend that has a use for it."""
    folder = os.environ.get(CACHE_VARIABLE)
    return Path(folder) if folder and backend == defaults.COMPILING_BACKEND else None


def _backend(flag: str | None) -> str:
    name = flag or os.environ.get(BACKEND_VARIABLE)
    if name:
        return name
    import backends

    raise RunError(
        f"backend: expected --backend or ${BACKEND_VARIABLE} with one of "
        f"{', '.join(backends.names())}, got neither"
    )


def _settings(**values: Any) -> RunSettings:
    """Settings from flags; names become layouts and dtypes, and the default prompts are added."""
    from diffusion_runner.model.text import digit_prompt
    from layout_core import DType

    prompts = values.pop("prompts")
    values["prompts"] = tuple(prompts) if prompts else tuple(digit_prompt(d) for d in range(10))
    if values.get("layout") is not None:
        values["layout"] = KVCacheLayout.parse(values["layout"])
    if "kv_dtype" in values:
        values["kv_dtype"] = DType.parse(values["kv_dtype"])
    return defaults.RunSettings(**values)


def main() -> None:
    """Entry point of the ``pagestride`` command."""
    try:
        app()
    except (LayoutError, RunError) as error:
        # one line, whatever the terminal's width: a message is meant to be searched for
        print(f"pagestride: {error}", file=sys.stderr)
        raise SystemExit(EXIT_BAD_INPUT) from None
