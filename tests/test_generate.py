"""Generation against transformers' generate, with and without the cache, and sampling's arithmetic."""

import math

import pytest
import torch
import transformers

from meshtron.errors import DataError, RecipeError
from meshtron.generate.engine import PlacedModel, generate
from meshtron.generate.sampling import Sampling, choose, uniform
from meshtron.hf.config import config_from_hf
from meshtron.models.attention import causal_attention
from meshtron.models.llama import Llama
from tests.hf_models import CASES, model_of, tokens_of

NEW = 12


def _place(case: str) -> PlacedModel:
    theirs = model_of(case)
    config = config_from_hf(theirs.config.to_diff_dict(), case)[1]
    model = Llama(config)
    model.load_state_dict({name.removeprefix("model."): tensor for name, tensor in theirs.state_dict().items()})
    return PlacedModel(
        stages=[model],
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        max_length=config.max_position_embeddings,
    )


def _prompts(*lengths: int) -> list[list[int]]:
    return [tokens_of(1, length, seed=length)[0].tolist() for length in lengths]


def _greedy_of_transformers(case: str, prompt: list[int], new: int = NEW) -> list[int]:
    ids = torch.tensor([prompt])
    settings = {"do_sample": False, "max_new_tokens": new, "eos_token_id": None, "pad_token_id": 0}
    return model_of(case).generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, len(prompt) :].tolist()


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_equal_those_of_transformers(case: str) -> None:
    model, prompts = _place(case), _prompts(1, 7, 40, 7)
    expected = [_greedy_of_transformers(case, prompt) for prompt in prompts]
    assert len({token for row in expected for token in row}) > 4  # not one token over and over
    assert generate(model, prompts, max_new_tokens=NEW) == expected
    assert generate(model, prompts, max_new_tokens=NEW, use_cache=False) == expected
    assert generate(model, prompts[1:2], max_new_tokens=NEW) == expected[1:2]  # rows of one length
    assert all(layer.self_attn.attend is causal_attention for layer in model.stages[0].layers)


def test_a_prompt_of_the_greatest_length_gets_one_token_and_longer_ones_are_refused() -> None:
    model = _place("llama3")
    prompt = _prompts(model.max_length)[0]
    assert generate(model, [prompt], max_new_tokens=4) == [_greedy_of_transformers("llama3", prompt, new=1)]
    assert [len(row) for row in generate(model, [prompt[:-2], prompt[:5]], max_new_tokens=6)] == [3, 6]
    with pytest.raises(DataError, match="prompt 2 of 2 has 97 tokens, but the model takes at most 96"):
        generate(model, [prompt, [*prompt, 5]], max_new_tokens=1)
    with pytest.raises(DataError, match="prompt 1 of 1 has no tokens"):
        generate(model, [[]], max_new_tokens=1)
    with pytest.raises(DataError, match="token 263, but the model's vocabulary has 263"):
        generate(model, [[263]], max_new_tokens=1)


def test_rows_end_one_by_one() -> None:
    model, prompts = _place("llama3"), _prompts(7, 3, 7)
    whole = generate(model, prompts, max_new_tokens=NEW)
    ends = [5, 1, NEW]
    assert generate(model, prompts, max_new_tokens=NEW, finished=lambda row, tokens: len(tokens) == ends[row]) == [
        row[:end] for row, end in zip(whole, ends, strict=True)
    ]
    assert generate(model, prompts, max_new_tokens=0) == [[], [], []]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.7),
        Sampling(temperature=1.3, top_k=5),
        Sampling(temperature=1.0, top_p=0.6),
        Sampling(temperature=2.0, top_k=9, top_p=0.8),
    ],
)
def test_draws_have_the_distribution_of_transformers_filters(sampling: Sampling) -> None:
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(1)) * 2
    expected = transformers.TemperatureLogitsWarper(sampling.temperature)(None, logits)
    if sampling.top_k:
        expected = transformers.TopKLogitsWarper(sampling.top_k)(None, expected)
    expected = transformers.TopPLogitsWarper(sampling.top_p)(None, expected).softmax(-1)[0]
    draws = 20_000
    counts = choose(logits.expand(draws, -1), sampling, [3] * draws, range(draws)).bincount(minlength=40)
    assert (counts[expected == 0] == 0).all()
    torch.testing.assert_close(counts / draws, expected.float(), atol=0.012, rtol=0)


def test_draws_depend_on_seed_row_and_position_alone() -> None:
    model, prompts = _place("llama3"), _prompts(7, 3, 7)
    sampling = Sampling(temperature=1.0, top_p=0.95, seed=11)
    together = generate(model, prompts, max_new_tokens=NEW, sampling=sampling)
    for row, prompt in enumerate(prompts):
        alone = generate(model, [prompt], max_new_tokens=NEW, sampling=sampling, rows=[row], use_cache=False)
        assert alone == [together[row]]
    other = Sampling(temperature=1.0, top_p=0.95, seed=12)
    assert generate(model, prompts, max_new_tokens=NEW, sampling=other) != together
    drawn = [uniform(seed, row, position) for seed in (0, 1) for row in range(20) for position in range(50)]
    assert len(set(drawn)) == 2000
    assert abs(sum(drawn) / 2000 - 0.5) < 0.02


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -1.0},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"temperature": math.nan},
        {"temperature": math.inf},
    ],
)
def test_sampling_out_of_range_is_refused(values: dict[str, float]) -> None:
    with pytest.raises(RecipeError, match=next(iter(values)).replace("_", "-")):
        Sampling(**values)
