"""``meshtron import-hf`` and ``meshtron export-hf``."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Dtype(StrEnum):
    """Types of exported tensors."""

    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


def import_hf(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A Hugging Face folder.", show_default=False)],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to create.", show_default=False)],
) -> None:
    """Turn a Hugging Face folder into a checkpoint that any layout loads."""
    from meshtron.hf import convert

    print(convert.import_hf(folder, out))


def export_hf(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT", help="A step folder, or a run's folder (its newest step).", show_default=False
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to create.", show_default=False)],
    dtype: Annotated[
        Dtype | None,
        typer.Option(
            help="Type of all tensors. Default: the run's param_dtype, or the types that were imported.",
            show_default=False,
        ),
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Largest file, as in 5GB or 500MB.")] = "5GB",
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="A tokenizer.json or its folder. Default: the one beside the checkpoint, else tokenizer.path.",
            show_default=False,
        ),
    ] = None,
    no_tokenizer: Annotated[bool, typer.Option("--no-tokenizer", help="Write no tokenizer.")] = False,
) -> None:
    """Write a checkpoint's weights as a Hugging Face folder that opens offline."""
    from meshtron.errors import RecipeError
    from meshtron.hf import convert
    from meshtron.hf.weights import parse_size

    if tokenizer is not None and no_tokenizer:
        raise RecipeError("--tokenizer and --no-tokenizer contradict each other: give one of them")
    size = parse_size(max_shard_size)
    made = convert.export_hf(
        checkpoint,
        out,
        dtype=dtype and dtype.value,
        max_shard_bytes=size,
        tokenizer=tokenizer,
        with_tokenizer=not no_tokenizer,
    )
    print(made)
