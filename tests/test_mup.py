"""muP: what a few steps change in hidden states and logits does not grow with the width."""

import pytest

from benchmarks.mup_coordinates import BASE, changes
from meshtron.errors import RecipeError
from meshtron.models import mup
from tests.combinations import recipe_of


def test_coordinates_stay_where_they_are_as_the_width_grows():
    wide = 4 * BASE
    for mup_on, flat in ((True, True), (False, False)):
        narrow, wider = changes(BASE, mup_on), changes(wide, mup_on)
        growth = {name: wider[name] / narrow[name] for name in narrow}
        assert (max(growth.values()) < 1.5) == flat, growth
        assert min(growth.values()) > 0.5, growth


def test_factors_are_one_at_the_base_width():
    names = ("embed_tokens.weight", "layers.0.mlp.up_proj.weight", "lm_head.weight", "norm.weight")
    assert [mup.init_factor(name, 1.0) * mup.lr_factor(name, 1.0) for name in names] == [1.0] * 4
    assert [mup.init_factor(name, 4.0) for name in names] == [1.0, 0.5, 0.25, 1.0]
    assert [mup.lr_factor(name, 4.0) for name in names] == [1.0, 0.25, 0.25, 1.0]


def test_a_tied_head_is_refused():
    with pytest.raises(RecipeError, match=r"model.mup_base_width: a tied head"):
        recipe_of({"mesh": "1x1x1", "model.mup_base_width": 16, "model.tie_word_embeddings": True})
