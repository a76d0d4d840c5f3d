"""The command line: the ``meshtron`` program, and what train.py calls.

Commands import what they need when they run, so that ``meshtron schema`` or a typing mistake does not wait for torch.
"""

import json
import logging
import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from meshtron import __version__, ckpt
from meshtron.data import cli as data_cli
from meshtron.errors import MeshtronError
from meshtron.generate import cli as generate_cli
from meshtron.hf import cli as hf_cli
from meshtron.launch import reported_errors
from meshtron.recipe import Recipe, load_recipe, recipe_schema

# click's error for a wrong command line; newer typers carry a copy of click, so it is found through typer.
_UsageError: Any = typer.BadParameter.__bases__[0]

app = typer.Typer(
    name="meshtron",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

RecipePath = Annotated[Path, typer.Argument(metavar="RECIPE", help="A TOML recipe.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Changes, as in parallel.tp=2.", show_default=False),
]


def main() -> None:
    """The ``meshtron`` program; exits with status 0 only when all that was asked for was done."""
    _run(app, "meshtron")


def generate_main() -> None:
    """Body of generate.py: ``CHECKPOINT --prompt TEXT [key=value ...]``, as ``meshtron generate``."""
    _run(_program(generate_cli.generate), "generate.py")


def train_main() -> None:
    """Body of train.py: ``RECIPE.toml [section.key=value ...]``, as ``meshtron train``."""
    _run(_program(train), "train.py")


def _program(command: Callable[..., None]) -> typer.Typer:
    program = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    program.command()(command)
    return program


def _run(program: typer.Typer, name: str) -> None:
    set_up_logging()
    sys.path.insert(0, os.getcwd())  # where a recipe's own model family is looked for, as with python -m
    with reported_errors():
        try:
            status = program(prog_name=name, standalone_mode=False)
        except _UsageError as error:
            message = error.format_message()
            if not message:  # no command was given, and the help has been printed
                sys.exit(2)
            command = error.ctx.command_path if error.ctx else name
            raise MeshtronError(f"{message} (see {command} --help)") from None
        except typer.Abort:
            status = 130
        sys.exit(status)


def set_up_logging() -> None:
    """Progress on stderr from rank 0, warnings from all ranks."""
    rank = os.environ.get("RANK", "0")
    logging.basicConfig(
        level=logging.INFO if rank == "0" else logging.WARNING,
        format="%(message)s" if rank == "0" else f"rank {rank}: %(message)s",
    )


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"meshtron {__version__}, torch {version('torch')}, Python {sys.version.split()[0]}")
        raise typer.Exit


@app.callback()
def options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print versions and exit.")
    ] = False,
) -> None:
    """3D-parallel pretraining of transformers."""


@app.command()
def train(recipe: RecipePath, overrides: Overrides = None) -> None:
    """Train a recipe; several ranks: torchrun --nproc-per-node N -m meshtron train RECIPE."""
    loaded = load_recipe(recipe, overrides or [])
    loaded.resolve(int(os.environ.get("WORLD_SIZE", "1")))  # a mistake is reported before torch is imported
    from meshtron import loop

    loop.train(loaded)


app.command()(data_cli.prepare)
app.command()(generate_cli.generate)
app.command("import-hf")(hf_cli.import_hf)
app.command("export-hf")(hf_cli.export_hf)
app.add_typer(data_cli.app, name="data")
app.add_typer(ckpt.app, name="ckpt")


@app.command()
def check(
    recipe: RecipePath,
    overrides: Overrides = None,
    world: Annotated[
        int | None, typer.Option(min=1, help="Ranks to check for. Default: the fewest that fit.", show_default=False)
    ] = None,
) -> None:
    """Check a recipe without starting anything; print its layout, batch arithmetic and size."""
    loaded = _load(recipe, overrides)
    parallel = loaded.parallel
    resolved = loaded.resolve(world or parallel.pp * parallel.tp * max(parallel.dp, 1))
    _print_summary(str(recipe), resolved)


def _load(path: Path, overrides: list[str] | None) -> Recipe:
    """A recipe with its model's sizes, wherever they come from."""
    loaded = load_recipe(path, overrides or [])
    if not loaded.model.from_hf:
        return loaded
    from meshtron.hf.recipe import fill_from_hf

    return fill_from_hf(loaded)


@app.command()
def schema() -> None:
    """Print the JSON schema of a recipe, for editors."""
    print(json.dumps(recipe_schema(), indent=2))


@app.command()
def parity(
    recipe: RecipePath,
    overrides: Overrides = None,
    layouts: Annotated[
        str, typer.Option(help="pp x dp x tp, separated by commas; the first is the reference.")
    ] = "1x1x1,1x1x2,1x2x1,2x1x1",
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of each run.")] = 3,
    dtype: Annotated[str, typer.Option(help="float64 tells mistakes from rounding; or float32.")] = "float64",
    schedules: Annotated[
        str, typer.Option(help="Pipeline schedules, separated by commas. Default: the recipe's.", show_default=False)
    ] = "",
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write all figures to this file.", show_default=False)
    ] = None,
) -> None:
    """Train a few steps at several layouts and compare losses, norms, every gradient and every weight."""
    from meshtron.comparison import compare_recipe, parse_variants, print_report

    loaded = _load(recipe, overrides)
    variants = parse_variants(layouts, schedules or loaded.parallel.schedule)
    report = compare_recipe(loaded, variants, steps=steps, dtype=dtype)
    print_report(report)
    if json_path is not None:
        json_path.write_text(json.dumps(report.as_dict(), indent=2), encoding="utf-8")
    if not report.equal:
        raise MeshtronError("the numbers depend on the layout; docs/parity.md says how to go on")


def _print_summary(name: str, recipe: Recipe) -> None:
    from rich.console import Console
    from rich.markup import escape

    from meshtron.estimate import estimate

    figures = estimate(recipe)
    parallel, training = recipe.parallel, recipe.training
    ranks = parallel.pp * parallel.dp * parallel.tp
    tokens = training.global_batch_size * training.seq_len
    pipeline = f", {parallel.schedule}, {parallel.stages_per_rank} stage(s) a rank" if parallel.pp > 1 else ""
    sequence = ", sequence parallel" if parallel.sequence_parallel and parallel.tp > 1 else ""
    memory = {
        f"{training.param_dtype} parameters ({figures.rank_parameters:,})": figures.parameter_bytes,
        "gradients": figures.gradient_bytes,
        f"optimizer state (zero = {parallel.zero})": figures.state_bytes,
    }
    rows = {
        "layout": [f"pp {parallel.pp} x dp {parallel.dp} x tp {parallel.tp}{pipeline}{sequence}"],
        "batch": [
            f"{training.global_batch_size} sequences of {training.seq_len:,} tokens = {tokens:,} tokens a step",
            f"{recipe.num_microbatches} micro-batches of {training.micro_batch_size} on each dp rank",
        ],
        "run": [f"{training.steps:,} steps = {recipe.num_tokens:,} tokens, into {recipe.run.dir}"],
        "data": _data_lines(recipe),
        "parameters": [
            f"{figures.num_parameters:>15,}  in all",
            *(f"{count:>15,}  {part}" for part, count in figures.parameters.items() if count),
        ],
        "memory": [
            f"{_size(sum(memory.values())):>15}  on the fullest rank; activations come on top",
            *(f"{_size(size):>15}  {part}" for part, size in memory.items()),
        ],
        "compute": [
            f"{figures.flops_per_token / 1e9:>15,.3f}  GFLOP a token, forward and backward"
            if figures.flops_per_token
            else "the model does not say (flops_per_token)"
        ],
    }
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{escape(name)} on {ranks} rank{'s' * (ranks != 1)}")
    for row, lines in rows.items():
        for index, line in enumerate(lines):
            console.print(f"[bold]{'' if index else row:<12}[/bold]{escape(line)}")


def _data_lines(recipe: Recipe) -> list[str]:
    from meshtron.feed import describe_stage, missing_data

    starts = [stage.start_step for stage in recipe.data_stages]
    stages = [
        f"from step {start + 1:,}: {describe_stage(recipe, start)}"
        + " (behind the last step)" * (start >= recipe.training.steps)
        for start in starts
    ]
    missing = missing_data(recipe, validation=bool(recipe.validation.interval))
    return stages + [f"not there in {Path.cwd()}: {path}" for path in missing]


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB" if num_bytes >= 2**28 else f"{num_bytes / 2**20:,.2f} MiB"
