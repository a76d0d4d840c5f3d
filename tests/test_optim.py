"""Learning-rate shapes at their corners, and which parameters decay."""

import math

import pytest
import torch

from meshtron.build import build_job
from meshtron.errors import RecipeError
from meshtron.optim import GroupRule, LearningRate, check_rules, parameter_options
from meshtron.testing import run_ranks
from tests.combinations import recipe_of
from tests.runs import logged_lines


def rate(kind: str, **changes) -> LearningRate:
    return LearningRate(peak=2.0, total_steps=110, kind=kind, warmup_steps=10, min_lr_ratio=0.1, **changes)


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant", "wsd", "1-sqrt"])
def test_warmup_rises_linearly_to_the_peak(kind):
    assert [rate(kind).at(step) for step in (0, 4, 9)] == pytest.approx([0.2, 1.0, 2.0])


@pytest.mark.parametrize(
    ("kind", "step", "share"),
    [
        ("cosine", 10, 1.0),
        ("cosine", 60, 0.5),
        ("cosine", 35, 0.5 * (1 + math.cos(math.pi / 4))),
        ("cosine", 110, 0.0),
        ("linear", 35, 0.75),
        ("linear", 110, 0.0),
        ("wsd", 88, 1.0),
        ("wsd", 99, 0.5),
        ("wsd", 110, 0.0),
        ("1-sqrt", 88, 1.0),
        ("1-sqrt", 93, 1 - math.sqrt(5 / 22)),
        ("1-sqrt", 200, 0.0),
    ],
)
def test_decay_between_peak_and_floor(kind, step, share):
    assert rate(kind).at(step) == pytest.approx(2.0 * (0.1 + 0.9 * share))


def test_constant_stays_and_decay_steps_end_early():
    assert rate("constant").at(1000) == 2.0
    assert rate("cosine", decay_steps=50).at(60) == pytest.approx(0.2)
    assert rate("wsd", decay_steps=50).at(85) == pytest.approx(2.0 * 0.55)


def test_matrices_decay_and_the_last_matching_rule_has_its_say():
    options = parameter_options(
        [GroupRule(match="embed*", weight_decay=0.0), GroupRule(match="embed*", lr_scale=0.5)]
    )
    matrix, vector = torch.Size([4, 4]), torch.Size([4])
    assert options("layers.0.mlp.up_proj.weight", matrix) == {"lr_scale": 1.0}
    assert options("norm.weight", vector) == {"lr_scale": 1.0, "weight_decay": 0.0}
    assert options("embed_tokens.weight", matrix) == {"lr_scale": 0.5, "weight_decay": 0.0}


def lines_about_groups(mesh: str) -> list[str]:
    options = {
        "mesh": mesh,
        "model.vocab_size": 101,
        "optimizer.weight_decay": 0.25,
        "optimizer.groups": [{"match": "embed_tokens.*", "lr_scale": 0.1, "weight_decay": 0.0}],
    }
    with logged_lines("meshtron.build") as lines:
        build_job(recipe_of(options).resolve(torch.distributed.get_world_size()), torch.device("cpu"))
    return [line for line in lines if line.startswith("optimizer group")]


def test_sizes_of_groups_are_printed_for_the_whole_model_at_every_layout():
    block = [32 * 32] * 4 + [32 * 48] * 3
    matrices = 4 * sum(block) + 101 * 32
    expected = [
        f"optimizer group: learning rate x 0.1, weight decay 0: 1 tensor, {101 * 32:,} parameters",
        f"optimizer group: learning rate x 1, weight decay 0: 9 tensors, {9 * 32:,} parameters",
        f"optimizer group: learning rate x 1, weight decay 0.25: 29 tensors, {matrices:,} parameters",
    ]
    for mesh, ranks in (("1x1x1", 1), ("2x1x1", 2), ("1x1x2", 2)):
        assert run_ranks(lines_about_groups, ranks, mesh) == [expected] * ranks


def test_a_rule_that_matches_nothing_is_an_error():
    with pytest.raises(RecipeError, match=r"'attn\*' matches no parameter"):
        check_rules([GroupRule(match="attn*")], {"norm.weight": torch.Size([4])})
