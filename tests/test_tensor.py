"""Plans are checked against the model before anything is split."""

import pytest
import torch
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from meshtron.errors import PlanError
from meshtron.models.llama import Llama, tensor_parallel_plan
from meshtron.models.llama_spec import LlamaSpec
from meshtron.parallel.tensor import check_plan
from tests.layouts import small_config


def model(**changes) -> Llama:
    with torch.device("meta"):
        return Llama(small_config(**changes))


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_the_plan_of_llama_fits(sequence_parallel):
    check_plan(model(vocab_size=101), tensor_parallel_plan(sequence_parallel), 4, uneven=LlamaSpec.uneven)


def test_a_key_that_matches_nothing_names_what_is_there():
    plan = {"layers.*.self_attention.q_proj": ColwiseParallel()}
    with pytest.raises(PlanError, match=r"'layers\.\*\.self_attention\.q_proj' matches no module.*self_attn"):
        check_plan(model(), plan, 2)


def test_a_dim_that_does_not_divide_names_size_and_choices():
    with pytest.raises(PlanError, match=r"85 does not divide by tp = 2; tp can be 1, 5, 17"):
        check_plan(model(intermediate_size=85), tensor_parallel_plan(), 2, uneven=LlamaSpec.uneven)
    with pytest.raises(PlanError, match=r"dim 1 of a weight of shape \(32, 85\)"):
        check_plan(model(intermediate_size=85), {"layers.*.mlp.down_proj": RowwiseParallel()}, 2)


def test_a_vocabulary_smaller_than_tp_is_refused():
    with pytest.raises(PlanError, match="3 leaves nothing for the last rank of tp = 4"):
        check_plan(model(vocab_size=3), tensor_parallel_plan(), 4, uneven=LlamaSpec.uneven)
