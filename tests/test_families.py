"""The model's options against transformers' implementations: same weights, same logits."""

import pytest
import torch

from meshtron.hf.config import config_from_hf
from meshtron.models.llama import Llama
from tests.hf_models import CASES, logits_of, model_of, tokens_of


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers(case: str) -> None:
    theirs = model_of(case)
    model = Llama(config_from_hf(theirs.config.to_diff_dict(), case)[1])
    model.load_state_dict({name.removeprefix("model."): tensor for name, tensor in theirs.state_dict().items()})
    tokens = tokens_of()
    with torch.no_grad():
        ours = model(tokens)
    assert ours.std() > 0.5
    torch.testing.assert_close(ours, logits_of(case, tokens), atol=1e-4, rtol=0)
