"""Sizes that do not divide are never padded: not in a checkpoint, and not where a token is chosen."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from meshtron.build import build_job
from meshtron.checkpoint import Checkpointer
from meshtron.generate.engine import PlacedModel
from meshtron.mesh import Layout, build_mesh
from meshtron.models import model_spec
from meshtron.models.llama import Llama
from meshtron.parallel.placement import shard_range
from meshtron.resume import Progress, save
from meshtron.testing import run_ranks
from tests.combinations import recipe_of

UNEVEN = {"model.vocab_size": 101, "model.hidden_size": 20, "model.head_dim": 8, "model.num_hidden_layers": 2}


def save_step(folder: Path, mesh: str) -> None:
    recipe = recipe_of(UNEVEN | {"mesh": mesh}).resolve(torch.distributed.get_world_size())
    job = build_job(recipe, torch.device("cpu"))
    with Checkpointer(folder, async_save=False) as checkpointer:
        save(job, checkpointer, Progress(step=1))


@pytest.mark.parametrize(("mesh", "ranks"), [("1x2x2", 4), ("2x1x4", 8)])
def test_a_checkpoint_holds_every_element_once_and_no_other(tmp_path, mesh, ranks):
    run_ranks(save_step, ranks, tmp_path, mesh)
    recipe = recipe_of(UNEVEN | {"mesh": "1x1x1"})
    with torch.device("meta"):
        model = Llama(model_spec("llama").config(recipe.model.model_dump()))
    held: Counter[str] = Counter()  # elements in all files, by tensor
    for file in tmp_path.glob("step-*/*.safetensors"):
        with safe_open(file, "pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118, it is no mapping
                held[key.partition("[")[0]] += tensors.get_tensor(key).numel()
    for name, parameter in model.named_parameters():
        alike = {key: held[key] for key in held if key.endswith(f".{name}") and "step" not in key}
        assert len(alike) == 3  # the weight and both moments
        assert set(alike.values()) == {parameter.numel()}, alike


def gathered(vocab_size: int) -> torch.Tensor:
    """Rows of logits of which each rank has its columns."""
    tp = torch.distributed.get_world_size()
    mine = shard_range(vocab_size, tp, torch.distributed.get_rank())
    model = PlacedModel(
        stages=[],
        tp_mesh=build_mesh(Layout(tp=tp), "cpu")["tp"],
        vocab_size=vocab_size,
        hidden_size=1,
        max_length=1,
    )
    return model._gather_vocabulary(below_zero(vocab_size)[:, mine.start : mine.stop])


def below_zero(vocab_size: int) -> torch.Tensor:
    """Logits that any padding with zeros would win against."""
    return -1 - torch.rand(5, vocab_size, generator=torch.Generator().manual_seed(vocab_size))


@pytest.mark.parametrize(("vocab_size", "tp"), [(101, 2), (101, 4), (7, 4)])
def test_rows_of_logits_are_whole_and_no_longer(vocab_size, tp):
    for rows in run_ranks(gathered, tp, vocab_size):
        assert torch.equal(rows, below_zero(vocab_size))
