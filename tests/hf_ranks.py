"""What tests of Hugging Face folders run on ranks; transformers, slow to import, is not needed there."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from meshtron.build import place_model
from meshtron.generate.load import recipe_for_inference
from meshtron.hf.weights import WeightFiles
from meshtron.loop import train
from meshtron.mesh import Layout, build_mesh
from meshtron.parallel.pipeline import forward_stages
from meshtron.parallel.placement import shard_range
from meshtron.recipe import Recipe
from meshtron.source import find_source


def train_all(recipes: list[Recipe]) -> None:
    """Run recipes one after the other."""
    for recipe in recipes:
        train(recipe)


def logits_at(folder: Path, layout: str, tokens: torch.Tensor) -> tuple[range, torch.Tensor] | None:
    """Logits of a folder's model on this rank of a layout, ``"2x1x3"``: its columns and their logits; None before
    the last stage."""
    parsed, source = Layout.parse(layout), find_source(folder)
    options = [f"parallel.pp={parsed.pp}", f"parallel.tp={parsed.tp}", "training.param_dtype=float32"]
    recipe = recipe_for_inference(source.recipe, options, parsed.world_size)
    mesh = build_mesh(parsed, "cpu")
    model = place_model(recipe, mesh, torch.device("cpu"))
    for stage in model.stages:
        for parameter in stage.parameters():
            torch.nn.init.constant_(parameter.to_local() if hasattr(parameter, "to_local") else parameter, torch.nan)
    source.fill(model)
    hidden = torch.empty(*tokens.shape, recipe.model.hidden_size, device="meta")
    logits = forward_stages(model.stages, mesh["pp"], "1F1B", tokens, hidden)
    return (
        None
        if logits is None
        else (shard_range(recipe.model.vocab_size, parsed.tp, mesh.get_local_rank("tp")), logits.detach())
    )


def logits_of_all(folders: list[Path], layout: str, tokens: torch.Tensor) -> list[tuple[range, torch.Tensor] | None]:
    """``logits_at`` of several folders."""
    return [logits_at(folder, layout, tokens) for folder in folders]


def load_shard(folder: Path) -> tuple[int, int, int]:
    """Bytes of this rank's parameters, bytes read from the files, and growth of the peak of resident memory."""
    mesh = build_mesh(Layout(pp=2, tp=2), "cpu")
    options = ["parallel.pp=2", "parallel.tp=2", "training.param_dtype=bfloat16"]
    source = find_source(folder)
    model = place_model(recipe_for_inference(source.recipe, options, 4), mesh, torch.device("cpu"))
    own = sum(p.to_local().nbytes if hasattr(p, "to_local") else p.nbytes for p in model.stages[0].parameters())
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before, read = resident("VmRSS"), WeightFiles.read
    total = 0

    def counted(self: WeightFiles, name: str, slices: tuple[slice, ...]) -> torch.Tensor:
        nonlocal total
        part = read(self, name, slices)
        total += part.nbytes
        return part

    WeightFiles.read = counted  # type: ignore[method-assign]
    try:
        source.fill(model)
    finally:
        WeightFiles.read = read  # type: ignore[method-assign]
    return own, total, resident("VmHWM") - before


def resident(key: str) -> int:
    """Bytes of a line of /proc/self/status, such as VmRSS."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


@contextmanager
def peak_of(key: str) -> Iterator[Callable[[], int]]:
    """How far a line of /proc/self/status rose while the body ran, in bytes; looked at every few milliseconds."""
    start, highest, over = resident(key), 0, threading.Event()

    def watch() -> None:
        nonlocal highest
        while not over.wait(0.003):
            highest = max(highest, resident(key))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield lambda: highest - start
    finally:
        over.set()
        watcher.join()
