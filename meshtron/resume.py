"""A run's whole state into a checkpoint and out again, at this layout or another."""

import logging
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import meshtron
from meshtron.build import Job, layout_of
from meshtron.changes import changed_keys, check_same_model, log_changes
from meshtron.checkpoint import Checkpointer, load, read_manifest, read_rank_state, step_folder
from meshtron.checkpoint.manifest import unwhole
from meshtron.checkpoint.untrusted import count, instance
from meshtron.errors import CheckpointError
from meshtron.parallel.names import global_name
from meshtron.recipe import dump_recipe
from meshtron.seeds import seed_ranks
from meshtron.world import warning_once

log = logging.getLogger(__name__)

WEIGHTS = "model."
"""Prefix of fp32 weights in a checkpoint, followed by the parameter's name."""
OPTIMIZER = "optimizer."
"""Prefix of optimizer state, followed by ``<state>.<parameter name>``."""


@dataclass
class Progress:
    """How far a run has come; all that a resume needs beside tensors and the recipe."""

    step: int = 0
    """Finished optimizer steps."""
    samples: int = 0
    """Sequences consumed, over all ranks."""
    tokens: int = 0
    """Tokens of those sequences."""
    skipped: int = 0
    """Last steps in a row that were skipped because loss or gradient norm was not finite."""
    data: dict[str, Any] = field(default_factory=dict)
    """Where the data stood at the checkpoint, as ``feed.data_state`` says it; empty for a run from scratch."""

    @classmethod
    def of(cls, meta: Mapping[str, Any]) -> "Progress":
        """What ``save`` said of a run's progress.

        Raises:
            ValueError, KeyError: something else was said.
        """
        numbers = {key: count(meta[key]) for key in ("step", "samples", "tokens", "skipped")}
        return cls(**numbers, data=instance(meta["data"], dict))


def weights_of(job: Job) -> dict[str, Tensor]:
    """Masters, frozen parameters and persistent buffers under their names in a checkpoint, sharing memory with them.

    Buffers are saved once, so those that a model changes while it trains must be equal on all ranks that hold them.
    """
    masters, ties = job.optimizer.masters(), job.model.ties
    rest = {
        ties.get(name, name): tensor
        for stage in job.model.stages
        for name, tensor in ((global_name(key), value) for key, value in stage.state_dict().items())
        if isinstance(tensor, Tensor) and ties.get(name, name) not in masters
    }
    return {WEIGHTS + name: tensor for name, tensor in (rest | masters).items()}


def tensors_of(job: Job) -> dict[str, Tensor]:
    """Everything of a run that is saved as tensors."""
    state = {OPTIMIZER + name: tensor for name, tensor in job.optimizer.moments().items()}
    return weights_of(job) | state


def save(job: Job, checkpointer: Checkpointer, progress: Progress) -> None:
    """Save this step; returns once a private copy is made."""
    meta = asdict(progress) | {
        "recipe": dump_recipe(job.recipe),
        "layout": str(layout_of(job.recipe)),
        "zero": job.recipe.parallel.zero,
        "meshtron": meshtron.__version__,
    }
    checkpointer.save(progress.step, tensors_of(job), meta, rank_state=rng_state(job.device))


def resume(job: Job, checkpointer: Checkpointer) -> Progress:
    """Load what ``checkpoint.resume`` names, if anything; returns how far that run had come.

    Raises:
        CheckpointError: the step asked for is not there or is damaged, or it is of another model.
    """
    section = job.recipe.checkpoint
    start = find_start(section.resume, section.load, checkpointer)
    if start is None:
        _warn_of_newer(checkpointer, 0)
        return Progress()
    manifest = read_manifest(start.folder)
    with understood(start.folder):
        changed = changed_keys(manifest.meta["recipe"], job.recipe) if "recipe" in manifest.meta else {}
    if not section.partial:
        check_same_model(start.folder, changed)
    if start.weights_only:
        load(start.folder, weights_of(job), prefix=WEIGHTS, partial=section.partial, check_hashes=not start.verified)
        job.optimizer.publish()
        log.info("started from the weights of %s", start.folder)
        _warn_of_newer(checkpointer, 0)
        return Progress()
    if "recipe" not in manifest.meta:
        raise CheckpointError(
            f"{start.folder}: no training run saved it, so it has no step, data position or recipe to go on from; "
            "begin a run from its weights with a checkpoint that train.py or meshtron import-hf wrote"
        )
    meta = load(start.folder, tensors_of(job), partial=section.partial, check_hashes=not start.verified)
    with understood(start.folder):
        progress = Progress.of(meta)
        log.info("resumed %s at step %d, saved at layout %s", start.folder, progress.step, meta["layout"])
        _restore_rng(start.folder, meta, job)
    job.optimizer.publish()
    log_changes(changed, meta["recipe"], job.recipe, progress.step)
    _warn_of_newer(checkpointer, progress.step)
    return progress


@contextmanager
def understood(folder: Path) -> Iterator[None]:
    """Say in one line that a checkpoint, though sound, does not hold what a training run saves.

    Raises:
        CheckpointError: in place of what the body raises when it takes apart something else than it expects.
    """
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        found = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise CheckpointError(f"{folder}: does not hold what a training run saves ({found})") from error


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where a run begins."""

    folder: Path
    """A step folder."""
    weights_only: bool
    """Whether optimizer, step and data position are left behind."""
    verified: bool
    """Whether its hashes have been compared."""


def find_start(resume: str | int, load: str, checkpointer: Checkpointer) -> Start | None:
    """The step that ``checkpoint.resume`` and ``checkpoint.load`` mean, or None for a run from scratch.

    A path outside the run's own folder is where the run begins: once the run has whole steps of its own, it goes
    on from the newest of them, so that the same command can be given again after a kill.

    Raises:
        CheckpointError: what is named is not there, or a new run is to begin in the folder of the one it begins from.
    """
    weights_only = load == "weights"  # the recipe has checked that resume is a path then
    if resume == "none":
        return None
    if isinstance(resume, int):
        folder = step_folder(checkpointer.folder, resume)
        if resume not in checkpointer.steps():
            there = (
                f"whole steps {', '.join(map(str, steps))}" if (steps := checkpointer.steps()) else "no whole step"
            )
            damage = f"{folder.name} is damaged: {unwhole(folder)}; " if folder.is_dir() else ""
            raise CheckpointError(f"checkpoint.resume = {resume}: {damage}{checkpointer.folder} has {there}")
        return Start(folder=folder, weights_only=False, verified=False)
    if resume == "auto":
        newest = checkpointer.newest_sound()
        return None if newest is None else Start(folder=newest, weights_only=False, verified=True)
    own, named = checkpointer.folder.resolve(), Path(resume).resolve()
    if named in (own, own.parent) or named.parent == own:
        if weights_only:
            raise CheckpointError(
                f'checkpoint.load = "weights" begins a new run, but {resume} is a checkpoint of this one: give the '
                'new run a folder of its own (run.name or run.dir), or go on with this one (checkpoint.load = "all")'
            )
        return Start(folder=checkpointer.find(resume), weights_only=False, verified=False)
    newest = checkpointer.newest_sound()
    if newest is None:
        return Start(folder=checkpointer.find(resume), weights_only=weights_only, verified=False)
    log.info("%s is where this run began; it goes on from its own newest step", resume)
    return Start(folder=newest, weights_only=False, verified=True)


def _warn_of_newer(checkpointer: Checkpointer, step: int) -> None:
    newer = [other for other in checkpointer.steps() if other > step]
    if newer:
        log.log(
            warning_once(),
            "%s also holds the later steps %s: each is replaced when this run reaches it, and until then "
            'resume = "auto" would go on from the last of them',
            *(checkpointer.folder, ", ".join(map(str, newer))),
        )


def rng_state(device: torch.device) -> dict[str, Any]:
    """State of this rank's random number generators: torch's on each device, Python's and NumPy's."""
    _, numbers, *rest = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": torch.from_numpy(np.asarray(numbers)),
        "numpy_rest": rest,
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def _restore_rng(folder: Path, meta: dict[str, Any], job: Job) -> None:
    """Take up each rank's random streams at the same layout; at another one they start anew from (seed, step)."""
    same_layout = meta["layout"] == str(layout_of(job.recipe))
    state = read_rank_state(folder, torch.distributed.get_rank()) if same_layout else None
    if state is None or (job.device.type == "cuda") != ("cuda" in state):
        seed_rng(job, meta["step"])
        log.info("random streams derived anew from (seed, step, coordinates): layout or device is another one")
        return
    torch.set_rng_state(state["torch"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(("MT19937", state["numpy"].numpy(), *state["numpy_rest"]))
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], job.device)


def seed_rng(job: Job, step: int) -> None:
    """Seed this rank's generators from (seed, step, pp rank, dp rank): tp ranks share what they replicate."""
    seed_ranks(job.mesh, job.recipe.run.seed, step)
