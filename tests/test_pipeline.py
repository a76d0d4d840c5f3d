"""Cutting a model into stages: balance, names, refusals; forward only from stage to stage."""

import functools

import pytest
import torch
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from examples.mlp_regression import Block
from meshtron.errors import LayoutError
from meshtron.mesh import Layout, build_mesh
from meshtron.models.llama import STAGES, Llama
from meshtron.parallel.pipeline import forward_stages, pipeline_schedule
from meshtron.parallel.schedules import check_schedule, stage_indices
from meshtron.parallel.stages import split_layers, split_stages
from meshtron.parallel.tensor import apply_tensor_parallel
from meshtron.parallel.zero import ZeroOptimizer
from meshtron.testing import run_ranks
from tests.layouts import small_config


def test_layers_go_where_the_dearest_stage_is_cheapest():
    assert split_layers([1.0] * 4, 2) == [range(0, 2), range(2, 4)]
    assert split_layers([1.0] * 5, 2) in ([range(0, 3), range(3, 5)], [range(0, 2), range(2, 5)])
    assert split_layers([1.0] * 8, 2, last=4.0) == [range(0, 6), range(6, 8)]
    assert split_layers([1.0] * 7, 4, first=1.0, last=1.0) == [
        range(0, 1),
        range(1, 3),
        range(3, 5),
        range(5, 7),
    ] or (max(len(r) for r in split_layers([1.0] * 7, 4, first=1.0, last=1.0)) <= 3)
    assert [len(r) for r in split_layers([1.0] * 4, 4, last=100.0)] == [1, 1, 1, 1]
    with pytest.raises(LayoutError, match="3 layers cannot fill 4 pipeline stages"):
        split_layers([1.0] * 3, 4)


def test_stages_are_dealt_round_or_there_and_back():
    assert [stage_indices("Interleaved1F1B", 2, rank, 2) for rank in range(2)] == [[0, 2], [1, 3]]
    assert [stage_indices("ZBVZeroBubble", 2, rank, 2) for rank in range(2)] == [[0, 3], [1, 2]]


def names_of_stages(schedule: str, stages_per_rank: int) -> list[list[str]]:
    mesh = build_mesh(Layout(pp=torch.distributed.get_world_size()), "cpu")
    with torch.device("meta"):
        model = Llama(small_config(num_hidden_layers=6))
    stages = split_stages(model, mesh["pp"], **STAGES.parts, schedule=schedule, stages_per_rank=stages_per_rank)
    return [[name for name, _ in stage.named_parameters()] for stage in stages]


def test_every_parameter_is_on_one_stage_under_its_own_name():
    with torch.device("meta"):
        everything = [name for name, _ in Llama(small_config(num_hidden_layers=6)).named_parameters()]
    for schedule, stages_per_rank in (("1F1B", 1), ("Interleaved1F1B", 2), ("DualPipeV", 2)):
        ranks = run_ranks(names_of_stages, 2, schedule, stages_per_rank)
        assert sorted(name for stages in ranks for stage in stages for name in stage) == sorted(everything)


def forward_only(schedule: str, stages_per_rank: int) -> torch.Tensor | None:
    mesh = build_mesh(Layout(pp=torch.distributed.get_world_size()), "cpu")
    torch.manual_seed(0)
    model = Llama(small_config()).double()
    tokens = torch.arange(32).view(2, 16)
    expected = model(tokens)
    stages = split_stages(model, mesh["pp"], **STAGES.parts, schedule=schedule, stages_per_rank=stages_per_rank)
    hidden = torch.empty(2, 16, 32, dtype=torch.float64, device="meta")
    with torch.no_grad():
        output = forward_stages(stages, mesh["pp"], schedule, tokens, hidden)
    if output is not None:
        torch.testing.assert_close(output, expected.detach(), rtol=0, atol=1e-12)
    return output is not None


def test_forward_only_equals_the_whole_model():
    assert run_ranks(forward_only, 4, "1F1B", 1) == [False, False, False, True]
    assert run_ranks(forward_only, 2, "Interleaved1F1B", 2) == [False, True]
    assert run_ranks(forward_only, 2, "ZBVZeroBubble", 2) == [True, False]


class Turned(torch.nn.Module):
    """A layer whose output, and whose input's gradient, lie in memory the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = torch.nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.mix(x).transpose(1, 2))


def gradients_of_turned(schedule: str, stages_per_rank: int) -> dict[str, torch.Tensor]:
    mesh = build_mesh(Layout(pp=2), "cpu")
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(Turned() for _ in range(4))}).double()
    inputs = torch.randn(8, 6, 6, dtype=torch.float64).transpose(1, 2)
    targets = torch.randn(8, 6, 6, dtype=torch.float64).transpose(1, 2)
    hidden = inputs
    for layer in model["layers"]:
        hidden = layer(hidden)
    (hidden - targets).square().sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    stages = split_stages(model, mesh["pp"], layers="layers", schedule=schedule, stages_per_rank=stages_per_rank)
    for stage in stages:
        stage.forward = functools.partial(in_order, stage)
    runner = pipeline_schedule(
        stages, mesh["pp"], schedule, num_microbatches=4, loss_fn=lambda out, target: (out - target).square().sum()
    )
    runner.step(inputs, targets)
    found = {name: p.grad for stage in stages for name, p in stage.named_parameters()}
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-12, atol=1e-12)
    return found


def in_order(stage: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    for layer in stage["layers"]:
        x = layer(x)
    return x


@pytest.mark.parametrize(("schedule", "stages_per_rank"), [("1F1B", 1), ("ZBVZeroBubble", 2)])
def test_what_stages_hand_on_need_not_be_contiguous(schedule, stages_per_rank):
    ranks = run_ranks(gradients_of_turned, 2, schedule, stages_per_rank)
    assert sorted(name for found in ranks for name in found) == [
        f"layers.{layer}.mix.{kind}" for layer in range(4) for kind in ("bias", "weight")
    ]


def forgotten_part() -> None:
    mesh = build_mesh(Layout(pp=2), "cpu")
    with torch.device("meta"):
        model = Llama(small_config())
    split_stages(model, mesh["pp"], layers="layers", first=["embed_tokens"], last=["lm_head"])


def test_a_part_that_the_layout_forgets_is_named():
    with pytest.raises(AssertionError, match=r"LayoutError: parameter 'norm.weight' belongs to no pipeline stage"):
        run_ranks(forgotten_part, 2)


@pytest.mark.parametrize(
    ("schedule", "pp", "stages", "microbatches", "message"),
    [
        ("1F1B", 4, 1, 3, "needs at least 4 micro-batches a step, found 3"),
        ("DualPipeV", 2, 2, 3, "needs at least 4 micro-batches"),
        ("1F1B", 2, 2, 8, "runs one stage a rank"),
        ("Interleaved1F1B", 2, 1, 8, "at least 2 stages a rank"),
        ("ZBVZeroBubble", 2, 3, 8, "runs 2 stages a rank"),
        ("GPipe", 2, 1, 8, "expected one of AFAB, 1F1B"),
        ("Interleaved1F1B", 2, 2, 5, "in rounds of equal size over pp = 2, found 5 micro-batches"),
    ],
)
def test_what_a_schedule_cannot_run_is_refused(schedule, pp, stages, microbatches, message):
    with pytest.raises(LayoutError, match=message):
        check_schedule(schedule, pp, stages, microbatches)


class Stack(torch.nn.Module):
    """Layers one after the other."""

    def __init__(self, layers: list[torch.nn.Module]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class OneRank:
    """What split_stages asks of a mesh."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.get_local_rank, self.size = (lambda: rank), (lambda: ranks)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer_ranges": [range(0, 1), range(2, 4)]}, r"from layer 0 to layer 3"),
        ({"layer_ranges": [range(0, 3), range(2, 4)]}, r"expected one range for each of 2 stages"),
        ({"layer_ranges": [range(0, 2), range(2, 9)]}, r"from layer 0 to layer 3"),
        ({"layer_ranges": [range(0, 4), range(4, 4)]}, r"none empty"),
        ({"layer_ranges": []}, r"expected one range for each of 2 stages"),
        ({"schedule": "ZBVZeroBubble", "stages_per_rank": 1}, r"at least 2 stages a rank, found 1"),
        ({"stages_per_rank": 0}, r"one stage a rank, found stages_per_rank = 0"),
    ],
)
def test_stages_that_would_not_be_the_model_are_refused(options, message):
    model = Stack([torch.nn.Linear(2, 2) for _ in range(4)])
    with pytest.raises(LayoutError, match=message):
        split_stages(model, OneRank(0, 2), layers="layers", **options)


def test_a_stage_runs_its_own_layers_whatever_was_done_to_the_model():
    model, x = Stack([torch.nn.Linear(2, 2) for _ in range(4)]), torch.ones(1, 2)
    model.forward = Stack.forward.__get__(model)
    (stage,) = split_stages(model, OneRank(1, 2), layers="layers")
    assert torch.equal(stage(x), model.layers[3](model.layers[2](x)))
    model.compile(backend="eager")
    with pytest.raises(LayoutError, match="Stack is compiled as a whole: split the model first"):
        split_stages(model, OneRank(1, 2), layers="layers")
    with pytest.raises(LayoutError, match="a OptimizedModule cannot be split"):
        split_stages(torch.compile(model), OneRank(1, 2), layers="layers")


def shared_layers() -> Stack:
    torch.manual_seed(0)
    return Stack([Block(8), Block(8)] * 2).double()


def gradients_of_shared(layout: Layout, schedule: str) -> dict[str, torch.Tensor]:
    mesh = build_mesh(layout, "cpu")
    model = shared_layers()
    x = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    stages = split_stages(model, mesh["pp"], layers="layers", schedule=schedule)
    apply_tensor_parallel(stages, mesh["tp"], {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()})
    optimizer = ZeroOptimizer(stages, mesh, grad_dtype=torch.float64)
    runner = pipeline_schedule(
        stages, mesh["pp"], schedule, num_microbatches=4, loss_fn=lambda out, target: (out - target).square().sum()
    )
    runner.step(x, torch.zeros(8, 8))
    whole = {name: getattr(g, "full_tensor", lambda g=g: g)() for name, g in optimizer.gradients().items()}
    return {name: gradient.clone() for name, gradient in whole.items()}


@pytest.mark.parametrize(("layout", "schedule"), [("2x1x1", "1F1B"), ("2x1x2", "Interleaved1F1B")])
def test_layers_that_stand_in_several_places_stand_in_all_of_them(layout, schedule):
    model = shared_layers()
    x = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model(x).square().sum().backward()
    layout = Layout.parse(layout)
    for found in run_ranks(gradients_of_shared, layout.world_size, layout, schedule):
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize(
    ("targets", "others", "named"),
    [
        (3, {}, r"targets is shape \(3, 2\)"),
        (4, {"mask": torch.ones(3)}, r"mask is shape \(3,\)"),
        (4, {"mask": torch.ones(())}, r"mask is shape \(\)"),
        (4, {"mask": True}, "mask is bool"),
    ],
)
def test_parts_of_a_batch_have_as_many_samples(targets, others, named):
    with pytest.raises(AssertionError, match=f"LayoutError: step: {named}, expected a tensor of 4 samples"):
        run_ranks(step_with, 1, targets, others)


def step_with(targets: int, others: dict) -> None:
    runner = pipeline_schedule(
        torch.nn.Linear(2, 2), build_mesh(Layout(), "cpu")["pp"], num_microbatches=2, loss_fn=torch.nn.MSELoss()
    )
    runner.step(torch.ones(4, 2), torch.ones(targets, 2), **others)
