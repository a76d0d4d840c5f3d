"""The helpers beside torch's own: a user's mesh, fully_shard, optimizers, torch.compile, checkpoint_wrapper."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import meshtron as mt
from examples import mlp_regression as mlp
from meshtron.kernels.adamw import FusedAdamW
from meshtron.parallel.names import named_parameters
from meshtron.testing import run_ranks

STEPS = 3


class Lion(torch.optim.Optimizer):
    """Chen et al., 2023: an element-wise optimizer that torch does not have."""

    def __init__(self, params, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                moment = self.state[p].setdefault("moment", torch.zeros_like(p))
                p.sub_(torch.sign(moment * first + p.grad * (1 - first)), alpha=group["lr"])
                moment.mul_(second).add_(p.grad, alpha=1 - second)


OPTIMIZERS = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
    "lion": (Lion, {"lr": 1e-3}),
}


def plain_run(name: str, max_norm: float = 1e9) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = mlp.Regressor().double()
    mt.init_weights(model, seed=0, std=0.2)
    kind, options = OPTIMIZERS[name]
    optimizer = kind(model.parameters(), **options)
    norms = []
    for step in range(STEPS):
        x, y = (part.double() for part in mlp.batch_of(step))
        optimizer.zero_grad()
        mlp.loss_fn(model(x), y).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
    return norms, {key: value.detach() for key, value in model.named_parameters()}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "full_tensor", lambda: tensor)().detach().clone()


def sharded_model(mesh, tp_axis: str) -> nn.Module:
    with torch.device("meta"):
        model = mlp.Regressor()
    mt.apply_tensor_parallel(model, mesh[tp_axis], mlp.PLAN)
    mt.init_weights(model, seed=0, std=0.2, device="cpu", dtype=torch.float64)
    return model


def on_a_users_mesh(name: str, wrap: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Axes of other names, in another order, and one more, along which ranks do the same."""
    mesh = init_device_mesh(
        "cpu", (torch.distributed.get_world_size() // 4, 2, 2), mesh_dim_names=("copy", "data", "model")
    )
    model = sharded_model(mesh, "model")
    if wrap == "checkpoint":
        for key, block in list(model.blocks.named_children()):
            model.blocks.register_module(key, checkpoint_wrapper(block))
    if wrap == "compile":
        for block in model.blocks:
            block.compile(backend="aot_eager")
    kind, options = OPTIMIZERS[name]
    axes = ("stage", "data", "model")
    optimizer = mt.ZeroOptimizer(model, mesh, optimizer=kind, grad_dtype=torch.float64, axes=axes, **options)
    rank, norms = mesh.get_local_rank("data"), []
    for step in range(STEPS):
        for x, y in zip(*(part.double().chunk(2)[rank].chunk(4) for part in mlp.batch_of(step)), strict=True):
            mlp.loss_fn(model(x), y).backward()
        norms.append(optimizer.clip_grad_norm(1e9).item())
        optimizer.step()
    return norms, {key: whole(value) for key, value in named_parameters([model])}


@pytest.mark.parametrize(
    ("name", "wrap"), [("adamw", ""), ("momentum", ""), ("lion", ""), ("adamw", "checkpoint"), ("adamw", "compile")]
)
def test_a_users_mesh_with_any_optimizer_and_torchs_wrappers(name, wrap):
    norms, weights = plain_run(name)
    for ours_norms, ours in run_ranks(on_a_users_mesh, 4 if wrap else 8, name, wrap):
        torch.testing.assert_close(ours_norms, norms, rtol=1e-12, atol=0)
        assert ours.keys() == weights.keys()
        for key, weight in ours.items():
            torch.testing.assert_close(weight, weights[key], rtol=0, atol=1e-12, msg=key)


def tp_first(kind: type) -> tuple[list[float], dict[str, torch.Tensor]]:
    """A mesh whose tensor parallel axis comes before its data parallel one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    model = sharded_model(mesh, "tp")
    optimizer = mt.ZeroOptimizer(model, mesh, optimizer=kind, grad_dtype=torch.float64, lr=1e-2, weight_decay=0.1)
    norms = []
    for step in range(STEPS):
        x, y = (part.double().chunk(2)[mesh.get_local_rank("dp")] for part in mlp.batch_of(step))
        mlp.loss_fn(model(x), y).backward()
        norms.append(optimizer.clip_grad_norm(1e9).item())
        optimizer.step()
    return norms, {key: whole(value) for key, value in optimizer.masters().items()}


def test_a_mesh_may_have_its_axes_in_another_order():
    norms, weights = plain_run("adamw")
    for ours_norms, ours in run_ranks(tp_first, 4, torch.optim.AdamW):
        torch.testing.assert_close(ours_norms, norms, rtol=1e-12, atol=0)
        for key, weight in ours.items():
            torch.testing.assert_close(weight, weights[key], rtol=0, atol=1e-12, msg=key)


class Scaled(mlp.Regressor):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.ones(1))


def test_a_buffer_whose_values_were_never_computed_is_named():
    with torch.device("meta"):
        model = nn.Sequential(Scaled())
    with pytest.raises(
        mt.MeshtronError, match=r"buffer '0.factor' of Scaled is on the meta device.* its factor anew"
    ):
        mt.init_weights(model)
    with pytest.raises(mt.MeshtronError, match=r"buffer 'factor' of Scaled"):
        mt.init_weights(model[0])
    model[0].factor = torch.ones(1)
    mt.init_weights(model)


def what_is_said_of_other_meshes() -> list[str]:
    world = torch.distributed.get_world_size()
    named = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "model"))
    data = init_device_mesh("cpu", (world,), mesh_dim_names=("data",))
    unnamed = init_device_mesh("cpu", (world,))
    model, plain = sharded_model(named, "model"), mlp.Regressor()
    mlp.loss_fn(model(torch.ones(2, 8).double()), torch.ones(2, 1)).backward()
    pipeline = init_device_mesh("cpu", (world, 1), mesh_dim_names=("stage", "dp"))
    stages = mt.split_stages(plain, pipeline["stage"], layers="blocks", first=["enter"], last=["leave"])
    said = []
    for call in (
        lambda: mt.ZeroOptimizer(plain, unnamed),
        lambda: mt.ZeroOptimizer(plain, data),
        lambda: mt.ZeroOptimizer(model, named),
        lambda: mt.ZeroOptimizer(stages, pipeline),
        lambda: mt.clip_grad_norm(plain, unnamed, 1.0),
        lambda: mt.clip_grad_norm(model, data, 1.0),
        lambda: mt.clip_grad_norm(stages, pipeline, 1.0),
        lambda: mt.total_loss(torch.zeros(()), data),
        lambda: mt.split_stages(plain, pipeline, layers="blocks", first=["enter"], last=["leave"]),
        lambda: mt.pipeline_schedule(plain, pipeline, num_microbatches=1, loss_fn=mlp.loss_fn),
        lambda: mt.apply_tensor_parallel(plain, named, mlp.PLAN),
        lambda: mt.CausalLMLoss(8, named),
    ):
        with pytest.raises(mt.LayoutError) as caught:
            call()
        said.append(str(caught.value))
    return said


def test_a_mesh_that_would_be_misread_is_refused():
    for said in run_ranks(what_is_said_of_other_meshes, 2):
        for text, expected in zip(
            said,
            [
                "have no names",
                "the mesh has axes data, expected one of the name 'dp'",
                "blocks.0.up.weight is a DTensor over model, expected only tp",
                "2 stages, 1 on this rank, but mesh axis 'pp' has 1 rank",
                "have no names",
                "the gradient of blocks.0.up.weight is a DTensor over model, expected only data",
                "mesh axis 'pp' has 1 rank",
                "the mesh has axes data, expected one of the name 'pp' or 'dp'",
                'a mesh with axes stage, dp: expected one of them, as in mesh["pp"]',
                'as in mesh["pp"]',
                'a mesh with axes dp, model: expected one of them, as in mesh["tp"]',
                'as in mesh["tp"]',
            ],
            strict=True,
        ):
            assert expected in text


def with_a_frozen_stage(kind: type | None) -> tuple[float, list[torch.Tensor]]:
    """The norm, and the weights of the stage; the first pipeline rank has nothing to train."""
    mesh = mt.build_mesh(mt.Layout(pp=2), "cpu")
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    mt.init_weights(model, std=0.5)
    model[0].requires_grad_(False)
    stage = model[mesh.get_local_rank("pp")]
    optimizer = kind and mt.ZeroOptimizer(stage, mesh, optimizer=kind, lr=0.1)
    if mesh.get_local_rank("pp") == 1:
        stage(torch.ones(2, 4)).sum().backward()
    if optimizer is None:
        return mt.clip_grad_norm(stage, mesh, 1.0).item(), []
    norm = optimizer.clip_grad_norm(1.0).item()
    optimizer.step()
    return norm, list(optimizer.state_dict())


@pytest.mark.parametrize("kind", [None, torch.optim.AdamW, FusedAdamW])
def test_a_rank_whose_stage_is_frozen_takes_part_in_the_norm(kind):
    first, second = run_ranks(with_a_frozen_stage, 2, kind)
    assert first[0] == second[0] == pytest.approx((4 * 4 * 2**2 + 4 * 2**2) ** 0.5)
    assert not first[1]


def fully_sharded(layout: str) -> tuple[DeviceMesh, mt.Stages, torch.optim.Optimizer]:
    mesh = mt.build_mesh(mt.Layout.parse(layout), "cpu")
    with torch.device("meta"):
        model = mlp.Regressor()
    stages = mt.split_stages(model, mesh["pp"], layers="blocks", first=["enter"], last=["leave"])
    mt.apply_tensor_parallel(stages, mesh["tp"], mlp.PLAN)
    mt.init_weights(stages, seed=0, std=0.2, device="cpu", dtype=torch.float64)
    for stage in stages:
        for block in stage.blocks:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(stage, mesh=mesh["dp"])
    kind, options = OPTIMIZERS["adamw"]
    return mesh, stages, kind([p for s in stages for p in s.parameters()], foreach=False, **options)


def with_fully_shard(layout: str, folder: str = "", resume: bool = False):
    """Steps with torch's optimizer; of a resumed run those after the first."""
    mesh, stages, optimizer = fully_sharded(layout)
    state = {"stages": stages, "optimizer": optimizer, "step": 0}
    if resume:
        mt.load(folder, state)
    dp, rank, norms = mesh["dp"].size(), mesh.get_local_rank("dp"), []
    like = torch.empty(mlp.BATCH // dp // 4, 16, dtype=torch.float64, device="meta")
    runner = mt.pipeline_schedule(
        stages,
        mesh["pp"],
        num_microbatches=4,
        loss_fn=lambda output, y: mlp.loss_fn(output, y) * dp,  # fully_shard takes the mean over dp
        boundary=mt.Boundary(inputs=like[:, :8], hidden=like, output=like[:, :1]),
    )
    for step in range(state["step"], STEPS):
        x, y = (part.double().chunk(dp)[rank] for part in mlp.batch_of(step))
        optimizer.zero_grad()
        runner.step(x, y)
        norms.append(mt.clip_grad_norm(stages, mesh, 0.5).item())
        optimizer.step()
        state["step"] += 1
        if folder and state["step"] == 1:
            mt.save(folder, state)
    return norms, {key: whole(value) for key, value in named_parameters(stages)}


def refused_with_fully_shard() -> list[str]:
    mesh, stages, _ = fully_sharded("2x1x1")
    said = []
    runner = mt.pipeline_schedule(stages, mesh["pp"], num_microbatches=4, loss_fn=mlp.loss_fn)
    with pytest.raises(mt.LayoutError) as caught:
        runner.step(torch.ones(4, 8).double(), torch.ones(4, 1).double())
    said.append(str(caught.value))
    with pytest.raises(mt.LayoutError) as caught:
        mt.pipeline_schedule([*stages] * 2, mesh["pp"], "ZBVZeroBubble", num_microbatches=4, loss_fn=mlp.loss_fn)
    return [*said, str(caught.value)]


def test_what_fully_shard_does_not_take_is_refused():
    for shapes, schedule in run_ranks(refused_with_fully_shard, 2):
        assert "fully_shard would gather weights without values" in shapes
        assert "boundary=Boundary(" in shapes
        assert "split_backward=False" in schedule


@pytest.mark.parametrize("layout", ["1x2x2", "2x2x1"])
def test_fully_shard_in_place_of_zero_with_clipping_over_all_axes(layout, tmp_path):
    norms, weights = plain_run("adamw", max_norm=0.5)
    assert norms[0] > 0.5
    runs = run_ranks(with_fully_shard, 4, layout, str(tmp_path))
    resumed = run_ranks(with_fully_shard, 2, "1x2x1", str(tmp_path), True)
    for ours_norms, ours in [*runs, *resumed]:
        torch.testing.assert_close(ours_norms, norms[-len(ours_norms) :], rtol=1e-12, atol=0)
        for key, weight in ours.items():
            torch.testing.assert_close(weight, weights[key], rtol=0, atol=1e-12, msg=key)
    assert len(resumed[0][0]) == STEPS - 1


def pipeline_alone(given: bool) -> float:
    mesh = mt.build_mesh(mt.Layout(pp=2), "cpu")
    model = mlp.Regressor().double()
    mt.init_weights(model, seed=0, std=0.2)
    stages = mt.split_stages(model, mesh["pp"], layers="blocks", first=["enter"], last=["leave"])
    like = torch.empty(16, 16, dtype=torch.float64, device="meta")
    boundary = mt.Boundary(inputs=like[:, :8], hidden=like, output=like[:, :1])
    runner = mt.pipeline_schedule(
        stages, mesh["pp"], "1F1B", num_microbatches=4, loss_fn=mlp.loss_fn, boundary=boundary if given else None
    )
    x, y = (part.double() for part in mlp.batch_of(0))
    runner.step(x, y)
    return mt.clip_grad_norm(stages, mesh, None).item()


@pytest.mark.parametrize("given", [True, False])
def test_a_pipeline_of_an_unsharded_model_leaves_gradients_in_grad(given):
    expected = plain_run("adamw")[0][0]
    for norm in run_ranks(pipeline_alone, 2, given):
        assert norm == pytest.approx(expected, rel=1e-12)
