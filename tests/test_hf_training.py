"""Runs that start from a Hugging Face folder or an imported checkpoint, and what they export."""

import copy
import json
from pathlib import Path

import pytest
import torch
import transformers

from meshtron.data import PrepareOptions, Stage, TrainStream, open_source, prepare_corpus
from meshtron.data.tokenizer import train_tokenizer
from meshtron.errors import CheckpointError, DataError, RecipeError
from meshtron.hf.convert import export_hf, import_hf
from meshtron.hf.recipe import fill_from_hf
from meshtron.loop import train
from meshtron.recipe import (
    CheckpointSection,
    DataSection,
    ModelSection,
    OptimizerSection,
    ParallelSection,
    Recipe,
    RunSection,
    Source,
    TokenizerSection,
    TrainingSection,
)
from meshtron.testing import run_ranks
from tests.hf_models import VOCAB, logits_of, model_of, tokens_of
from tests.hf_ranks import logits_at, train_all

TOKENS = tokens_of()
EPS = 1e-4  # so large that gradients of the size of rounding do not become whole steps of Adam


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory, hf_folders: dict[str, Path]) -> Path:
    root = tmp_path_factory.mktemp("corpus")
    (root / "text").mkdir()
    (root / "text" / "a.py").write_text("for x in y:\n    return x + 1\n" * 400)
    prepare_corpus(
        [str(root / "text")], root / "data", PrepareOptions(tokenizer=str(hf_folders["llama2"]), workers=1)
    )
    return root / "data"


def _recipe(folder: Path, corpus: Path, run: Path, **parallel) -> Recipe:
    return Recipe(
        run=RunSection(dir=str(run), device="cpu"),
        model=ModelSection(from_hf=str(folder)),
        parallel=ParallelSection(**parallel),
        training=TrainingSection(steps=3, seq_len=24, global_batch_size=8, param_dtype="float32"),
        optimizer=OptimizerSection(lr=3e-3, eps=EPS, weight_decay=0.0, grad_clip=0.0),
        data=DataSection(train=(Source(path=str(corpus)),)),
    )


# Every family, tied and untied.
@pytest.mark.parametrize(
    ("cases", "layout"),
    [
        (["llama2"], {"pp": 2, "dp": 2, "tp": 2}),
        (["llama3.2", "qwen2"], {"pp": 2, "dp": 1, "tp": 1}),
        (["mistral", "qwen3-bias"], {"pp": 1, "dp": 1, "tp": 3}),
    ],
    ids=str,
)
def test_a_run_from_a_folder_exports_what_transformers_would_have_trained(
    cases: list[str], layout: dict, hf_folders: dict[str, Path], corpus: Path, tmp_path: Path
) -> None:
    recipes = [_recipe(hf_folders[case], corpus, tmp_path / case, **layout) for case in cases]
    run_ranks(train_all, layout["pp"] * layout["dp"] * layout["tp"], recipes)
    for case in cases:
        logged = [json.loads(line) for line in (tmp_path / case / "metrics.jsonl").read_text().splitlines()]
        losses, expected = _trained_by_transformers(case, corpus, [line["lr"] for line in logged])
        assert [line["loss"] for line in logged] == pytest.approx(losses, abs=1e-4)
        out = export_hf(tmp_path / case, tmp_path / f"{case}-out")
        theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
        with torch.no_grad():
            logits = theirs(TOKENS).logits
        assert (logits - logits_of(case, TOKENS)).abs().max() > 0.05
        torch.testing.assert_close(logits, expected, atol=1e-3, rtol=0)
        (found,) = run_ranks(logits_at, 1, tmp_path / case, "1x1x1", TOKENS)
        torch.testing.assert_close(found[1], logits, atol=1e-4, rtol=0)
        tokenizer = transformers.AutoTokenizer.from_pretrained(out)
        assert tokenizer.decode(tokenizer("for x in y")["input_ids"]) == "for x in y"
        assert tokenizer.eos_token == "<|endoftext|>"


def _trained_by_transformers(case: str, corpus: Path, rates: list[float]) -> tuple[list[float], torch.Tensor]:
    """Losses of the case's model in a plain loop over the same batches, and its logits of TOKENS afterwards."""
    model = copy.deepcopy(model_of(case))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), eps=EPS, weight_decay=0.0)
    source = open_source(corpus, seq_len=24, vocab_size=VOCAB)
    losses = []
    with TrainStream([Stage(start=0, seq_len=24, sources=[source])], global_batch_size=8, seed=0) as stream:
        for step, rate in enumerate(rates):
            batch = stream.batch(8 * step)
            logits = model(batch.tokens).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
            loss.backward()
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    with torch.no_grad():
        return losses, model(TOKENS).logits


def test_a_tokenizer_larger_than_the_model_is_refused_at_start(
    hf_folders: dict[str, Path], corpus: Path, tmp_path: Path
) -> None:
    train_tokenizer(["for x in y: return x\n" * 5, "while True: pass " * 9], 290).save(
        str(tmp_path / "tokenizer.json")
    )
    recipe = _recipe(hf_folders["llama2"], corpus, tmp_path / "run")
    larger = recipe.model_copy(update={"tokenizer": TokenizerSection(path=str(tmp_path))})
    with pytest.raises(DataError, match=r"the tokenizer has \d+ ids, but the model's vocabulary has 263"):
        train(larger)
    assert not (tmp_path / "run").exists()


def test_an_imported_checkpoint_gives_a_run_its_weights(
    hf_folders: dict[str, Path], corpus: Path, tmp_path: Path
) -> None:
    import_hf(hf_folders["qwen3"], tmp_path / "in")
    direct = _recipe(hf_folders["qwen3"], corpus, tmp_path / "direct", pp=2)
    section = fill_from_hf(direct).model.model_copy(update={"from_hf": ""})
    resumed = direct.model_copy(
        update={
            "run": RunSection(dir=str(tmp_path / "resumed"), device="cpu"),
            "model": section,
            "checkpoint": CheckpointSection(resume=str(tmp_path / "in"), load="weights"),
        }
    )
    run_ranks(train_all, 2, [direct, resumed])
    lines = [(tmp_path / run / "metrics.jsonl").read_text().splitlines() for run in ("direct", "resumed")]
    losses = [[json.loads(line)["loss"] for line in run] for run in lines]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 3


def test_a_recipe_may_adjust_but_not_contradict_the_folder(hf_folders: dict[str, Path], corpus: Path) -> None:
    recipe = _recipe(hf_folders["qwen3"], corpus, Path("run"))
    model = fill_from_hf(recipe).model
    assert (model.family, model.head_dim, model.num_key_value_heads, model.vocab_size) == ("qwen3", 16, 6, 263)
    assert fill_from_hf(fill_from_hf(recipe)) == fill_from_hf(recipe)
    longer = ModelSection(from_hf=str(hf_folders["qwen3"]), max_position_embeddings=512, rope_theta=5e6)
    model = fill_from_hf(recipe.model_copy(update={"model": longer})).model
    assert (model.max_position_embeddings, model.rope_theta) == (512, 5e6)
    wrong = {"hidden_size": 64, "family": "llama", "tie_word_embeddings": False}
    section = ModelSection(from_hf=str(hf_folders["qwen3"]), **wrong)
    with pytest.raises(RecipeError) as refused:
        fill_from_hf(recipe.model_copy(update={"model": section}))
    lines = str(refused.value).splitlines()
    assert sorted(line.split(":")[0] for line in lines) == sorted(f"model.{key}" for key in wrong)
    assert all("config.json has" in line for line in lines)
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        fill_from_hf(_recipe(corpus, corpus, Path("run")))
