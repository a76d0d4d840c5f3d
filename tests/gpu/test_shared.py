"""Ranks that share the one GPU over gloo: the single process's curve.

Of the collectives that training uses gloo carries CUDA tensors in all-reduce and broadcast only (the table of
backends in torch.distributed's documentation), which is data parallelism with the optimizer state kept whole. All
other layouts need a GPU a rank, and NCCL.
"""

import os

import pytest
import torch

from meshtron.loop import train
from meshtron.testing import run_ranks
from tests.runs import logged, small_recipe, token_folder


def train_on_the_first_gpu(folder, layout):
    os.environ["LOCAL_RANK"] = "0"
    recipe = small_recipe(
        folder, layout, zero=0, run={"dir": str(folder / "run"), "device": "cuda"}, training={"steps": 4}
    )
    train(recipe)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_on_one_gpu_follow_a_single_process_on_the_cpu(tmp_path, ranks):
    for name in ("alone", "shared"):
        token_folder(tmp_path / name / "data")
    train(
        small_recipe(
            tmp_path / "alone", run={"dir": str(tmp_path / "alone/run"), "device": "cpu"}, training={"steps": 4}
        )
    )
    run_ranks(train_on_the_first_gpu, ranks, tmp_path / "shared", f"1x{ranks}x1")
    found, expected = (
        torch.tensor([(line["loss"], line["grad_norm"]) for line in logged(tmp_path / name)])
        for name in ("shared", "alone")
    )
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=0)
