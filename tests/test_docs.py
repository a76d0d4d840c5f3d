"""Code in the pages: Python runs, TOML is a recipe's, and commands name programs and options that exist."""

import functools
import re
import runpy
import shlex
import tomllib
from pathlib import Path

import pytest
import torch
import typer.main

import meshtron
from meshtron.cli import app
from meshtron.comparison import launch, worker
from meshtron.recipe import Recipe
from meshtron.testing import run_ranks

ROOT = Path(__file__).parents[1]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]
RANKS = {"your-model.md": 8, "README.md": 8}
BASE = {
    "model": {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    },
    "training": {"steps": 100, "seq_len": 16, "global_batch_size": 8},
    "data": {"train": [{"path": "data"}]},
}


def blocks(page: Path, language: str, before: str = "") -> list[str]:
    """Code blocks of a page, or of its part before a line."""
    text = page.read_text(encoding="utf-8")
    text = text[: text.index(f"\n{before}\n")] if before else text
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def run_blocks(name: str) -> int:
    """Every Python block of a page, one after the other, in one namespace."""
    namespace: dict = {"__name__": "page"}
    (page,) = (page for page in PAGES if page.name == name)
    codes = blocks(page, "python")
    if name == "README.md":  # it takes the model, the loss and a batch from where they are explained
        explained = blocks(ROOT / "docs/your-model.md", "python", before="### 2. ZeRO-1")
        exec(compile("\n\n".join(explained), name, "exec"), namespace)
        namespace |= {"tokens": torch.zeros(4, 8, dtype=torch.long), "labels": torch.ones(4, 8, dtype=torch.long)}
    for code in codes:
        exec(compile(code, name, "exec"), namespace)
    return len(codes)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name)
def test_python_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ranks = RANKS.get(page.name)
    assert run_ranks(run_blocks, ranks, page.name)[0] if ranks else run_blocks(page.name)


def test_each_of_the_five_steps_ends_with_a_parity_that_holds(tmp_path, monkeypatch):
    """The page's program up to the training, run as a program, on ranks that are alive already."""
    monkeypatch.setattr(launch, "_torchrun", lambda ranks, folder: run_ranks(worker.main, ranks, folder))
    reports = []
    monkeypatch.setattr(meshtron, "print_report", reports.append)
    monkeypatch.setattr(meshtron, "parity", functools.partial(meshtron.parity, steps=1))  # the reader takes three
    program = tmp_path / "five_steps.py"
    program.write_text("\n\n".join(blocks(ROOT / "docs/your-model.md", "python", before="## Train it")))
    runpy.run_path(str(program), run_name="__main__")
    assert [[outcome.name for outcome in report.outcomes[1:]] for report in reports] == [
        ["1x2x1"],
        ["1x2x1"],
        ["2x1x1 1F1B", "2x1x1 ZBVZeroBubble"],
        ["1x1x2"],
        ["2x2x2 1F1B"],
    ]
    assert all(report.equal for report in reports)
    for report in reports:  # nor does a step change what one process computes
        assert report.outcomes[0].losses == pytest.approx(reports[0].outcomes[0].losses, rel=1e-12)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "toml")], ids=lambda page: page.name)
def test_toml_is_part_of_a_recipe(page):
    for text in blocks(page, "toml"):
        changes = tomllib.loads(text)
        Recipe(**{name: BASE.get(name, {}) | changes.get(name, {}) for name in {*BASE, *changes}})


def commands(page: Path) -> list[list[str]]:
    text = "\n".join(re.findall(r"^```(?:bash|console)?\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL))
    lines = [line.removeprefix("$ ").split("#")[0] for line in text.replace("\\\n", " ").splitlines()]
    return [shlex.split(line) for line in lines if re.match(r"(\w+=\S+ )*(meshtron|python|torchrun) \S", line)]


def test_commands_and_options_exist():
    known = typer.main.get_command(app)
    found = 0
    for page in PAGES:
        for words in commands(page):
            if "meshtron" in words:
                command = known
                for word in words[words.index("meshtron") + 1 :]:
                    if not hasattr(command, "commands"):
                        break
                    for choice in word.split("|")[:1]:
                        assert choice in command.commands, (page.name, words)
                        command = command.commands[choice]
                options = {option for parameter in command.params for option in parameter.opts}
                used = {word.partition("=")[0] for word in words if word.startswith("--")}
                assert used <= options | {"--help"}, (page.name, words)
                found += 1
            for word in words:
                if word.endswith(".py") or word.startswith(("recipes/", "examples/", "benchmarks/")):
                    assert (ROOT / word).exists(), (page.name, word)
    assert found >= 4
