"""training.compile: few graphs, none of them compiled again, the numbers of plain torch, with pipelines and tp."""

import functools
from unittest import mock

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from meshtron.build import build_job
from meshtron.layers import prepare_layers
from meshtron.mesh import Layout, build_mesh
from meshtron.parallel.placement import local_part
from meshtron.parallel.tensor import apply_tensor_parallel
from meshtron.passes import forward_backward
from meshtron.testing import run_ranks
from tests.combinations import batch_of, plain, recipe_of

EAGER = "aot_eager_decomp_partition"  # all of the compiler but the making of machine code, which takes seconds


def compiled_steps(options: dict, backend: str) -> tuple[list[int], list[float]]:
    """Graphs compiled by the end of each of two steps, and each step's loss."""
    torch._dynamo.reset()
    counters.clear()
    recipe = recipe_of(options).resolve(torch.distributed.get_world_size())
    graphs, losses = [], []
    with mock.patch.object(nn.Module, "compile", functools.partialmethod(nn.Module.compile, backend=backend)):
        job = build_job(recipe, torch.device("cpu"))
    for step in range(2):
        losses.append(float(forward_backward(job, batch_of(job, "ragged", step))))
        job.optimizer.step()
        graphs.append(counters["stats"]["unique_graphs"])
    return graphs, losses


@pytest.mark.parametrize(
    ("mesh", "modes", "backend"),
    [
        ("1x1x2", ("full",), "inductor"),
        ("2x1x1 1F1B", ("selective",), "inductor"),
        ("2x1x1 1F1B", ("none", "full"), EAGER),
        ("2x1x2 1F1B", ("none", "selective", "full"), EAGER),
        ("2x1x1 DualPipeV", ("none",), EAGER),
    ],
)
def test_layers_share_one_compiled_graph_which_is_not_compiled_again(mesh, modes, backend):
    for mode in modes:
        options = {
            "mesh": mesh,
            "labels": "ragged",
            "training.compile": True,
            "training.param_dtype": "float32",  # torch 2.11 does not compile attention in float64
            "training.activation_checkpointing": mode,
            "training.micro_batch_size": 2 if "V" in mesh else 4,
            "optimizer.lr": 0.1,  # so that the second loss tells much of the first gradients
            "optimizer.grad_clip": 0.0,
        }
        expected = plain(options).losses
        pp, dp, tp = map(int, mesh.partition(" ")[0].split("x"))
        for graphs, losses in run_ranks(compiled_steps, pp * dp * tp, options, backend):
            assert graphs == [1, 1], (mode, graphs)
            torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)


class Numbered(nn.Module):
    """A layer whose forward pass depends on its number, so that no two share code."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.mix = number, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mix(x) / (1 + self.number)


def test_all_layers_are_compiled_where_no_two_are_alike():
    torch._dynamo.reset()
    counters.clear()
    layers = nn.Sequential(*(Numbered(number) for number in range(10)))
    with mock.patch.object(nn.Module, "compile", functools.partialmethod(nn.Module.compile, backend=EAGER)):
        prepare_layers(layers, "none", compiled=True, tensor_parallel=False)
    layers(torch.ones(2, 4)).sum().backward()
    assert counters["stats"]["unique_graphs"] == 10


class Flat(nn.Module):
    """A layer of linear maps only: no part of it has parts."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


PLAN = {
    "0": RowwiseParallel(input_layouts=Replicate()),
    "*.up": ColwiseParallel(),
    "*.down": RowwiseParallel(),
}


def flat_layers(compiled: bool) -> tuple[int, list[torch.Tensor]]:
    """Graphs of a model whose flat layers take what an embedding's hook gives, and its gradients."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, 4), Flat(), Flat())
    apply_tensor_parallel(model, build_mesh(Layout(tp=2), "cpu")["tp"], PLAN)
    with mock.patch.object(nn.Module, "compile", functools.partialmethod(nn.Module.compile, backend=EAGER)):
        prepare_layers(model[1:], "none", compiled=compiled, tensor_parallel=True)
    model(torch.arange(8).view(2, 4)).square().sum().backward()
    return counters["stats"]["unique_graphs"], [local_part(p.grad) for p in model.parameters()]


def test_layers_without_parts_are_compiled_under_tensor_parallelism():
    for (none, expected), (graphs, found) in zip(
        run_ranks(flat_layers, 2, False), run_ranks(flat_layers, 2, True), strict=True
    ):
        assert (none, graphs) == (0, 1)
        torch.testing.assert_close(found, expected)
