"""The real loop on a GPU: the CPU's curve, compiled and eager alike, recomputation, and bit-equal resumption."""

import pytest
import torch

from meshtron.loop import train
from tests.runs import logged, small_recipe, token_folder


def run(folder, name, **sections):
    """Losses and gradient norms of a run of the small recipe on ``folder/data``, left in ``folder/name``."""
    sections["run"] = {"dir": str(folder / name / "run"), **sections.get("run", {})}
    train(small_recipe(folder, **sections))
    return [(line["loss"], line["grad_norm"]) for line in logged(folder / name)]


@pytest.fixture
def folder(tmp_path):
    token_folder(tmp_path / "data")
    return tmp_path


@pytest.fixture
def on_cpu(folder):
    return run(folder, "cpu", run={"device": "cpu"}, training={"steps": 6})


def test_float32_follows_the_cpu(folder, on_cpu):
    found = run(folder, "cuda", run={"device": "cuda"}, training={"steps": 6})
    torch.testing.assert_close(torch.tensor(found), torch.tensor(on_cpu), rtol=2e-4, atol=0)


@pytest.mark.parametrize(
    "training",
    [
        {},
        {"compile": True},
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": "full", "compile": True},
        {"activation_checkpointing": "selective", "compile": True},
        {"micro_batch_size": 16},
    ],
    ids=["eager", "compiled", "full", "full-compiled", "selective-compiled", "one-micro-batch"],
)
def test_bfloat16_follows_the_float32_curve(folder, on_cpu, training):
    changes = {"steps": 6, "param_dtype": "bfloat16", **training}
    found = run(folder, "bf16", run={"device": "cuda"}, training=changes)
    losses, expected = (torch.tensor(curve)[:, 0] for curve in (found, on_cpu))
    torch.testing.assert_close(losses, expected, rtol=5e-3, atol=0)


@pytest.mark.parametrize("attention", ["auto", "sdpa", "flex"])
@pytest.mark.parametrize(
    "training",
    [{}, {"compile": True, "activation_checkpointing": "full"}, {"activation_checkpointing": "selective"}],
    ids=["eager", "full-compiled", "selective"],
)
def test_document_masks_follow_the_cpu(folder, attention, training):
    def losses(name, device, attention, masked, **training):
        return run(
            folder,
            name,
            run={"device": device},
            model={"attention": attention, "hidden_size": 64, "max_position_embeddings": 128},  # flex: 16 a head
            data={"train": [{"path": str(folder / "data")}], "document_mask": masked},
            training={"steps": 4, "seq_len": 128, **training},
        )

    expected = losses("cpu", "cpu", "sdpa", True)
    found = losses("cuda", "cuda", attention, True, **training)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-3, atol=0)
    assert losses("unmasked", "cpu", "sdpa", False)[-1][1] != pytest.approx(expected[-1][1], rel=5e-3)


def test_resuming_is_bit_equal(folder):
    options = {"param_dtype": "bfloat16", "micro_batch_size": 16}
    device = {"device": "cuda", "deterministic": True}
    whole = run(folder, "whole", run=device, training={"steps": 6, **options}, checkpoint={"interval": 3})
    third = folder / "whole" / "run" / "checkpoints" / "step-00000003"
    resumed = run(folder, "resumed", run=device, training={"steps": 6, **options}, checkpoint={"resume": str(third)})
    assert resumed == whole[3:]
