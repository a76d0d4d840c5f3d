"""The parity tool: equal runs are called equal, and of a mistake it names the first parameter and its sharding."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from examples.parity_own_model import subject
from meshtron.cli import main
from meshtron.comparison import Variant, compare_recipe, launch, parity, parse_variants, print_report, worker
from meshtron.errors import MeshtronError, RecipeError
from meshtron.recipe import Recipe
from meshtron.testing import run_ranks

MODEL = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 31,
}


def small_recipe(**changes) -> Recipe:
    sections = {
        "run": {"device": "cpu"},
        "model": dict(MODEL),
        "training": {"steps": 10, "seq_len": 8, "global_batch_size": 4, "micro_batch_size": 1},
        "data": {"train": [{"path": "no/such/folder"}]},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        sections.setdefault(section, {})[name] = value
    return Recipe(**sections)


@pytest.fixture
def in_pool(monkeypatch):
    """Ranks that are alive already in place of torchrun."""
    monkeypatch.setattr(launch, "_torchrun", lambda ranks, folder: run_ranks(worker.main, ranks, folder))


def test_equal_layouts_are_equal_in_both_dtypes(in_pool):
    variants = parse_variants("1x1x1,1x2x2,2x1x2", "1F1B,ZBVZeroBubble")
    assert [str(variant) for variant in variants] == ["1x1x1", "1x2x2", "2x1x2 1F1B", "2x1x2 ZBVZeroBubble"]
    recipe = small_recipe(model__num_hidden_layers=4, model__tie_word_embeddings=True)
    report = compare_recipe(recipe, variants, steps=2)
    assert report.equal, report
    assert 0 < max(outcome.gradients for outcome in report.outcomes) < 1e-12
    assert any("random tokens" in note for note in report.notes)
    assert compare_recipe(recipe, variants[:2], steps=2, dtype="float32").equal


def test_a_missing_plan_line_is_named(in_pool, capsys):
    report = parity("examples.parity_own_model:wrong_subject", ["1x1x1", "1x1x2"], steps=2, device="cpu")
    found = report.outcomes[1].divergence
    assert found is not None
    assert (found.what, found.parameter, found.step) == ("gradient", "layers.0.post_attention_layernorm.weight", 1)
    assert found.plan_key == ""
    assert found.num_diverging == 4
    assert found.difference > 0.01
    print_report(report)
    printed = capsys.readouterr().out
    assert "layers.0.post_attention_layernorm.weight" in printed
    assert "no plan key, whole on every tp rank" in printed
    assert parity(subject, ["1x1x1", "1x1x2"], steps=2, device="cpu").equal


def test_what_does_not_fit_is_said_before_anything_starts(monkeypatch):
    monkeypatch.setattr(launch, "_torchrun", lambda ranks, folder: pytest.fail("started"))
    with pytest.raises(RecipeError, match=r"1x1x4: parallel.tp: 4 does not divide model.num_attention_heads\(2\)"):
        compare_recipe(small_recipe(), parse_variants("1x1x1,1x1x4", "1F1B"))
    with pytest.raises(MeshtronError, match=r"2x2x1 1F1B: .* needs at least"):
        compare_recipe(small_recipe(training__micro_batch_size=2), parse_variants("1x1x1,2x2x1", "1F1B"))


def test_fewer_gpus_than_ranks_is_said_and_means_the_cpu(monkeypatch):
    variants = parse_variants("1x1x1,2x2x1", "1F1B")
    for gpus, device, note in (
        (1, "cpu", "1 GPU for 4 ranks: comparing on CPU with gloo"),
        (4, "cuda", "comparing on 4 of 4 GPUs with NCCL"),
    ):
        monkeypatch.setattr("torch.cuda.device_count", lambda gpus=gpus: gpus)
        assert launch._pick_device("auto", variants) == (device, [note])


def test_a_difference_ends_the_command_with_an_error(in_pool, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(launch.TOLERANCES, "float64", 0.0)  # rounding is then a difference
    command = ["meshtron", "parity", str(recipe_file(tmp_path)), "--layouts", "1x1x1,1x1x2", "--steps", "1"]
    monkeypatch.setattr(sys, "argv", [*command, "run.device=cpu"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert "error: the numbers depend on the layout" in capsys.readouterr().err


def recipe_file(folder: Path) -> Path:
    recipe = folder / "recipe.toml"
    model = "\n".join(f"{key} = {value}" for key, value in MODEL.items())
    recipe.write_text(
        f"[model]\n{model}\n[training]\nsteps = 10\nseq_len = 8\nglobal_batch_size = 4\nmicro_batch_size = 1\n"
        '[data]\ntrain = [{ path = "none" }]\n'
    )
    return recipe


def test_the_command_starts_the_ranks_and_writes_json(tmp_path):
    recipe = recipe_file(tmp_path)
    command = [sys.executable, "-m", "meshtron", "parity", str(recipe), "--layouts", "1x1x2,1x2x1", "--steps", "1"]
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "out.json"), "run.device=cpu"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    assert done.returncode == 0, done.stderr
    assert "1x2x1" in done.stdout
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["equal"] is True
    assert [outcome["name"] for outcome in written["outcomes"]] == ["1x1x2", "1x2x1"]


def test_variants_are_read():
    assert parse_variants("2x1x1", "AFAB")[0] == Variant(layout=launch.Layout(pp=2), schedule="AFAB")
    with pytest.raises(MeshtronError, match="expected pp x dp x tp"):
        parse_variants("2x1", "AFAB")
