"""The plain GPT-2 of examples/gpt2 through the public surface equals itself on one process, at every layout."""

import functools
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import meshtron as mt
from meshtron.testing import run_ranks

FOLDER = Path(__file__).parents[1] / "examples" / "gpt2"
BATCH, SEQUENCE, STEPS = 8, 8, 2


@functools.cache
def example(name: str):
    sys.path.insert(0, str(FOLDER))  # train.py finds model.py beside it
    spec = importlib.util.spec_from_file_location(f"gpt2_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path.remove(str(FOLDER))
    return module


def config(dropout: float = 0.0):
    return example("model").Config(
        vocab_size=61, max_length=SEQUENCE, width=32, num_layers=4, num_heads=4, dropout=dropout
    )


def global_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(61, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(step))
    return ids[:, :-1], ids[:, 1:]


def plain_run() -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """torch's AdamW and clipping on the model as it is written, fused q, k, v and all."""
    model = example("model").GPT2(config()).double()
    unpacked = example("model").GPT2(config()).double()
    mt.unpack_linear(unpacked, "blocks.*.attn.qkv", parts=3)
    mt.init_weights(unpacked, seed=0, std=model.init_std)
    model.load_state_dict(fused(unpacked.state_dict()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, norms = [], []
    for step in range(STEPS):
        tokens, labels = global_batch(step)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
    return losses, norms, model.state_dict()


def fused(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights of the unpacked model under the names of the plain one."""
    joined = {name: value for name, value in weights.items() if ".qkv." not in name}
    for name in weights:
        if ".qkv.0." in name:
            parts = [weights[name.replace(".qkv.0.", f".qkv.{part}.")] for part in range(3)]
            joined[name.replace(".qkv.0.", ".qkv.")] = torch.cat(parts)
    return joined


def sharded_run(layout: str, schedule: str) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    mesh = mt.build_mesh(mt.Layout.parse(layout), "cpu")
    local, rank = BATCH // mesh["dp"].size(), mesh.get_local_rank("dp")
    optimizer, runner = example("train").build(
        config(), mesh, BATCH * SEQUENCE, num_microbatches=min(local, 4), schedule=schedule, dtype=torch.float64
    )
    losses, norms = [], []
    for step in range(STEPS):
        tokens, labels = (part[rank * local : (rank + 1) * local] for part in global_batch(step))
        losses.append(mt.total_loss(runner.step(tokens, labels), mesh).item())
        norms.append(optimizer.clip_grad_norm(0.5).item())
        optimizer.step()
    weights = {name: getattr(w, "full_tensor", lambda w=w: w)() for name, w in optimizer.masters().items()}
    return losses, norms, {name: weight.detach().clone() for name, weight in weights.items()}


LAYOUTS = ["1x1x1", "1x1x4", "1x4x1", "4x1x1", "1x2x2", "2x1x2 ZBVZeroBubble", "2x2x1", "2x2x2"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_equals_the_plain_model(layout):
    mesh, _, schedule = layout.partition(" ")
    losses, norms, weights = plain_run()
    ranks = run_ranks(sharded_run, mt.Layout.parse(mesh).world_size, mesh, schedule or "1F1B")
    held = {}
    for ours_losses, ours_norms, ours in ranks:
        torch.testing.assert_close(ours_losses, losses, rtol=1e-12, atol=0)
        torch.testing.assert_close(ours_norms, norms, rtol=1e-12, atol=0)
        for name, weight in ours.items():
            torch.testing.assert_close(weight, held.setdefault(name, weight), rtol=0, atol=0)
    found = fused(held)
    for name, weight in weights.items():
        if name != "head.weight":  # tied: its state goes by the embedding's name
            torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-12, msg=name)


def dropped() -> torch.Tensor:
    mesh = mt.build_mesh(mt.Layout(dp=2, tp=2), "cpu")
    _, runner = example("train").build(config(dropout=0.5), mesh, 1, num_microbatches=1)
    mt.seed_ranks(mesh, seed=7)
    return runner.stages[0].blocks[0].dropout(torch.ones(4, 8, 32))


def test_dropout_is_equal_within_a_tp_group_and_different_over_dp():
    first, second, third, fourth = run_ranks(dropped, 4)
    assert torch.equal(first, second)
    assert torch.equal(third, fourth)
    assert not torch.equal(first, third)
    assert 0.3 < (first == 0).float().mean() < 0.7


def test_the_example_trains_under_torchrun(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(FOLDER / "train.py"), "1x1x2", str(FOLDER / "model.py"), "4"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(FOLDER.parents[1]), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[3].rstrip(",")) for line in done.stdout.splitlines() if line.startswith("step")]
    assert losses[-1] < losses[0]
    assert (tmp_path / "runs" / "gpt2" / "step-00000004" / "manifest.json").exists()


def test_the_example_is_short_and_its_model_has_never_heard_of_meshtron():
    model, train = ((FOLDER / name).read_text() for name in ("model.py", "train.py"))
    assert "meshtron" not in model
    assert "distributed" not in model
    assert len(model.splitlines()) < 150
    assert len(train.splitlines()) < 60
