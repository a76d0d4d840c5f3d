"""From a checkpoint of either kind to a model on this rank, at a layout of its own."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from meshtron.build import Model, place_model
from meshtron.checkpoint import find_step, load, read_manifest
from meshtron.errors import CheckpointError, RecipeError
from meshtron.generate.engine import PlacedModel
from meshtron.hf.folder import is_hf_folder
from meshtron.hf.recipe import recipe_of_folder
from meshtron.hf.weights import WeightFiles, check_weights, load_weights
from meshtron.models import FAMILIES
from meshtron.recipe import Recipe, parse_overrides
from meshtron.recipe.problems import recipe_error
from meshtron.resume import WEIGHTS

OVERRIDES = "parallel.*, run.device and training.param_dtype"


@dataclass(frozen=True, kw_only=True)
class Source:
    """A checkpoint that has been found, and the recipe of its model."""

    folder: Path
    """A step folder, or a Hugging Face folder."""
    recipe: Recipe
    """The recipe of the run that saved it, or the least one for a Hugging Face folder's model."""
    is_hf: bool
    """Which of the two ``folder`` is."""

    @property
    def tokenizer_path(self) -> Path:
        """The tokenizer beside the checkpoint, or where the recipe says that it is."""
        beside = self.folder if self.is_hf else self.folder.parent.parent
        return beside if self.is_hf or (beside / "tokenizer.json").is_file() else Path(self.recipe.tokenizer.path)


def find_source(path: Path) -> Source:
    """What a user means by ``path``: a Hugging Face folder, a step folder, or a run's folder (its newest step).

    Raises:
        CheckpointError: it is none of them, or holds a model that is not supported.
    """
    if is_hf_folder(path):
        dtypes = {str(dtype).removeprefix("torch.") for dtype in WeightFiles(path).dtypes.values()}
        dtype = dtypes.pop() if dtypes <= {"bfloat16", "float64"} and len(dtypes) == 1 else "float32"
        return Source(folder=path, recipe=recipe_of_folder(path, dtype), is_hf=True)
    step = find_step(path)
    text = read_manifest(step).meta.get("recipe")
    if text is None:
        raise CheckpointError(f"{step}: no recipe in its manifest, so its model is not known")
    return Source(folder=step, recipe=Recipe.model_validate(tomllib.loads(text)), is_hf=False)


def recipe_for_inference(recipe: Recipe, overrides: Sequence[str], world_size: int) -> Recipe:
    """The model of ``recipe`` at a layout given by overrides; nothing else of its run is kept.

    Args:
        recipe: the checkpoint's.
        overrides: ``key=value`` of the keys in ``OVERRIDES``.
        world_size: ranks there are; those that pp and tp leave over are dp.

    Raises:
        RecipeError: another key, or a wrong value.
        LayoutError: the layout does not fit the model or the ranks.
    """
    if recipe.model.family not in FAMILIES:
        raise RecipeError(
            f"model.family = {recipe.model.family!r}: text is generated with {', '.join(FAMILIES)}; "
            "a model of your own needs its own loop"
        )
    # One sequence a rank, so that the batch divides at any layout.
    training = recipe.training.model_dump() | {"micro_batch_size": 1, "global_batch_size": world_size}
    values: dict[str, Any] = recipe.model_dump(exclude_none=True)
    values |= {"parallel": {}, "run": {"name": recipe.run.name}, "training": training}
    for key, value in parse_overrides(overrides).items():
        section, _, name = key.partition(".")
        if section != "parallel" and key not in ("run.device", "training.param_dtype"):
            raise RecipeError(f"override {key}: only {OVERRIDES} mean something here")
        values[section][name] = value
    values["parallel"]["sequence_parallel"] = False  # a pass over one token has no sequence to divide
    try:
        return Recipe.model_validate(values).resolve(world_size)
    except ValidationError as error:
        raise recipe_error(error, Recipe, lambda key: "") from None


def load_model(source: Source, recipe: Recipe, mesh: DeviceMesh, device: torch.device) -> PlacedModel:
    """Place the model of ``recipe`` on this rank and fill it from ``source``; every rank makes the call.

    Raises:
        MeshtronError: the checkpoint does not fit the model, or is damaged.
    """
    model = place_model(recipe, mesh, device)
    parameters = named_parameters(model)
    if source.is_hf:
        files = WeightFiles(source.folder)
        check_weights(files, model.shapes, model.ties)
        load_weights(parameters, files, model.ties)
    else:
        load(source.folder, {WEIGHTS + name: tensor for name, tensor in parameters.items()}, prefix=WEIGHTS)
    several = mesh.size() > 1
    return PlacedModel(
        stages=model.stages,
        pp_mesh=mesh["pp"] if several else None,
        tp_mesh=mesh["tp"] if several else None,
        vocab_size=recipe.model.vocab_size,
        hidden_size=recipe.model.hidden_size,
        max_length=recipe.model.max_position_embeddings,
        schedule=recipe.parallel.schedule,
    )


def named_parameters(model: Model) -> dict[str, Tensor]:
    """This rank's parameters by name, tied ones under their first."""
    named = (pair for stage in model.stages for pair in stage.named_parameters())
    return {model.ties.get(name, name): parameter.detach() for name, parameter in named}
