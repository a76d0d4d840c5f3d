"""The command line of generate.py, which is also ``meshtron generate``."""

import sys
from pathlib import Path
from typing import Annotated

import typer


def generate(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT",
            help="A step folder, a run's folder (its newest step), or a Hugging Face folder.",
            show_default=False,
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="As in parallel.tp=2, run.device=cpu.", show_default=False),
    ] = None,
    prompt: Annotated[
        list[str] | None, typer.Option(help="Text to continue; may be given several times.", show_default=False)
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens added to a prompt.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Sample among the k likeliest tokens; 0 for all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Sample among the likeliest tokens of this total probability.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the samples.")] = 0,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends a completion; may be repeated.", show_default=False)
    ] = None,
    stream: Annotated[bool, typer.Option("--stream", help="Write the completion as it grows.")] = False,
) -> None:
    """Continue prompts and write the completions, and nothing else, to stdout."""
    from meshtron.errors import RecipeError
    from meshtron.generate.program import Request, complete
    from meshtron.generate.sampling import Sampling

    if not prompt:
        raise RecipeError("--prompt is missing: give the text to continue")
    request = Request(
        checkpoint=checkpoint,
        prompts=prompt,
        max_new_tokens=max_new_tokens,
        sampling=Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed),
        stop=stop or (),
        stream=stream,
    )

    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    complete(request, overrides or [], write)
