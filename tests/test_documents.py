"""Documents packed into one sequence do not see each other, at any backend that takes a mask."""

import pytest
import torch

from meshtron.build import build_job, check_takes_documents
from meshtron.errors import MeshtronError, RecipeError
from meshtron.initialize import init_weights
from meshtron.models.attention import attention_backend
from meshtron.models.llama import Llama
from meshtron.testing import run_ranks
from tests.combinations import positions_of, recipe_of
from tests.layouts import small_config

BACKENDS = ["sdpa", "flex"]
LENGTHS = (5, 1, 7, 3)
IDS = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))[None]


def model(backend: str, **changes) -> Llama:
    whole = Llama(small_config(**changes), attention_backend(backend)).double()
    init_weights([whole], seed=0, std=0.2)
    return whole


# Without gradients: FlexAttention has no backward pass on a CPU.
@torch.no_grad()
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_logits_of_a_document_are_those_it_has_alone(backend, window):
    whole = model(backend, sliding_window=window)
    tokens = torch.randint(96, IDS.shape, generator=torch.Generator().manual_seed(0))
    packed = whole(tokens, positions_of(IDS), document_ids=IDS)
    for document in range(len(LENGTHS)):
        mine = IDS[0] == document
        torch.testing.assert_close(
            packed[:, mine], model("sdpa", sliding_window=window)(tokens[:, mine]), rtol=0, atol=1e-12
        )


@torch.no_grad()
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_neighbour_changes_no_bit(backend):
    whole = model(backend)
    tokens = torch.randint(96, IDS.shape, generator=torch.Generator().manual_seed(0))
    others = torch.where(IDS == 2, tokens, (tokens + 17) % 96)
    mine = IDS[0] == 2
    first, second = (whole(ids, positions_of(IDS), document_ids=IDS)[:, mine] for ids in (tokens, others))
    assert torch.equal(first, second)
    unmasked, changed = (whole(ids)[:, mine] for ids in (tokens, others))
    assert not torch.equal(unmasked, changed)


def test_a_backend_without_masks_is_refused():
    recipe = recipe_of({"mesh": "1x1x1", "data.document_mask": True, "model.attention": "flash_attn"})
    with pytest.raises(MeshtronError, match=r'model.attention: "flash_attn" has no document masks'):
        recipe.resolve(1)


def flex_on_cpu() -> None:
    build_job(recipe_of({"mesh": "1x1x1", "model.attention": "flex"}).resolve(1), torch.device("cpu"))


def test_training_with_flex_on_a_cpu_is_refused():
    with pytest.raises(AssertionError, match=r"RecipeError: model.attention: \"flex\" cannot train on a CPU"):
        run_ranks(flex_on_cpu, 1)


class NoDocuments(torch.nn.Module):
    def forward(self, x, positions=None):
        return x


def test_a_model_that_takes_no_document_ids_is_refused():
    with pytest.raises(RecipeError, match=r"forward of NoDocuments takes no document_ids"):
        check_takes_documents(NoDocuments())
