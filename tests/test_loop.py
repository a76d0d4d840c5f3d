"""Training from a recipe: the plain run it equals, resuming at every layout, what a run leaves behind."""

import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from meshtron.build import build_job
from meshtron.checkpoint import load
from meshtron.data import Stage, TrainStream, open_source
from meshtron.feed import open_validation
from meshtron.initialize import init_weights
from meshtron.loop import train
from meshtron.mesh import Layout, build_mesh
from meshtron.models.llama import Llama, config_of, flops_per_token, init_std
from meshtron.passes import validate
from meshtron.recipe import Recipe, load_recipe
from meshtron.testing import run_ranks
from meshtron.world import process_group
from tests.runs import VOCAB, logged, small_recipe, token_folder

CONTRACT_KEYS = {
    *("step", "tokens", "samples", "loss", "grad_norm", "lr", "mfu", "memory_gib", "data_wait_s", "step_s"),
    *("tokens_per_s", "tokens_per_s_per_device"),
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return token_folder(tmp_path_factory.mktemp("corpus") / "data")


@pytest.fixture
def folder(tmp_path, corpus) -> Path:
    (tmp_path / "data").symlink_to(corpus)
    return tmp_path


@pytest.fixture(scope="module")
def finished(tmp_path_factory, corpus) -> Path:
    """The folder of a run of ten steps at 2x2x2, to be copied before it is changed."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "data").symlink_to(corpus)
    run(small_recipe(folder, "2x2x2"), "2x2x2")
    return folder


def run(recipe: Recipe, layout: str) -> None:
    run_ranks(train, Layout.parse(layout).world_size, recipe)


def losses(folder: Path, first: int = 1) -> list[float]:
    return [line["loss"] for line in logged(folder) if line["step"] >= first]


def weights(folder: Path, recipe: Recipe, step: int) -> dict[str, torch.Tensor]:
    """Every weight and moment of a checkpoint, whole."""
    model = Llama(config_of(recipe.model.model_dump()))
    tensors = {}
    for name, parameter in model.named_parameters():
        for key in (f"model.{name}", f"optimizer.exp_avg.{name}", f"optimizer.exp_avg_sq.{name}"):
            tensors[key] = torch.empty_like(parameter, requires_grad=False)
        tensors[f"optimizer.step.{name}"] = torch.empty(())
    load(folder / "run" / "checkpoints" / f"step-{step:08d}", tensors)
    return tensors


def plain_losses(recipe: Recipe, corpus: Path) -> list[float]:
    """The whole run again in plain torch and numpy; only the sample order is asked of meshtron."""
    training, optim = recipe.training, recipe.optimizer
    config = config_of(recipe.model.model_dump())
    model = Llama(config)
    init_weights([model], seed=recipe.run.seed, std=lambda name: init_std(config, name))
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": optim.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=optim.lr,
        betas=optim.betas,
        eps=optim.eps,
    )
    source = open_source(corpus, seq_len=training.seq_len, vocab_size=recipe.model.vocab_size)
    stream = TrainStream(
        [Stage(start=0, seq_len=training.seq_len, sources=(source,))],
        global_batch_size=training.global_batch_size,
        seed=recipe.run.seed,
    )
    curve = []
    for step in range(training.steps):
        for group in optimizer.param_groups:
            warm, rest = recipe.lr_schedule.warmup_steps, training.steps - recipe.lr_schedule.warmup_steps
            after = 0.5 * (1 + np.cos(np.pi * (step - warm) / rest))
            group["lr"] = optim.lr * ((step + 1) / warm if step < warm else after)
        batch = stream.batch(step * training.global_batch_size)
        loss = F.cross_entropy(model(batch.tokens).flatten(0, 1), batch.labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), optim.grad_clip)
        optimizer.step()
        curve.append(loss.item())
    stream.close()
    return curve


def test_a_run_equals_plain_torch_and_leaves_the_contract_behind(finished, corpus):
    lines = logged(finished)
    assert [line["step"] for line in lines] == list(range(1, 11))
    expected = plain_losses(small_recipe(finished, "2x2x2"), corpus)
    torch.testing.assert_close(losses(finished), expected, rtol=1e-5, atol=0)
    assert lines[-1]["samples"] == 160
    assert lines[-1]["tokens"] == 160 * 16
    assert set(lines[-1]) == CONTRACT_KEYS
    steps = sorted(path.name for path in (finished / "run" / "checkpoints").iterdir())
    assert steps == ["step-00000005", "step-00000010"]
    resolved = load_recipe(finished / "run" / "recipe.toml")
    assert (resolved.parallel.dp, resolved.lr_schedule.decay_steps) == (2, 8)


@pytest.mark.parametrize("layout", ["1x1x1", "1x4x1", "4x2x1", "1x2x4", "2x1x2"])
def test_resume_at_any_layout_continues_the_run_that_never_stopped(folder, finished, layout):
    shutil.copytree(finished / "run", folder / "run")
    shutil.rmtree(folder / "run" / "checkpoints" / "step-00000010")
    run(small_recipe(folder, layout, zero=int(layout != "1x4x1")), layout)
    torch.testing.assert_close(losses(folder, first=6), losses(finished, first=6), rtol=1e-5, atol=0)
    # And back: what that layout saved goes on at the first one.
    run(small_recipe(folder, "2x2x2", training={"steps": 11}), "2x2x2")
    assert [line["step"] for line in logged(folder)] == list(range(1, 12))


def test_mfu_is_of_the_peak_that_the_recipe_states(folder):
    recipe = small_recipe(folder, training={"steps": 1}, metrics={"peak_tflops": 0.5})
    run(recipe, "1x1x1")
    (line,) = logged(folder)
    flops = flops_per_token(config_of(recipe.model.model_dump()), recipe.training.seq_len)
    assert line["mfu"] == pytest.approx(line["tokens_per_s"] * flops / 0.5e12)


def dropping_job(recipe: Recipe) -> tuple[list[float], list[bool]]:
    """Validation losses before and after a number is drawn, of a job with dropout; and whether it trains on."""
    job = build_job(recipe.resolve(1), torch.device("cpu"))
    (stage,) = job.model.stages
    stage.layers[0].register_forward_hook(lambda module, args, out: F.dropout(out, 0.5, module.training))
    stage.layers[1].eval()  # as somebody leaves a frozen part
    held_out = open_validation(job.recipe, job.mesh, job.device)
    losses = [validate(job, held_out)]
    torch.rand(1)
    losses.append(validate(job, held_out))
    return losses, [layer.training for layer in stage.layers]


def test_validation_runs_without_dropout_and_leaves_modes_as_they_were(folder):
    held_out = token_folder(folder / "held_out", documents=5, seed=1)
    recipe = small_recipe(folder, validation={"interval": 1, "data": [{"path": str(held_out)}]})
    ((losses, training),) = run_ranks(dropping_job, 1, recipe)
    assert losses[0] == losses[1]
    assert training == [True, False, True, True]


def test_an_interval_of_validation_behind_the_last_step_is_said(folder, caplog):
    held_out = token_folder(folder / "held_out", documents=5, seed=1)
    recipe = small_recipe(folder, validation={"interval": 11, "data": [{"path": str(held_out)}]})
    with process_group(torch.device("cpu")):
        open_validation(recipe.resolve(1), build_mesh(Layout(), "cpu"), torch.device("cpu"))
    assert "validation.interval: 11, but the run ends at step 10: nothing is validated" in caplog.text


def test_resume_at_the_same_layout_is_bit_equal(folder):
    recipe = small_recipe(folder, "2x1x2")
    run(recipe, "2x1x2")
    uninterrupted, expected = losses(folder), weights(folder, recipe, 10)
    shutil.rmtree(folder / "run" / "checkpoints" / "step-00000010")
    run(recipe, "2x1x2")
    assert losses(folder) == uninterrupted
    for name, tensor in weights(folder, recipe, 10).items():
        assert torch.equal(tensor, expected[name]), name


def held_out_loss(recipe: Recipe) -> float:
    job = build_job(recipe.resolve(torch.distributed.get_world_size()), torch.device("cpu"))
    return validate(job, open_validation(job.recipe, job.mesh, job.device))


def test_validation_is_the_mean_over_the_set_once_at_every_layout(folder):
    held_out = token_folder(folder / "held_out", documents=17, seed=1)
    samples = open_source(str(held_out), seq_len=16, vocab_size=VOCAB).dataset
    assert len(samples) % 8 == 3  # a last global batch with samples on some dp ranks only
    config = config_of(small_recipe(folder).model.model_dump())
    model = Llama(config).double()
    init_weights([model], seed=0, std=lambda name: init_std(config, name))
    losses, count = 0.0, 0
    for sample in (samples[index] for index in range(len(samples))):
        logits = model(torch.from_numpy(sample.tokens)[None])[0]
        losses += F.cross_entropy(logits, torch.from_numpy(sample.labels), reduction="sum").item()
        count += len(sample.labels)
    for layout, micro_batch, schedule in (
        ("1x1x1", 8, "1F1B"),
        ("2x1x2", 2, "1F1B"),
        ("1x4x1", 1, "1F1B"),
        ("2x2x1", 2, "AFAB"),
        ("2x4x1", 1, "ZBVZeroBubble"),
    ):
        recipe = small_recipe(
            folder,
            layout,
            validation={"interval": 1, "data": [{"path": str(held_out)}]},
            training={"global_batch_size": 8, "micro_batch_size": micro_batch, "param_dtype": "float64"},
            parallel={"schedule": schedule},
        )
        for found in run_ranks(held_out_loss, math.prod(map(int, layout.split("x"))), recipe):
            assert found == pytest.approx(losses / count, rel=1e-10)
