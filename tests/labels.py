"""Runs whose labels are uneven, through meshtron's training step and in plain torch."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from meshtron.build import build_job
from meshtron.data import Batch
from meshtron.loop import check_skipped, train_step
from meshtron.parallel.placement import local_part
from meshtron.resume import Progress
from tests.combinations import IGNORE, Global, plain_steps, recipe_of
from tests.layouts import Curve
from tests.runs import logged_lines

BATCH, SEQUENCE = 16, 64
STEPS = ("uneven", "idle", "none", "uneven")
CELLS = [(pp, dp, parts) for pp in (1, 2, 4) for dp in (1, 2, 4) for parts in (1, 2, 4)]
"""(pp, dp, micro-batches a step), up to 16 ranks."""


def batch(step: int) -> Global:
    """Rows with 3 to 60 labels; in an idle step the first half has none, which is all of some dp ranks' rows."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(96, (BATCH, SEQUENCE + 1), generator=generator)
    labels = ids[:, 1:].clone()
    for row, length in enumerate(torch.randint(3, 61, (BATCH,), generator=generator).tolist()):
        places = torch.randperm(SEQUENCE, generator=generator)
        labels[row, places[length:]] = IGNORE  # anywhere in the row
    unlabelled = {"uneven": 0, "idle": BATCH // 2, "none": BATCH}[STEPS[step]]
    labels[:unlabelled] = IGNORE
    return Global(tokens=ids[:, :-1], labels=labels, document_ids=torch.zeros_like(labels))


class Stream:
    """This rank's rows of each step's batch."""

    wait_s = 0.0

    def __init__(self, dp_rank: int, dp: int) -> None:
        self.rows = slice(dp_rank * BATCH // dp, (dp_rank + 1) * BATCH // dp)

    def batch(self, samples: int) -> Batch:
        whole = batch(samples // BATCH)
        return Batch(tokens=whole.tokens[self.rows], labels=whole.labels[self.rows])


def options_of(pp: int, dp: int, micro_batches: int, dtype: str, tp: int = 1) -> dict[str, Any]:
    """Recipe options of a cell: 1F1B where there are micro-batches enough, else AFAB, which takes fewer."""
    schedule = "1F1B" if micro_batches >= pp else "AFAB"
    return {
        "mesh": f"{pp}x{dp}x{tp} {schedule}",
        "training.seq_len": SEQUENCE,
        "training.global_batch_size": BATCH,
        "training.micro_batch_size": BATCH // dp // micro_batches,
        "training.param_dtype": dtype,
        "optimizer.weight_decay": 0.5,
        "optimizer.grad_clip": 0.1,
        "lr_schedule.kind": "constant",
    }


def sharded(options: Mapping[str, Any]) -> tuple[Curve, list[str], list[bool]]:
    """The steps on the ranks of the process group; what the loop says of them, and which of them moved weights."""
    recipe = recipe_of(options).resolve(torch.distributed.get_world_size())
    job = build_job(recipe, torch.device("cpu"))
    stream, progress = Stream(job.mesh.get_local_rank("dp"), recipe.parallel.dp), Progress()
    curve, moved = Curve([], [], {}), []
    parameters = [local_part(p).detach() for stage in job.model.stages for p in stage.parameters()]
    with logged_lines("meshtron.loop") as lines:
        for _ in STEPS:
            before = [torch.clone(p) for p in parameters]
            outcome = train_step(job, stream, progress)  # type: ignore[arg-type]
            check_skipped(job, outcome, progress, checkpointer=None)  # type: ignore[arg-type]
            curve.losses.append(outcome.loss.item())
            curve.norms.append(outcome.grad_norm.item())
            moved.append(any(not torch.equal(a, b) for a, b in zip(parameters, before, strict=True)))
    assert progress.skipped == 0
    for stage in job.model.stages:
        for name, parameter in stage.named_parameters():
            full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            curve.weights[name] = full.detach().clone()
    return curve, lines, moved


def plain(dtype: str) -> Curve:
    """The same steps in plain torch on one process; they are the same for every cell."""
    return plain_steps(recipe_of(options_of(1, 1, 1, dtype)), [batch(step) for step in range(len(STEPS))])
