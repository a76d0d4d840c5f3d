"""``meshtron prepare`` and ``meshtron data``."""

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshtron.data.documents import DEFAULT_EXCLUDE, DEFAULT_INCLUDE, Selection

if TYPE_CHECKING:
    from meshtron.data.prepare import PrepareOptions
    from meshtron.data.shards import Header

_LINE_INTERVAL_S = 10.0  # between lines of progress where no bar can be drawn


def prepare(
    sources: Annotated[
        list[str],
        typer.Argument(metavar="SOURCE...", help="Files, folders, globs, or hf:NAME[:SPLIT].", show_default=False),
    ],
    out: Annotated[Path, typer.Option(help="The new folder.", show_default=False)],
    tokenizer: Annotated[
        str | None, typer.Option(help="A tokenizer.json, or a folder with one.", show_default=False)
    ] = None,
    train_tokenizer: Annotated[
        int | None,
        typer.Option(help="Train a byte-level BPE with so many ids instead.", metavar="VOCAB", show_default=False),
    ] = None,
    text_key: Annotated[str, typer.Option(help="Where a row has its text.")] = "text",
    prompt_key: Annotated[
        str | None, typer.Option(help="Where a row has its prompt, which gets no loss.", show_default=False)
    ] = None,
    completion_key: Annotated[
        str | None, typer.Option(help="Where a row has its completion.", show_default=False)
    ] = None,
    val_fraction: Annotated[
        float, typer.Option(help="Part of the documents that goes to OUT/validation, chosen by hash.")
    ] = 0.0,
    eos_token: Annotated[
        str | None, typer.Option(help="Token behind every document. Default: the tokenizer's.", show_default=False)
    ] = None,
    bos_token: Annotated[
        str | None, typer.Option(help="Token before every document. Default: none.", show_default=False)
    ] = None,
    skip_bad: Annotated[int, typer.Option(min=0, help="Skip and count up to so many unreadable records.")] = 0,
    workers: Annotated[int, typer.Option(min=0, help="Processes; 0 for one a core.")] = 0,
    include: Annotated[
        list[str] | None,
        typer.Option(help=f"File names to read in folders. Default: {' '.join(DEFAULT_INCLUDE)}", show_default=False),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            help=f"File and folder names to leave out of folders. Default: {' '.join(DEFAULT_EXCLUDE)}",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Turn text into a folder of token shards, for data paths and tokenizer.path of a recipe."""
    from meshtron.data.prepare import PrepareOptions

    selection = Selection()
    if include:
        selection = replace(selection, include=tuple(include))
    if exclude:
        selection = replace(selection, exclude=tuple(exclude))
    options = PrepareOptions(
        tokenizer=tokenizer,
        train_tokenizer=train_tokenizer,
        text_key=text_key,
        prompt_key=prompt_key,
        completion_key=completion_key,
        eos_token=eos_token,
        bos_token=bos_token,
        val_fraction=val_fraction,
        skip_bad=skip_bad,
        workers=workers,
        selection=selection,
    )
    _run(sources, out, options)


def _run(sources: list[str], out: Path, options: "PrepareOptions") -> None:
    """Prepare with a progress bar, and say what came out."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from meshtron.data.prepare import Progress as State
    from meshtron.data.prepare import prepare_corpus

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%  {task.fields[text]}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task("reading", total=None, text="")
        last_line = time.monotonic()

        def watch(state: State) -> None:
            nonlocal last_line
            text = f"{state.text_bytes / 1e6:,.1f} MB, {state.num_tokens:,} tokens"
            if not console.is_terminal and time.monotonic() - last_line > _LINE_INTERVAL_S:
                console.print(f"{state.phase}: {text}", markup=False)
                last_line = time.monotonic()
            bar.update(
                task, description=state.phase, total=state.total_bytes or None, completed=state.done_bytes, text=text
            )

        header = prepare_corpus(sources, out, options, watch)
    for line in _summary(header, out, options.selection):
        console.print(line, markup=False)


def _summary(header: "Header", out: Path, selection: Selection) -> list[str]:
    from meshtron.data.shards import Header

    counts = header.counts
    lines = [f"{out}: {header.num_documents:,} documents, {header.num_tokens:,} tokens ({header.dtype})"]
    validation = out / "validation"
    if validation.exists():
        held_out = Header.read(validation)
        lines.append(f"{validation}: {held_out.num_documents:,} documents, {held_out.num_tokens:,} tokens")
    left_out = {
        "without text": counts["empty"],
        "without the key": counts["missing"],
        "skipped as unreadable": counts["bad"],
        f"files left out by name ({' '.join(selection.exclude)})": len(selection.left_out),
    }
    return lines + [f"{number:,} {what}" for what, number in left_out.items() if number]


app = typer.Typer(help="Look into folders of tokens.", no_args_is_help=True)

TokenPath = Annotated[Path, typer.Argument(metavar="DIR", help="A folder of tokens.", show_default=False)]


@app.command()
def show(
    path: TokenPath,
    samples: Annotated[int, typer.Option(min=0, help="Documents to print.")] = 3,
    seed: Annotated[int, typer.Option(help="Picks the documents.")] = 0,
) -> None:
    """Print counts, document lengths and a few documents."""
    from meshtron.data.formats import open_tokens
    from meshtron.data.inspect import length_histogram, sample_documents
    from meshtron.data.shards import HEADER, Header

    tokens = open_tokens(path)
    print(f"{path}: {tokens.num_tokens:,} tokens, {len(tokens.document_ends):,} documents, {tokens.dtype.name}")
    if (path / HEADER).is_file():
        header = Header.read(path)
        print(f"vocabulary {header.vocab_size:,}, separator {header.eos_id}, tokenizer {header.tokenizer_hash[:16]}")
        print(f"from {', '.join(header.sources)}")
        print(", ".join(f"{count:,} {what}" for what, count in header.counts.items()))
    bins = length_histogram(tokens)
    most = max((part.num_documents for part in bins), default=1)
    if bins:
        print(f"\n{'tokens':>21}  {'documents':>12}")
    for part in bins:
        bar = "█" * round(40 * part.num_documents / most)
        print(f"{part.low:>9,} to {part.high - 1:>8,}  {part.num_documents:>12,}  {bar}")
    for number, text in sample_documents(path, samples, seed):
        print(f"\n--- document {number}\n{text}")


@app.command()
def verify(path: TokenPath) -> None:
    """Check sizes, ids, separators and index; exits with status 1 and the place when something is wrong."""
    from meshtron.data.inspect import verify as verify_tokens

    folders = [path, path / "validation"]
    for folder in folders[: 1 + folders[1].is_dir()]:
        for line in verify_tokens(folder):
            print(f"{folder}: {line}")
