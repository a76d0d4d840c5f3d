"""Models that were not written for meshtron, through the public surface: transformers' own, and no language model."""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import meshtron as mt
from examples import mlp_regression as mlp
from meshtron.testing import run_ranks

SOURCE = Path(__file__).parents[1] / "examples" / "transformers_llama" / "train.py"
BATCH, SEQUENCE, STEPS = 8, 8, 2
FAMILIES = {"llama": {}, "qwen2": {"tie_word_embeddings": True}}


def example():
    spec = importlib.util.spec_from_file_location("transformers_example", SOURCE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def global_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(96, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(step))
    return ids[:, :-1], ids[:, 1:]


def plain_run(family: str):
    """transformers on one process with torch's AdamW."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(example().config_of(family, **FAMILIES[family])).double()
    mt.init_weights(model, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        tokens, labels = global_batch(step)
        loss = F.cross_entropy(model(tokens).logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses, model


def sharded_run(family: str, layout: str, folder: str) -> list[float]:
    mesh = mt.build_mesh(mt.Layout.parse(layout), "cpu")
    local, rank = BATCH // mesh["dp"].size(), mesh.get_local_rank("dp")
    config = example().config_of(family, **FAMILIES[family])
    optimizer, runner = example().build(config, mesh, BATCH * SEQUENCE, local, dtype=torch.float64)
    losses = []
    for step in range(STEPS):
        tokens, labels = (part[rank * local :][:local] for part in global_batch(step))
        losses.append(mt.total_loss(runner.step(tokens, labels), mesh).item())
        optimizer.step()
    mt.save(folder, {"optimizer": optimizer}, step=STEPS)
    return losses


@pytest.mark.parametrize(("family", "layout"), [("llama", "2x2x2"), ("llama", "1x2x2"), ("qwen2", "2x1x2")])
def test_a_transformers_model_equals_itself_and_its_export_opens_in_transformers(family, layout, tmp_path):
    from transformers import AutoModelForCausalLM

    losses, model = plain_run(family)
    for ours in run_ranks(sharded_run, mt.Layout.parse(layout).world_size, family, layout, str(tmp_path)):
        torch.testing.assert_close(ours, losses, rtol=1e-7, atol=0)
    config = example().config_of(family, **FAMILIES[family])
    example().export(tmp_path / f"step-{STEPS:08d}", config, tmp_path / "exported")
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    tokens, _ = global_batch(9)
    with torch.no_grad():
        torch.testing.assert_close(opened(tokens).logits, model(tokens).logits.float(), rtol=0, atol=1e-4)


def regression(layout: str, schedule: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    mesh = mt.build_mesh(mt.Layout.parse(layout), "cpu")
    local, rank = mlp.BATCH // mesh["dp"].size(), mesh.get_local_rank("dp")
    optimizer, runner = mlp.build(mesh, num_microbatches=4, schedule=schedule, dtype=torch.float64)
    losses = []
    for step in range(3):
        x, y = (part.double()[rank * local :][:local] for part in mlp.batch_of(step))
        losses.append(mt.total_loss(runner.step(x, y), mesh).item())
        optimizer.step()
    return losses, {
        name: getattr(w, "full_tensor", lambda w=w: w)().clone() for name, w in optimizer.masters().items()
    }


@pytest.mark.parametrize("layout", ["1x1x1", "2x2x2", "4x1x2", "2x1x1 DualPipeV"])
def test_a_regression_with_its_own_loss_equals_itself(layout):
    model = mlp.Regressor().double()
    mt.init_weights(model, seed=0, std=0.2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    losses = []
    for step in range(3):
        x, y = (part.double() for part in mlp.batch_of(step))
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    mesh, _, schedule = layout.partition(" ")
    for ours, weights in run_ranks(regression, mt.Layout.parse(mesh).world_size, mesh, schedule or "1F1B"):
        torch.testing.assert_close(ours, losses, rtol=1e-12, atol=0)
        for name, weight in weights.items():
            torch.testing.assert_close(weight, model.get_parameter(name).detach(), rtol=0, atol=1e-12, msg=name)
