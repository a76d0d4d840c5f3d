"""What generate.py does: a checkpoint and prompts in, completions out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshtron import world
from meshtron.build import layout_of
from meshtron.errors import RecipeError
from meshtron.generate.engine import check_prompts, generate
from meshtron.generate.load import load_model, recipe_for_inference
from meshtron.generate.sampling import Sampling
from meshtron.generate.text import Stream, Text
from meshtron.mesh import build_mesh
from meshtron.source import find_source


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a user asks for."""

    checkpoint: Path
    """A step folder, a run's folder, or a Hugging Face folder."""
    prompts: Sequence[str]
    """Texts to continue."""
    max_new_tokens: int = 128
    """Most tokens added to a prompt."""
    sampling: Sampling = field(default_factory=Sampling)
    """How tokens are chosen."""
    stop: Sequence[str] = ()
    """Texts that end a completion."""
    stream: bool = False
    """Whether the completion is written as it grows (one prompt only)."""


def complete(request: Request, overrides: Sequence[str], write: Callable[[str], object]) -> list[str]:
    """Continue the prompts and write the completions, each followed by a line break, on rank 0.

    Args:
        request: what is asked for, the same on every rank.
        overrides: layout, device and dtype as ``key=value``.
        write: receives text on rank 0.

    Returns:
        The completions in the order of the prompts, on every rank.

    Raises:
        MeshtronError: a value, the checkpoint, the layout or a prompt cannot be used.
    """
    if request.max_new_tokens < 1:
        raise RecipeError(f"--max-new-tokens {request.max_new_tokens}: expected at least 1")
    if request.stream and len(request.prompts) != 1:
        raise RecipeError(f"--stream takes one --prompt, found {len(request.prompts)}")
    source = find_source(request.checkpoint)
    recipe = recipe_for_inference(source.recipe, overrides, world.world_size())
    text = Text.load(source.tokenizer_path, recipe.model.vocab_size, request.stop)
    prompts = [text.encode(prompt) for prompt in request.prompts]
    check_prompts(prompts, recipe.model.vocab_size, recipe.model.max_position_embeddings)
    device = world.pick_device(recipe.run.device)
    is_writer = world.rank() == 0
    stream = Stream(write) if request.stream and is_writer else None
    with world.process_group(device):
        mesh = build_mesh(layout_of(recipe), "cuda" if device.type == "cuda" else "cpu")
        model = load_model(source, recipe, mesh, device)
        replicas, replica = mesh["dp"].size(), mesh.get_local_rank("dp")
        rows = range(replica, len(prompts), replicas)  # dp ranks divide the prompts

        def finished(row: int, new: list[int]) -> bool:
            prompt = prompts[rows[row]]
            if stream is not None:
                stream.update(text.settled(prompt, new))
            return text.finished(prompt, new)

        new = generate(
            model,
            [prompts[row] for row in rows],
            max_new_tokens=request.max_new_tokens,
            sampling=request.sampling,
            finished=finished,
            rows=rows,
        )
        tokens = _gather(dict(zip(rows, new, strict=True)), mesh)
    completions = [text.completion(prompt, tokens[row]) for row, prompt in enumerate(prompts)]
    if stream is not None:
        stream.update(completions[0])
        write("\n")
    elif is_writer:
        for completion in completions:
            write(completion + "\n")
    return completions


def _gather(own: dict[int, list[int]], mesh: DeviceMesh) -> dict[int, list[int]]:
    """The new tokens of every prompt, from all dp ranks."""
    if mesh["dp"].size() == 1:
        return own
    parts: list[dict[int, list[int]] | None] = [None] * mesh["dp"].size()
    dist.all_gather_object(parts, own, group=mesh.get_group("dp"))
    return {row: tokens for part in parts if part is not None for row, tokens in part.items()}
