"""ZeRO-1: memory as the arithmetic says, uneven rows, state that DCP reshards, other optimizers."""

import math

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor

from meshtron.errors import MeshtronError
from meshtron.mesh import Layout, build_mesh
from meshtron.parallel.axis import Axis
from meshtron.parallel.buckets import cut_pieces
from meshtron.parallel.clip import owned_norm
from meshtron.parallel.placement import local_part
from meshtron.parallel.stages import as_stages
from meshtron.parallel.zero import ZeroOptimizer
from meshtron.testing import run_ranks

PLAN = {}
SIZES = ((7, 5), (1, 3), (16, 4), (10,), ())


class Odd(nn.Module):
    """Parameters whose rows no number of ranks divides: 7, 1, 16 and 10 rows, and a scalar."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for number, size in enumerate(SIZES):
            value = torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)
            self.register_parameter(f"p{number}", nn.Parameter(value))

    def forward(self, scale: torch.Tensor) -> torch.Tensor:
        return sum((scale * p).sin().sum() for p in self.parameters())


def train_odd(optimizer_class: type, options: dict, shard: bool) -> dict[str, torch.Tensor]:
    mesh = build_mesh(Layout(dp=torch.distributed.get_world_size()), "cpu")
    model = Odd(torch.float64)
    optimizer = ZeroOptimizer(
        [model],
        mesh,
        optimizer=optimizer_class,
        num_microbatches=2,
        shard=shard,
        grad_dtype=torch.float64,
        bucket_bytes=100,
        **options,
    )
    for step in range(3):
        for micro in range(2):
            model(torch.tensor(1.0 + torch.distributed.get_rank() + 0.1 * micro + step)).backward()
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def plain_odd(optimizer_class: type, options: dict, world_size: int) -> dict[str, torch.Tensor]:
    model = Odd(torch.float64)
    optimizer = optimizer_class(model.parameters(), **options)
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(world_size):
            for micro in range(2):
                model(torch.tensor(1.0 + rank + 0.1 * micro + step)).backward()
        optimizer.step()
    return dict(model.named_parameters())


@pytest.mark.parametrize("shard", [True, False], ids=["zero1", "zero0"])
@pytest.mark.parametrize(
    ("optimizer_class", "options"),
    [(torch.optim.AdamW, {"lr": 0.1}), (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}), (torch.optim.Lion, {})]
    if hasattr(torch.optim, "Lion")
    else [(torch.optim.AdamW, {"lr": 0.1}), (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})],
)
def test_any_elementwise_optimizer_equals_itself_on_one_process(optimizer_class, options, shard):
    for world_size in (1, 3, 4):
        expected = plain_odd(optimizer_class, options, world_size)
        for weights in run_ranks(train_odd, world_size, optimizer_class, options, shard):
            for name, weight in weights.items():
                torch.testing.assert_close(weight, expected[name].detach(), rtol=0, atol=1e-12)


def gradients_with(overlap: bool, shard: bool) -> tuple[list[bool], dict[str, torch.Tensor]]:
    """Which reductions were waited for at once, and the gradients."""
    mesh = build_mesh(Layout(dp=2), "cpu")
    model = Odd(torch.float64)
    optimizer = ZeroOptimizer(model, mesh, num_microbatches=1, overlap=overlap, shard=shard, bucket_bytes=100, lr=0.1)
    model(torch.tensor(1.0 + torch.distributed.get_rank())).backward()
    waited = [bucket.work is None for bucket in optimizer._buckets if bucket.launched]
    whole = {name: getattr(g, "full_tensor", lambda g=g: g)() for name, g in optimizer.gradients().items()}
    return waited, {name: gradient.clone() for name, gradient in whole.items()}


@pytest.mark.parametrize("shard", [True, False], ids=["zero1", "zero0"])
def test_overlap_decides_whether_backward_waits_and_changes_no_number(shard):
    (hidden, expected), _ = run_ranks(gradients_with, 2, True, shard)
    (exposed, found), _ = run_ranks(gradients_with, 2, False, shard)
    assert len(hidden) == len(exposed) > 1
    assert not any(hidden)
    assert all(exposed)
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def state_bytes(dtype: torch.dtype) -> tuple[int, int]:
    """Bytes of masters and moments on this rank, and elements of the model."""
    mesh = build_mesh(Layout(dp=torch.distributed.get_world_size()), "cpu")
    model = nn.Sequential(nn.Linear(48, 64), nn.Linear(64, 40, bias=False)).to(dtype)
    optimizer = ZeroOptimizer([model], mesh)
    tensors = [tensor for name, tensor in optimizer.state_dict().items() if not name.startswith("step.")]
    held = sum(local_part(tensor).untyped_storage().nbytes() for tensor in tensors)
    return held, sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_state_takes_twelve_bytes_a_parameter_over_dp(dp):
    for held, parameters in run_ranks(state_bytes, dp, torch.bfloat16):
        padding = 12 * (48 + 1 + 64)  # at most a row of each tensor
        assert 12 * parameters / dp - padding <= held <= 12 * parameters / dp + padding


def round_trip(folder: str, layouts: list[Layout]) -> None:
    """Save masters and moments with torch's own checkpointing at one layout, load them at another."""
    from tests.layouts import Case, sharded_optimizer

    torch.manual_seed(0)
    saved = sharded_optimizer(Case(layout=layouts[0], dtype=torch.float32))
    state = saved.state_dict()
    for name, tensor in state.items():
        values = torch.arange(math.prod(tensor.shape), dtype=torch.float32).view(tensor.shape) + len(name)
        if isinstance(tensor, DTensor):
            from meshtron.parallel.placement import slices_of

            tensor.to_local().copy_(values[slices_of(tensor)])
        else:
            tensor.copy_(values)
    dcp.save(state, checkpoint_id=folder)
    loaded = sharded_optimizer(Case(layout=layouts[1], dtype=torch.float32))
    state = loaded.state_dict()
    dcp.load(state, checkpoint_id=folder)
    for name, tensor in state.items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        values = torch.arange(math.prod(full.shape), dtype=torch.float32).view(full.shape) + len(name)
        assert torch.equal(full, values), name


@pytest.mark.parametrize("layouts", ["2x2x2 1x4x2", "1x8x1 4x1x2", "1x2x4 2x4x1"])
def test_torch_checkpointing_reshards_the_state(layouts, tmp_path):
    run_ranks(round_trip, 8, str(tmp_path / "dcp"), [Layout.parse(text) for text in layouts.split()])


def one_gradient_too_many() -> None:
    mesh = build_mesh(Layout(), "cpu")
    model = nn.Linear(2, 2)
    optimizer = ZeroOptimizer([model], mesh, num_microbatches=1, lr=0.1)
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def test_more_backwards_than_announced_is_an_error():
    with pytest.raises(AssertionError, match="num_microbatches is too small"):
        run_ranks(one_gradient_too_many, 1)


def largest_where_one_rank_has_nan() -> float:
    mesh = build_mesh(Layout(pp=2), "cpu")
    gradient = torch.tensor([1.0, math.nan if mesh.get_local_rank("pp") == 0 else 2.0])
    return owned_norm([gradient], [Axis.of(mesh, "pp")], math.inf, "cpu").item()


def test_a_norm_of_another_order_is_refused():
    with pytest.raises(MeshtronError, match=r"norm_type = 1.0: expected 2.0 or inf"):
        owned_norm([], [], 1.0, "cpu")


def test_ranks_agree_that_an_inf_norm_is_not_finite():
    assert run_ranks(largest_where_one_rank_has_nan, 2) == [math.inf] * 2


def test_a_parameter_that_is_not_contiguous_is_named():
    model = nn.Sequential(nn.Conv2d(3, 4, 3)).to(memory_format=torch.channels_last)
    with pytest.raises(MeshtronError, match=r"0.weight of shape \(4, 3, 3, 3\) has strides .*contiguous_format"):
        cut_pieces(as_stages(model), shards=1, shard=0, dtype=torch.float32)


@pytest.mark.parametrize("name", ["Adafactor", "LBFGS", "Muon"])
def test_optimizers_of_whole_matrices_are_refused(name):
    with pytest.raises(AssertionError, match=f"MeshtronError: {name} looks at whole matrices"):
        run_ranks(optimize_with, 1, getattr(torch.optim, name))


def optimize_with(kind: type) -> None:
    ZeroOptimizer(nn.Linear(2, 2, bias=False), build_mesh(Layout(), "cpu"), optimizer=kind)


class Mixed(nn.Module):
    """A parameter that is its own float32 master before one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4, dtype=torch.bfloat16))


def step_of_mixed(shard: bool) -> list[torch.Tensor]:
    model = Mixed()
    mesh = build_mesh(Layout(dp=torch.distributed.get_world_size()), "cpu")
    optimizer = ZeroOptimizer(model, mesh, optimizer=torch.optim.SGD, lr=0.5, shard=shard)
    (model.wide.sum() + model.narrow.sum()).div(mesh.size()).backward()
    optimizer.step()
    return [parameter.detach().float().clone() for parameter in model.parameters()]


@pytest.mark.parametrize(("ranks", "shard"), [(1, True), (2, True), (2, False)])
def test_parameters_of_several_dtypes_are_all_written(ranks, shard):
    for weights in run_ranks(step_of_mixed, ranks, shard):
        assert all(torch.equal(weight, torch.full((4,), 0.5)) for weight in weights)
