"""Ranks that share the one GPU over gloo, as far as gloo carries CUDA tensors: the single process's curve."""

import os

import pytest
import torch

from meshtron.loop import train
from meshtron.testing import run_ranks
from tests.runs import logged, small_recipe, token_folder


def train_on_the_first_gpu(folder, layout, zero):
    os.environ["LOCAL_RANK"] = "0"
    recipe = small_recipe(
        folder, layout, zero=zero, run={"dir": str(folder / "run"), "device": "cuda"}, training={"steps": 4}
    )
    train(recipe)


@pytest.mark.parametrize(
    ("layout", "zero"),
    [("1x2x1", 0), ("1x2x1", 1), ("1x1x2", 1), ("2x1x1", 1), ("1x2x2", 1), ("1x4x1", 1)],
    ids=lambda value: str(value),
)
def test_ranks_on_one_gpu_follow_a_single_process_on_the_cpu(tmp_path, layout, zero):
    for name in ("alone", "shared"):
        token_folder(tmp_path / name / "data")
    train(
        small_recipe(
            tmp_path / "alone", run={"dir": str(tmp_path / "alone/run"), "device": "cpu"}, training={"steps": 4}
        )
    )
    world = torch.tensor([int(part) for part in layout.split("x")]).prod().item()
    run_ranks(train_on_the_first_gpu, world, tmp_path / "shared", layout, zero, timeout_s=40)
    found, expected = (
        torch.tensor([(line["loss"], line["grad_norm"]) for line in logged(tmp_path / name)])
        for name in ("shared", "alone")
    )
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=0)
