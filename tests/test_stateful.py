"""meshtron.save and load: anything stateful, whole or not there, alone and over ranks."""

import pytest
import torch
from torch import nn

import meshtron as mt
from meshtron.testing import run_ranks


class Counter:
    """The least that has state."""

    def __init__(self) -> None:
        self.seen, self.total = 0, torch.zeros(3)

    def state_dict(self):
        return {"seen": self.seen, "total": self.total}

    def load_state_dict(self, state):
        self.seen, self.total = state["seen"], state["total"]


def parts(seed: int):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    return model, optimizer, scheduler


def train(model, optimizer, scheduler, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(16, 4, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
        scheduler.step()


def test_modules_optimizers_schedulers_counters_and_numbers_come_back(tmp_path):
    model, optimizer, scheduler = parts(0)
    counter = Counter()
    train(model, optimizer, scheduler, 3)
    counter.seen, counter.total[1] = 7, 5.0
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "more": {"counter": counter, "step": 3}}
    folder = mt.save(tmp_path, state | {"order": torch.arange(5)}, step=3, meta={"by": "test"})
    assert folder == tmp_path / "step-00000003"

    other, other_optimizer, other_scheduler = parts(1)
    other_counter = Counter()
    loaded = {
        "model": other,
        "optimizer": other_optimizer,
        "scheduler": other_scheduler,
        "more": {"counter": other_counter, "step": 0},
        "order": torch.zeros(5, dtype=torch.int64),
    }
    assert mt.load(tmp_path, loaded) == {"by": "test"}
    assert loaded["more"]["step"] == 3
    assert loaded["order"].tolist() == [0, 1, 2, 3, 4]
    assert other_counter.seen == 7
    assert other_counter.total.tolist() == [0, 5, 0]
    train(model, optimizer, scheduler, 2)
    train(other, other_optimizer, other_scheduler, 2)
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


def test_what_cannot_be_saved_is_named_and_nothing_is_written(tmp_path):
    model, optimizer, _ = parts(0)
    with pytest.raises(mt.CheckpointError, match="optimizer: parameters of AdamW have no names"):
        mt.save(tmp_path / "a", {"optimizer": optimizer})
    with pytest.raises(mt.CheckpointError, match="thing: object cannot be saved"):
        mt.save(tmp_path / "a", {"model": model, "thing": object()})
    assert not (tmp_path / "a").exists()
    mt.save(tmp_path, {"model": model})
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(mt.CheckpointError, match=r"missing extra; |missing extra"):
        mt.load(tmp_path, {"model": model, "extra": torch.zeros(2)})
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    file = next((tmp_path / "step-00000000").glob("rank-*"))
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(mt.CheckpointError, match="is damaged"):
        mt.load(tmp_path, {"model": model})


def zero_run(folder: str, layout: str, resume: bool) -> dict[str, torch.Tensor]:
    mesh = mt.build_mesh(mt.Layout.parse(layout), "cpu")
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    mt.init_weights(model, seed=1)
    optimizer = mt.ZeroOptimizer(model, mesh, lr=0.1)
    progress = {"step": 0}
    state = {"optimizer": optimizer, "progress": progress}
    if resume:
        mt.load(folder, state)
    rank, dp = mesh.get_local_rank("dp"), mesh["dp"].size()
    while progress["step"] < (6 if resume else 3):
        x = torch.randn(12, 4, generator=torch.Generator().manual_seed(progress["step"]))
        model(x.chunk(dp)[rank]).square().sum().div(12).backward()
        optimizer.step()
        progress["step"] += 1
    if not resume:
        mt.save(folder, state, step=progress["step"])
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def test_zero_alone_is_saved_and_resumes_at_another_dp(tmp_path):
    run_ranks(zero_run, 3, str(tmp_path), "1x3x1", False)
    found = [run_ranks(zero_run, dp, str(tmp_path), f"1x{dp}x1", True)[0] for dp in (1, 2, 4)]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    mt.init_weights(model, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(6):
        optimizer.zero_grad()
        x = torch.randn(12, 4, generator=torch.Generator().manual_seed(step))
        model(x).square().sum().div(12).backward()
        optimizer.step()
    for weights in found:
        for name, value in model.state_dict().items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.NAdam, torch.optim.Rprop])
@pytest.mark.parametrize("steps", [0, 2])
def test_saving_changes_no_step_that_follows(kind, steps, tmp_path):
    """Also where a parameter has had no gradient yet, so the optimizer has no state for it."""

    def run(save: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        optimizer = kind(model.parameters(), lr=0.1)
        for step in range(steps + 2):
            if step == steps and save:
                mt.save(tmp_path, {"model": model, "optimizer": optimizer})
            optimizer.zero_grad()
            used = model[:1] if step < steps else model
            sum(part(torch.ones(2, 3) * step).square().sum() for part in used).backward()
            optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    for saved, other in zip(run(True), run(False), strict=True):
        assert torch.equal(saved, other)
