"""A step without a single label moves nothing, not even by weight decay, and is said in the log."""

import torch

from meshtron.build import build_job
from meshtron.data import Batch
from meshtron.loop import check_skipped, train_step
from meshtron.parallel.placement import local_part
from meshtron.resume import Progress
from meshtron.testing import run_ranks
from tests.combinations import BATCH, SEQUENCE, recipe_of
from tests.runs import logged_lines


class Labelless:
    """A stream whose second batch has no labels."""

    wait_s = 0.0

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def batch(self, samples: int) -> Batch:
        tokens = torch.arange(self.rows * SEQUENCE).view(self.rows, SEQUENCE) % 96
        return Batch(tokens=tokens, labels=torch.full_like(tokens, -100) if samples == BATCH else tokens)


def three_steps(mesh: str) -> list[str]:
    recipe = recipe_of(
        {"mesh": mesh, "optimizer.weight_decay": 0.5, "training.micro_batch_size": 2, "model.num_hidden_layers": 2}
    )
    job = build_job(recipe.resolve(torch.distributed.get_world_size()), torch.device("cpu"))
    stream, progress = Labelless(BATCH // recipe.parallel.dp), Progress()
    parameters = [local_part(p).detach() for stage in job.model.stages for p in stage.parameters()]
    moved = []
    with logged_lines("meshtron.loop") as lines:
        for _ in range(3):
            before = [torch.clone(p) for p in parameters]
            outcome = train_step(job, stream, progress)
            check_skipped(job, outcome, progress, checkpointer=None)
            moved.append(any(not torch.equal(a, b) for a, b in zip(parameters, before, strict=True)))
            assert progress.skipped == 0
            if progress.step == 2:
                assert outcome.loss.item() == 0.0
                assert outcome.grad_norm.item() == 0.0
    assert moved == [True, False, True]
    return lines


def test_a_step_without_labels_leaves_weights_as_they_are():
    for mesh, ranks in (("1x1x1", 1), ("2x2x2 1F1B", 8)):
        for lines in run_ranks(three_steps, ranks, mesh):
            assert lines == ["step 2: no token of the batch has a loss, so weights stay as they are"]
