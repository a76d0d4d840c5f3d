"""Model families: plain torch modules, and beside each its tensor-parallel plan and stages as data."""

import importlib
from collections.abc import Callable
from functools import partial

from meshtron.errors import RecipeError
from meshtron.models.llama_spec import LlamaSpec
from meshtron.models.spec import ModelSpec, StageLayout

# What every model of a family has; what varies within one (sizes, rope, sliding_window, attention_bias, tied weights)
# is a key of the recipe's [model] section.
FAMILIES: dict[str, Callable[[], LlamaSpec]] = {
    "llama": LlamaSpec,
    "mistral": LlamaSpec,
    "qwen2": partial(LlamaSpec, qkv_bias=True),
    "qwen3": partial(LlamaSpec, qk_norm=True),
}

__all__ = ["FAMILIES", "ModelSpec", "StageLayout", "model_spec"]


def model_spec(family: str) -> ModelSpec:
    """The spec that ``[model] family`` names: a key of ``FAMILIES``, or ``package.module:Class`` of a user's own.

    Raises:
        RecipeError: the family is unknown, or the class cannot be imported or is no ``ModelSpec``.
    """
    if family in FAMILIES:
        return FAMILIES[family]()
    module, _, name = family.partition(":")
    if not name:
        raise RecipeError(f"model.family = {family!r}: expected {', '.join(FAMILIES)} or package.module:Class")
    try:
        spec = getattr(importlib.import_module(module), name)()
    except (ImportError, AttributeError) as error:
        raise RecipeError(
            f"model.family = {family!r} cannot be imported: {error}; modules are looked for where python looks, and "
            "in the current folder"
        ) from error
    if not isinstance(spec, ModelSpec):
        missing = [part for part in ("stages", "build", "plan") if not hasattr(spec, part)]
        raise RecipeError(f"model.family = {family!r}: {name} has no {', '.join(missing)} (see meshtron.ModelSpec)")
    return spec
