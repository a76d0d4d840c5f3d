"""From a checkpoint's recipe to a model on this rank, at a layout of its own."""

from collections.abc import Sequence
from typing import Any

import torch
from pydantic import ValidationError
from torch.distributed.device_mesh import DeviceMesh

from meshtron.build import place_model
from meshtron.errors import RecipeError
from meshtron.generate.engine import PlacedModel
from meshtron.models import FAMILIES
from meshtron.recipe import Recipe, parse_overrides
from meshtron.recipe.problems import recipe_error
from meshtron.source import Source

OVERRIDES = "parallel.*, run.device and training.param_dtype"


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
    source.fill(model)
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
