"""Where a model comes from: a step folder, a run's folder, or a Hugging Face folder."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from meshtron.build import Model
from meshtron.checkpoint import find_step, load, read_manifest
from meshtron.errors import CheckpointError, RecipeError
from meshtron.hf.folder import is_hf_folder
from meshtron.hf.recipe import recipe_of_folder
from meshtron.hf.weights import WeightFiles, load_folder
from meshtron.recipe import Recipe
from meshtron.resume import WEIGHTS, understood


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

    def fill(self, model: Model) -> None:
        """Give this rank's parameters their values; every rank makes the call.

        Raises:
            CheckpointError: the checkpoint does not fit the model, or is damaged.
        """
        parameters = named_parameters(model)
        if self.is_hf:
            load_folder(self.folder, parameters, model.shapes, model.ties)
        else:
            load(self.folder, {WEIGHTS + name: tensor for name, tensor in parameters.items()}, prefix=WEIGHTS)


def find_source(path: Path) -> Source:
    """What a user means by ``path``; of a run's folder the newest whole step.

    Raises:
        CheckpointError: it is none of the three, or holds a model that is not supported.
    """
    if not path.is_dir():
        raise CheckpointError(
            f"{path}: no such folder; expected a step folder, a run's folder or a Hugging Face folder"
        )
    if is_hf_folder(path):
        return Source(folder=path, recipe=recipe_of_folder(path, WeightFiles(path).dtypes.values()), is_hf=True)
    step = find_step(path)
    text = read_manifest(step).meta.get("recipe")
    if text is None:
        raise CheckpointError(f"{step}: no recipe in its manifest, so its model is not known")
    with understood(step):
        try:
            recipe = Recipe(**tomllib.loads(text))
        except RecipeError as error:
            listed = "; ".join(str(error).splitlines())
            raise CheckpointError(f"{step}: this meshtron does not know its recipe: {listed}") from None
    return Source(folder=step, recipe=recipe, is_hf=False)


def named_parameters(model: Model) -> dict[str, Tensor]:
    """This rank's parameters by name, tied ones under their first."""
    named = (pair for stage in model.stages for pair in stage.named_parameters())
    return {model.ties.get(name, name): parameter.detach() for name, parameter in named}
