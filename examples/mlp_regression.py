"""A residual MLP that learns a function of 8 numbers: nothing in the helpers assumes tokens.

torchrun --nproc-per-node 8 examples/mlp_regression.py 2x2x2
"""

import sys

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional as F

import meshtron as mt

BATCH = 64


class Block(nn.Module):
    """Two matrices around a GELU, added to what comes in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Regressor(nn.Module):
    """(batch, 8) to (batch, 1)."""

    def __init__(self, width: int = 16, depth: int = 4) -> None:
        super().__init__()
        self.enter = nn.Linear(8, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.leave = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


PLAN = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """This micro-batch's part of the mean squared error over the global batch."""
    return (output - target).square().sum() / BATCH


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """The global batch of a step: inputs (BATCH, 8) and targets (BATCH, 1)."""
    x = torch.randn(BATCH, 8, generator=torch.Generator().manual_seed(step))
    return x, x.square().mean(dim=1, keepdim=True).sqrt()


def build(mesh, num_microbatches, schedule="1F1B", dtype=torch.float32):
    with torch.device("meta"):
        model = Regressor()
    mt.check_plan(model, PLAN, mesh["tp"].size(), example=torch.empty(2, 8))
    stages = mt.split_stages(model, mesh["pp"], layers="blocks", first=["enter"], last=["leave"], schedule=schedule)
    mt.apply_tensor_parallel(stages, mesh["tp"], PLAN)
    mt.init_weights(stages, seed=0, std=0.2, dtype=dtype)
    optimizer = mt.ZeroOptimizer(stages, mesh, lr=1e-2, weight_decay=0.0, grad_dtype=dtype)
    return optimizer, mt.pipeline_schedule(
        stages, mesh["pp"], schedule, num_microbatches=num_microbatches, loss_fn=loss_fn
    )


def main(layout: str = "1x1x1", steps: str = "50") -> None:
    mesh = mt.build_mesh(mt.Layout.parse(layout), "cpu")
    local, rank = BATCH // mesh["dp"].size(), mesh.get_local_rank("dp")
    optimizer, runner = build(mesh, num_microbatches=4)
    for step in range(int(steps)):
        x, y = (part[rank * local :][:local] for part in batch_of(step))
        loss = mt.total_loss(runner.step(x, y), mesh)
        optimizer.step()
        if torch.distributed.get_rank() == 0 and step % 10 == 9:
            print(f"step {step + 1}: mean squared error {loss:.4f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
