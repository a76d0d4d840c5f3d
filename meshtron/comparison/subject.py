"""What parity compares: one rank's part of a training run, ready for its first step."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from meshtron.build import Job, build_job, model_section, norm_type_of
from meshtron.data import Batch, TrainStream
from meshtron.feed import missing_data, open_training
from meshtron.loss import IGNORE
from meshtron.optim import set_learning_rate
from meshtron.parallel.stages import Stages
from meshtron.parallel.tensor import Plan
from meshtron.parallel.zero import ZeroOptimizer
from meshtron.passes import local_loss
from meshtron.recipe import Recipe

GRADIENT, WEIGHT = "gradient.", "weight."
"""Prefixes of parameter names in the files that ranks leave."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A training run on this rank; it must be the same run, with the same global batches, at every layout."""

    stages: Stages | Sequence[nn.Module]
    """This rank's part of the model, with its initial weights."""
    optimizer: ZeroOptimizer
    """Built over ``stages``."""
    forward_backward: Callable[[int], Tensor]
    """Step number, from 0 -> the loss of that step's global batch as ``PipelineRunner.step`` returns it: a scalar,
    this dp rank's share where the last stage is, zero elsewhere. Gradients are left to the optimizer; a learning rate
    that changes is set here too."""
    plan: Plan = field(default_factory=dict)
    """The tensor parallel plan, to say where a parameter's sharding comes from."""
    max_norm: float | None = None
    """Clip gradients to this norm; None for no clipping."""
    norm_type: float = 2.0
    """Order of the norm: 2, or inf for the largest absolute value."""


def recipe_subject(recipe: Recipe, device: torch.device, resources: ExitStack) -> Subject:
    """The run of a resolved recipe, on its data, or on ``synthetic_batch`` where the data is not there.

    Args:
        recipe: resolved for the world.
        device: of this rank.
        resources: receives what has to be closed after the run.
    """
    job = build_job(recipe, device)
    stream = None if missing_data(recipe) else open_training(recipe, job.mesh, device)
    if stream is not None:
        resources.callback(stream.close)

    def step(number: int) -> Tensor:
        set_learning_rate(job.optimizer.param_groups, job.learning_rate.at(number))
        return local_loss(job, _batch(job, stream, number))

    return Subject(
        stages=job.model.stages,
        optimizer=job.optimizer,
        forward_backward=step,
        plan=job.model.spec.plan(model_section(recipe), recipe.parallel.sequence_parallel),
        max_norm=recipe.optimizer.grad_clip or None,
        norm_type=norm_type_of(recipe),
    )


def _batch(job: Job, stream: TrainStream | None, step: int) -> Batch:
    recipe = job.recipe
    if stream is not None:
        return stream.batch(step * recipe.training.global_batch_size)
    whole = synthetic_batch(
        recipe.model.vocab_size,
        recipe.training.global_batch_size,
        recipe.data_stages[recipe.data_stage(step)].seq_len,
        seed=recipe.run.seed + step,
        documents=recipe.data.document_mask,
    )
    local = recipe.training.global_batch_size // job.mesh["dp"].size()
    start = job.mesh.get_local_rank("dp") * local
    rows = {name: value[start : start + local] for name, value in vars(whole).items() if value is not None}
    return Batch(**rows)


def synthetic_batch(vocab_size: int, batch: int, sequence: int, *, seed: int, documents: bool = False) -> Batch:
    """Random tokens, of which each row has a loss on a random number, from 1 to all: uneven labels show more.

    Args:
        vocab_size: ids are below it.
        batch, sequence: size of the batch in sequences and of a sequence in tokens.
        seed: equal seeds give equal batches.
        documents: cut each row into documents of random length.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocab_size, (batch, sequence + 1), generator=generator)
    tokens, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    valid = torch.randint(1, sequence + 1, (batch, 1), generator=generator)
    labels[torch.arange(sequence) >= valid] = IGNORE
    if not documents:
        return Batch(tokens=tokens, labels=labels)
    begins = torch.rand(batch, sequence, generator=generator) < 4 / sequence
    begins[:, 0] = False
    places = torch.arange(sequence).expand(batch, -1)
    starts = torch.where(begins, places, 0).cummax(dim=1).values
    labels[:, :-1][begins[:, 1:]] = IGNORE  # no token has to predict the next document's first
    return Batch(tokens=tokens, labels=labels, document_ids=begins.long().cumsum(dim=1), positions=places - starts)
