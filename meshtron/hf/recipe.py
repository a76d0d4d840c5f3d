"""A recipe's [model] section from a Hugging Face folder."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from meshtron.errors import RecipeError
from meshtron.hf.folder import read_config
from meshtron.models.llama import LlamaConfig
from meshtron.recipe import DataSection, ModelSection, Recipe, RopeScalingSection, Source, TrainingSection

# Keys of a recipe that may differ from the folder's config.json: they leave every weight in its place.
ADJUSTABLE = frozenset(
    {"max_position_embeddings", "rope_theta", "rope_scaling", "sliding_window", "rms_norm_eps", "init_std"}
)


def section_values(family: str, config: LlamaConfig) -> dict[str, Any]:
    """The keys of a [model] section that say what ``config`` says."""
    values = {key: value for key, value in dataclasses.asdict(config).items() if key in ModelSection.model_fields}
    if config.rope_scaling is not None:
        values["rope_scaling"] = RopeScalingSection(**values["rope_scaling"])
    return {"family": family, **values}


def fill_from_hf(recipe: Recipe) -> Recipe:
    """The recipe with its [model] section completed from ``model.from_hf``; unchanged without one.

    Keys that the recipe sets keep their value where that leaves every weight in its place (``ADJUSTABLE``).

    Raises:
        CheckpointError: the folder's config.json is missing or not supported.
        RecipeError: keys of the recipe contradict the folder; a line for each.
    """
    section = recipe.model
    if not section.from_hf:
        return recipe
    found = section_values(*read_config(Path(section.from_hf)))
    kept = {key: getattr(section, key) for key in section.model_fields_set}
    wrong = [
        f"model.{key}: {kept[key]!r}, but {section.from_hf}/config.json has {value!r}: "
        f"leave model.{key} out when model.from_hf is set"
        for key, value in found.items()
        if kept.get(key, value) != value and key not in ADJUSTABLE
    ]
    if wrong:
        raise RecipeError("\n".join(wrong))
    return recipe.model_copy(update={"model": ModelSection(**(found | kept))})


def recipe_of_folder(folder: Path, dtypes: Iterable[torch.dtype]) -> Recipe:
    """A recipe whose model is a folder's, with the least of the rest that a recipe needs.

    Args:
        folder: a Hugging Face folder.
        dtypes: of its tensors; ``param_dtype`` is the one they all have, or float32.

    Raises:
        CheckpointError: the folder's config.json is missing or not supported.
    """
    family, config = read_config(folder)
    names = {str(dtype).removeprefix("torch.") for dtype in dtypes}
    dtype: Any = names.pop() if len(names) == 1 and names <= {"bfloat16", "float64"} else "float32"
    length = min(config.max_position_embeddings, 2048)
    return Recipe(
        model=ModelSection(**section_values(family, config)),
        training=TrainingSection(steps=1, seq_len=length, global_batch_size=1, param_dtype=dtype),
        data=DataSection(train=(Source(path=str(folder)),)),
    )
