"""A family of a user's own in a recipe, through train.py: no line of meshtron changes."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.nn import functional as F

import meshtron
from meshtron.build import check_head, model_section
from meshtron.comparison import Report, compare_recipe, launch, parse_variants, worker
from meshtron.comparison.subject import synthetic_batch
from meshtron.errors import RecipeError
from meshtron.estimate import estimate
from meshtron.models import model_spec
from meshtron.recipe import Recipe
from meshtron.testing import run_ranks
from tests.runs import token_folder

ROOT = Path(__file__).parents[1]
SPEC = """
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional as F
from meshtron import StageLayout


class Layer(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x):
        # every token also sees the mean of those before it
        mean = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        return x + self.down(F.relu(self.up(x + mean)))


class Net(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.table = nn.Embedding(model["vocab_size"], model["width"])
        self.layers = nn.ModuleList(Layer(model["width"], model["inner"]) for _ in range(model["depth"]))
        self.out = nn.Linear(model["width"], model["vocab_size"], bias=False)

    def forward(self, x):
        x = self.table(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


class MySpec:
    stages = StageLayout(layers="layers", first=("table",), last=("out",))

    def build(self, model):
        return Net(model)

    def plan(self, model, sequence_parallel):
        return {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}


class NotASpec:
    stages = None
"""
RECIPE = """
[run]
name = "own"
device = "cpu"
[model]
family = "my_net:MySpec"
vocab_size = 96
width = 16
inner = 32
depth = 2
[training]
steps = 4
seq_len = 16
global_batch_size = 8
micro_batch_size = 2
param_dtype = "float32"
[data]
train = [{ path = "data" }]
"""


_module: dict[str, Any] = {}
exec(SPEC, _module)


class SmoothedLoss:
    denominator = 1.0

    def __call__(self, logits, labels):
        sums = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.5, reduction="sum")
        return sums / self.denominator


class OwnLoss(_module["MySpec"]):
    def loss(self, model, tp_mesh):
        return SmoothedLoss()

    def flops_per_token(self, model, sequence):
        return 6 * model["width"] * sequence


def recipe_of(spec: str) -> Recipe:
    """The example's recipe with a family of this file; parity makes up its data."""
    values = tomllib.loads(RECIPE)
    values["model"]["family"] = f"{__name__}:{spec}"
    values["data"] = {"train": [{"path": "no/such/folder"}]}
    return Recipe(**values)


def in_process_parity(recipe: Recipe, layouts: str, monkeypatch: pytest.MonkeyPatch) -> Report:
    """``meshtron parity`` of one step, on the tests' ranks instead of torchrun's."""
    monkeypatch.setattr(launch, "_torchrun", lambda ranks, folder: run_ranks(worker.main, ranks, folder))
    return compare_recipe(recipe, parse_variants(layouts, "1F1B"), steps=1)


def test_a_familys_own_loss_and_flops_are_used_at_every_layout(monkeypatch):
    recipe = recipe_of("OwnLoss")
    report = in_process_parity(recipe, "1x1x1,2x1x1,1x2x1", monkeypatch)
    assert report.equal
    model = _module["Net"](model_section(recipe)).double()
    meshtron.init_weights(model, seed=0, std=recipe.model.init_std)
    batch = synthetic_batch(96, 8, 16, seed=0)
    loss = F.cross_entropy(model(batch.tokens).flatten(0, 1), batch.labels.flatten(), label_smoothing=0.5)
    assert report.outcomes[0].losses == pytest.approx([loss.item()], rel=1e-12)
    assert estimate(recipe.resolve(1)).flops_per_token == 6 * 16 * 16


class NestedHead(_module["Net"]):
    """Its head is frozen and lies deeper in the model; the loss applies it."""

    head_in_loss = False

    def __init__(self, model):
        super().__init__(model)
        self.top = torch.nn.Sequential()
        self.top.out = self._modules.pop("out").requires_grad_(False)

    def forward(self, x):
        x = self.table(x)
        for layer in self.layers:
            x = layer(x)
        return x if self.head_in_loss else self.top(x)


class NestedHeadSpec(_module["MySpec"]):
    stages = meshtron.StageLayout(layers="layers", first=("table",), last=("top",), head="top.out")

    def build(self, model):
        return NestedHead(model)


class ShardedHeadSpec(NestedHeadSpec):
    def plan(self, model, sequence_parallel):
        return super().plan(model, sequence_parallel) | {"top.out": ColwiseParallel()}


class WrongHeadSpec(NestedHeadSpec):
    stages = meshtron.StageLayout(layers="layers", first=("table",), last=("top",), head="out")


@pytest.mark.parametrize("spec", ["NestedHeadSpec", "ShardedHeadSpec"])
def test_a_frozen_head_deeper_in_the_model_is_applied_by_the_loss(spec, monkeypatch):
    recipe = recipe_of(spec)
    report = in_process_parity(recipe, "1x1x1,2x1x1,1x1x2", monkeypatch)
    assert report.equal
    model = NestedHead(model_section(recipe)).double()
    meshtron.init_weights(model, seed=0, std=recipe.model.init_std)
    batch = synthetic_batch(96, 8, 16, seed=0)
    loss = F.cross_entropy(model(batch.tokens).flatten(0, 1), batch.labels.flatten())
    assert report.outcomes[0].losses == pytest.approx([loss.item()], rel=1e-12)


def test_a_head_that_is_none_is_refused():
    with torch.device("meta"):
        model = NestedHead(tomllib.loads(RECIPE)["model"])
    check_head(model, NestedHeadSpec())
    with pytest.raises(RecipeError, match=r"StageLayout.head = 'out': expected a bias-free nn.Linear"):
        check_head(model, WrongHeadSpec())


def train(folder: Path, ranks: int, *overrides: str) -> list[float]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    done = subprocess.run(
        [sys.executable, *launcher, str(ROOT / "train.py"), "recipe.toml", *overrides],
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    name = next((o.partition("=")[2] for o in overrides if o.startswith("run.name=")), "own")
    return [json.loads(line)["loss"] for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]


def test_train_runs_a_users_family_at_one_process_and_two_ranks(tmp_path):
    token_folder(tmp_path / "data")
    (tmp_path / "my_net.py").write_text(SPEC)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    losses = train(tmp_path, 1)
    assert len(losses) == 4
    for layout in ("pp", "tp"):
        ours = train(tmp_path, 2, f"parallel.{layout}=2", f"run.name={layout}")
        torch.testing.assert_close(ours, losses, rtol=1e-5, atol=0)


def test_what_is_no_spec_is_refused(tmp_path, monkeypatch):
    (tmp_path / "my_wrong_net.py").write_text(SPEC)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RecipeError, match=r"NotASpec has no build, plan \(see meshtron.ModelSpec\)"):
        model_spec("my_wrong_net:NotASpec")
    with pytest.raises(RecipeError, match=r"cannot be imported: .*no attribute 'Missing'"):
        model_spec("my_wrong_net:Missing")
