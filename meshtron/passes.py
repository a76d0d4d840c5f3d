"""Passes of a batch through the model: forward and backward in training, forward only in validation."""

import torch
from torch import Tensor
from torch import distributed as dist

from meshtron.build import Job
from meshtron.data import Batch, ValidationSet
from meshtron.parallel.pipeline import total_loss


def forward_backward(job: Job, batch: Batch) -> Tensor:
    """Forward and backward of a global batch; returns its mean token loss, the same on every rank."""
    return total_loss(local_loss(job, batch), job.mesh)


def local_loss(job: Job, batch: Batch) -> Tensor:
    """Forward and backward of a global batch; returns this rank's share of its mean token loss."""
    batch = batch.to(job.device)
    job.loss_fn.denominator = valid_tokens(job, batch.labels).clamp(min=1)
    return job.runner.step(batch.tokens, batch.labels, **document_tensors(batch))


def document_tensors(batch: Batch) -> dict[str, Tensor]:
    """What every stage's forward is given besides its input where documents are kept apart."""
    found = {"positions": batch.positions, "document_ids": batch.document_ids}
    return {key: tensor for key, tensor in found.items() if tensor is not None}


@torch.no_grad()
def validate(job: Job, held_out: ValidationSet) -> float:
    """Mean token loss over a held-out set, each sample once, whatever the layout; without dropout."""
    modes = [(module, module.training) for stage in job.model.stages for module in stage.modules()]
    for stage in job.model.stages:
        stage.eval()
    try:
        return _held_out_loss(job, held_out)
    finally:
        for module, training in modes:
            module.training = training


def _held_out_loss(job: Job, held_out: ValidationSet) -> float:
    loss_sum = torch.zeros((), dtype=torch.float64, device=job.device)
    count = torch.zeros((), dtype=torch.int64, device=job.device)
    job.loss_fn.denominator = torch.ones((), device=job.device)
    micro_batch = job.recipe.training.micro_batch_size
    for start in held_out.starts():
        batch = held_out.batch(start).to(job.device)
        count += valid_tokens(job, batch.labels)
        for row in range(0, len(batch.tokens), micro_batch):
            rows = slice(row, row + micro_batch)
            documents = {key: tensor[rows] for key, tensor in document_tensors(batch).items()}
            logits = job.runner.forward(batch.tokens[rows], **documents)
            if logits is not None:
                loss_sum += job.loss_fn(logits, batch.labels[rows])
    return (total_loss(loss_sum, job.mesh) / count.clamp(min=1)).item()


def valid_tokens(job: Job, labels: Tensor) -> Tensor:
    """Tokens of the global batch that have a loss: this rank's count summed over dp."""
    valid = (labels >= 0).sum()
    if job.mesh["dp"].size() > 1:
        dist.all_reduce(valid, group=job.mesh.get_group("dp"))
    return valid
