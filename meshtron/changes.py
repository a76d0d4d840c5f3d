"""What a recipe has changed since a checkpoint was saved: refused where it makes another model, logged elsewhere.

The recipe of the resuming run is the one that holds: its learning rate, horizon, batch size and data, from the next
step on. The number of samples goes on from where it was.
"""

import logging
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from meshtron.build import learning_rate_of
from meshtron.errors import CheckpointError, MeshtronError
from meshtron.recipe import Recipe, dump_recipe
from meshtron.world import warning_once

log = logging.getLogger(__name__)

# Sections that say what is computed; the others say where, how fast, and what is written about it.
_SECTIONS = ("model", "training", "optimizer", "lr_schedule", "tokenizer", "data")
# Another value of one of these means other tensors.
_SHAPE_KEYS = (
    "family",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "tie_word_embeddings",
    "attention_bias",
)


def changed_keys(saved: str, recipe: Recipe) -> dict[str, tuple[Any, Any]]:
    """Keys with another value than in the recipe text that a checkpoint holds: key -> (saved, now)."""
    before, now = (dict(_flat(tomllib.loads(text))) for text in (saved, dump_recipe(recipe)))
    changed = {key: (before.get(key), now.get(key)) for key in before | now if before.get(key) != now.get(key)}
    return {key: values for key, values in changed.items() if key.partition(".")[0] in _SECTIONS}


def check_same_model(folder: Path, changed: Mapping[str, tuple[Any, Any]]) -> None:
    """Raise CheckpointError if the checkpoint's model has other tensors than the recipe's, naming each such key."""
    differ = [
        f"{key} is {saved} in the checkpoint and {now} in the recipe"
        for key, (saved, now) in changed.items()
        if key in {f"model.{name}" for name in _SHAPE_KEYS}
    ]
    if differ:
        raise CheckpointError(
            f"{folder} is of another model: {'; '.join(differ)} (checkpoint.partial names what may differ)"
        )


def log_changes(changed: Mapping[str, tuple[Any, Any]], saved: str, recipe: Recipe, step: int) -> None:
    """Say what has changed, and what that does to the learning rate of the next step."""
    for key, (before, now) in sorted(changed.items()):
        log.log(warning_once(), "changed since the checkpoint was saved: %s = %s, was %s", key, now, before)
    if not changed:
        return
    rate = learning_rate_of(recipe)
    try:
        saved_rate = learning_rate_of(Recipe(**tomllib.loads(saved)))
    except MeshtronError:  # a recipe of another version
        return
    if saved_rate != rate or "training.global_batch_size" in changed:
        log.log(
            warning_once(),
            "learning rate of step %d: %.4g, by the saved recipe %.4g; horizon %d steps, was %d",
            *(step + 1, rate.at(step), saved_rate.at(step), rate.total_steps, saved_rate.total_steps),
        )


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
