"""Checkpoints that are whole or not there, and load at any layout.

Usable alone, with any model: a checkpoint is a mapping of global names to tensors or DTensors.

    checkpointer = Checkpointer("checkpoints", keep_last=3)
    checkpointer.save(step, {"model.weight": weight, ...}, {"step": step})     # every rank, at the same step
    ...
    folder = checkpointer.newest_sound()
    meta = load(folder, {"model.weight": weight, ...})                         # filled in place, resharded

``meshtron.save`` and ``meshtron.load`` (stateful.py) do it for modules, optimizers and anything with a state_dict.
docs/checkpoints.md says what is promised and how each promise is tested.
"""

from meshtron.checkpoint.checkpointer import Checkpointer
from meshtron.checkpoint.loading import load, read_rank_state, read_tensors, stored_tensors
from meshtron.checkpoint.manifest import Manifest, read_manifest
from meshtron.checkpoint.steps import find_step, newest, step_folder, whole_steps
from meshtron.checkpoint.verify import verify

__all__ = [
    "Checkpointer",
    "Manifest",
    "find_step",
    "load",
    "newest",
    "read_manifest",
    "read_rank_state",
    "read_tensors",
    "step_folder",
    "stored_tensors",
    "verify",
    "whole_steps",
]
