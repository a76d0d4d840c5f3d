"""Learning-rate shapes at their corners, and which parameters decay."""

import math

import pytest
import torch

from meshtron.errors import RecipeError
from meshtron.optim import GroupRule, LearningRate, check_rules, parameter_options


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


def test_a_rule_that_matches_nothing_is_an_error():
    with pytest.raises(RecipeError, match=r"'attn\*' matches no parameter"):
        check_rules([GroupRule(match="attn*")], {"norm.weight": torch.Size([4])})
