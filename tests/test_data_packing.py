"""From rows of prompt and completion to a training step, in every packing, against plain torch on the text itself."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from torch.nn import functional as F

from meshtron.data import PrepareOptions, prepare_corpus
from meshtron.data.sampler import permute
from meshtron.data.tokenizer import END_OF_TEXT, train_tokenizer
from meshtron.errors import LayoutError, RecipeError
from meshtron.initialize import init_weights
from meshtron.loop import train
from meshtron.models.llama import Llama, config_of, init_std
from meshtron.testing import run_ranks
from tests.runs import logged, small_recipe

LENGTH, BATCH = 16, 8
QUESTIONS = [(f"what is {n} and {n + 3}?", f" it is {2 * n + 3}" + " and more" * (n % 5)) for n in range(60)]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("questions")
    rows = [json.dumps({"prompt": prompt, "completion": completion}) for prompt, completion in QUESTIONS]
    (folder / "questions.jsonl").write_text("\n".join(rows))
    train_tokenizer([part for pair in QUESTIONS for part in pair], 280).save(str(folder / "tokenizer.json"))
    options = PrepareOptions(tokenizer=str(folder), prompt_key="prompt", completion_key="completion", workers=1)
    prepare_corpus([str(folder / "questions.jsonl")], folder / "tokens", options)
    return folder


Token = tuple[int, int, bool]
"""Id, number of the document, and whether predicting it is learned."""


def samples(folder: Path, packing: str) -> list[list[Token]]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    documents = []
    for number, (prompt, completion) in enumerate(QUESTIONS):
        asked, answered = (tokenizer.encode(part, add_special_tokens=False).ids for part in (prompt, completion))
        end = tokenizer.token_to_id(END_OF_TEXT)
        documents.append(
            [(token, number, False) for token in asked] + [(token, number, True) for token in [*answered, end]]
        )
    if packing == "pad":
        pieces = [document[n : n + LENGTH + 1] for document in documents for n in range(0, len(document) - 1, LENGTH)]
    else:
        row = [token for document in documents for token in document]
        pieces = [row[n : n + LENGTH + 1] for n in range(0, len(row) - LENGTH, LENGTH)]
    order = permute(np.arange(BATCH), len(pieces), 0, 0)
    return [pieces[index] for index in order]


def loss_of(model: Llama, packing: str, batch: list[list[Token]]) -> float:
    """Mean loss of the tokens that are learned, each sequence alone, and each document alone where masks are on."""
    total, count = torch.zeros(()), 0
    for piece in batch:
        numbers = {number for _, number, _ in piece} if packing == "documents" else {None}
        for number in numbers:
            part = [token for token in piece if number in (None, token[1])]
            ids = torch.tensor([[token for token, _, _ in part]])
            learned = torch.tensor([learned for _, _, learned in part])[1:]
            if len(part) < 2:
                continue
            losses = F.cross_entropy(model(ids[:, :-1])[0], ids[0, 1:], reduction="none")
            total, count = total + losses[learned].sum(), count + int(learned.sum())
    return (total / count).item()


@torch.no_grad()
@pytest.mark.parametrize("packing", ["concat", "documents", "pad"])
def test_only_completions_are_learned_in_every_packing(prepared, tmp_path, packing):
    data = {"train": [{"path": str(prepared / "tokens")}]}
    data |= {"document_mask": True} if packing == "documents" else {"packing": packing}
    found = []
    for layout in ("1x1x1", "2x2x1"):
        recipe = small_recipe(
            tmp_path / layout,
            layout,
            model={"vocab_size": 280},
            training={"steps": 1, "global_batch_size": BATCH, "micro_batch_size": 2},
            data=data,
        )
        with torch.enable_grad():
            run_ranks(train, 4 if layout == "2x2x1" else 1, recipe, timeout_s=280)
        found.append(logged(tmp_path / layout)[0]["loss"])
    config = config_of(recipe.model.model_dump())
    model = Llama(config)
    init_weights([model], seed=0, std=lambda name: init_std(config, name))
    expected = loss_of(model, packing, samples(prepared, packing))
    assert found == pytest.approx([expected] * 2, rel=1e-5)


def test_padding_needs_no_mask(tmp_path):
    with pytest.raises(RecipeError, match=r'document_mask: packing = "pad" has one document a sequence'):
        small_recipe(tmp_path, data={"train": [{"path": "a"}], "packing": "pad", "document_mask": True})


def test_validation_on_what_is_trained_on_is_refused(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "data")
    for path in (tmp_path / "data", tmp_path / "link"):
        recipe = small_recipe(tmp_path, validation={"interval": 1, "data": [{"path": str(path)}]})
        with pytest.raises(LayoutError, match=r"validation.data: .* is trained on too"):
            recipe.resolve(1)
