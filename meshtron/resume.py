"""A run's whole state into a checkpoint and out again, at this layout or another."""

import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import meshtron
from meshtron.build import Job, layout_of
from meshtron.checkpoint import Checkpointer, find_step, load, read_rank_state, step_folder
from meshtron.errors import CheckpointError
from meshtron.recipe import dump_recipe

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


def weights_of(job: Job) -> dict[str, Tensor]:
    """Masters under their names in a checkpoint; they share memory with the optimizer."""
    return {WEIGHTS + name: tensor for name, tensor in job.optimizer.masters().items()}


def tensors_of(job: Job) -> dict[str, Tensor]:
    """Everything of a run that is saved as tensors."""
    state = {OPTIMIZER + name: tensor for name, tensor in job.optimizer.state_dict().items()}
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
    folder = _folder_to_resume(section.resume, checkpointer)
    if folder is None:
        return Progress()
    if section.load == "weights":
        load(folder, weights_of(job), prefix=WEIGHTS, partial=section.partial)
        job.optimizer.publish()
        log.info("started from the weights of %s", folder)
        return Progress()
    meta = load(folder, tensors_of(job), partial=section.partial)
    job.optimizer.publish()
    _restore_rng(folder, meta, job)
    log.info("resumed %s at step %d, saved at layout %s", folder, meta["step"], meta["layout"])
    return Progress(step=meta["step"], samples=meta["samples"], tokens=meta["tokens"])


def _folder_to_resume(resume: str | int, checkpointer: Checkpointer) -> Path | None:
    if resume == "none":
        return None
    if resume == "auto":
        return checkpointer.newest_sound()
    if isinstance(resume, str):
        return find_step(resume)
    if resume not in checkpointer.steps():
        there = ", ".join(map(str, checkpointer.steps())) or "none"
        raise CheckpointError(f"checkpoint.resume = {resume}: {checkpointer.folder} has whole steps {there}")
    return step_folder(checkpointer.folder, resume)


def rng_state(device: torch.device) -> dict[str, Any]:
    """State of this rank's random number generators."""
    state: dict[str, Any] = {"torch": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def _restore_rng(folder: Path, meta: dict[str, Any], job: Job) -> None:
    """Take up each rank's random streams at the same layout; at another one they start anew from (seed, step)."""
    if meta["layout"] == str(layout_of(job.recipe)):
        state = read_rank_state(folder, torch.distributed.get_rank())
        if state is not None:
            torch.set_rng_state(state["torch"])
            if "cuda" in state and job.device.type == "cuda":
                torch.cuda.set_rng_state(state["cuda"], job.device)
            return
    seed_rng(job, meta["step"])
    log.info("random streams derived anew from (seed, step, coordinates): the layout is another one")


def seed_rng(job: Job, step: int) -> None:
    """Seed this rank's generators from (seed, step, pp rank, dp rank): tp ranks share what they replicate."""
    key = (job.recipe.run.seed, step, job.mesh.get_local_rank("pp"), job.mesh.get_local_rank("dp"))
    torch.manual_seed(abs(hash(key)) % 2**63)
