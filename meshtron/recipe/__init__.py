"""The recipe: everything that decides a run, typed, in one TOML file or built in Python.

``sections``, ``model`` and ``data`` hold the schema, ``layout`` fits it to a number of ranks, ``files`` reads and
writes TOML, ``problems`` says in a user's words what is wrong. Nothing here imports torch: a mistake is reported
before anything starts.
"""

from meshtron.recipe.data import DataSection, DataStage, Source, ValidationSection
from meshtron.recipe.files import dump_recipe, load_recipe, parse_overrides, recipe_schema
from meshtron.recipe.model import CustomModelSection, ModelSection, RopeScalingSection
from meshtron.recipe.sections import (
    CheckpointSection,
    LRScheduleSection,
    MetricsSection,
    OptimizerGroup,
    OptimizerSection,
    ParallelSection,
    ProfileSection,
    Recipe,
    RunSection,
    TokenizerSection,
    TrainingSection,
)

__all__ = [
    "CheckpointSection",
    "CustomModelSection",
    "DataSection",
    "DataStage",
    "LRScheduleSection",
    "MetricsSection",
    "ModelSection",
    "OptimizerGroup",
    "OptimizerSection",
    "ParallelSection",
    "ProfileSection",
    "Recipe",
    "RopeScalingSection",
    "RunSection",
    "Source",
    "TokenizerSection",
    "TrainingSection",
    "ValidationSection",
    "dump_recipe",
    "load_recipe",
    "parse_overrides",
    "recipe_schema",
]
