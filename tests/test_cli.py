"""The command line, and the recipes that are shipped: each is valid at the size it is meant for."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from meshtron import cli
from meshtron.estimate import estimate
from meshtron.feed import check_tokenizer
from meshtron.recipe import load_recipe

RECIPES = Path(__file__).parent.parent / "recipes"

# recipe -> (ranks, overrides, parameters in all)
SHIPPED = {
    "tiny_llama": [(1, (), 2_754_688), (4, ("parallel.pp=2", "parallel.tp=2"), 2_754_688), (8, (), 2_754_688)],
    "llama_1b": [(1, (), 1_498_482_688), (8, (), 1_498_482_688)],
    "llama_8b": [(8, (), 8_030_261_248)],  # Llama 3 8B, as published
    "llama_70b": [(64, (), 70_553_706_496), (512, (), 70_553_706_496)],
}


@pytest.fixture
def run(monkeypatch, capsys):
    """Run ``meshtron ARGUMENTS`` in this process; gives (status, stdout, stderr)."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["meshtron", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        output = capsys.readouterr()
        return ended.value.code or 0, output.out, output.err

    return call


def test_every_recipe_in_the_folder_is_in_the_table():
    assert {path.stem for path in RECIPES.glob("*.toml")} == set(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_recipe_fits_its_ranks_and_an_80_gb_gpu(name):
    for ranks, overrides, parameters in SHIPPED[name]:
        figures = estimate(load_recipe(RECIPES / f"{name}.toml", overrides).resolve(ranks))
        assert figures.num_parameters == parameters
        assert figures.parameter_bytes + figures.gradient_bytes + figures.state_bytes < 60 * 2**30


def test_every_line_of_a_shipped_recipe_is_a_key_a_section_or_explained():
    for path in RECIPES.glob("*.toml"):
        assert path.read_text().startswith("# ")
        assert path.read_text().count("#") > 10


def test_tiny_recipe_takes_every_split_of_1_2_4_and_8_ranks():
    for ranks in (1, 2, 4, 8):
        for pp in (1, 2, 4, 8):
            for tp in (1, 2, 4, 8):
                if ranks % (pp * tp) == 0:
                    overrides = [f"parallel.pp={pp}", f"parallel.tp={tp}"]
                    parallel = load_recipe(RECIPES / "tiny_llama.toml", overrides).resolve(ranks).parallel
                    assert parallel.pp * parallel.dp * parallel.tp == ranks


def test_memory_follows_the_layout():
    def figures(*overrides, ranks=1):
        return estimate(load_recipe(RECIPES / "llama_1b.toml", overrides).resolve(ranks))

    one = figures()
    assert one.parameter_bytes == 2 * one.rank_parameters
    assert one.gradient_bytes == 4 * one.rank_parameters
    assert one.state_bytes == 12 * one.rank_parameters
    assert figures(ranks=4).gradient_bytes == 5 * one.rank_parameters  # and the sums of its quarter
    assert figures("training.param_dtype=float32").state_bytes == 8 * one.rank_parameters  # their own masters
    assert figures(ranks=4).state_bytes == one.state_bytes // 4
    assert figures("parallel.zero=0", ranks=4).state_bytes == one.state_bytes
    norms = 2048 * (2 * 16 + 1)  # not sharded over tp
    assert figures("parallel.tp=4", ranks=4).rank_parameters == (one.rank_parameters - norms) // 4 + norms
    # 16 layers of 60.8 million and a head of 262.7 million (with a cheap look-up at the other end) on two ranks
    halves = figures("parallel.pp=2", ranks=2).rank_parameters
    assert one.rank_parameters / 2 <= halves < 0.6 * one.rank_parameters


def test_check_prints_layout_batch_and_size(run):
    status, out, err = run(
        "check", RECIPES / "tiny_llama.toml", "--world", "8", "parallel.pp=2", "parallel.tp=2", "run.name=[bold]x"
    )
    assert (status, err) == (0, "")
    for text in (
        "tiny_llama.toml on 8 ranks",
        "pp 2 x dp 2 x tp 2, 1F1B",
        "32 sequences of 128 tokens = 4,096 tokens a step",
        "4 micro-batches of 4 on each dp rank",
        "2,754,688  in all",
        "runs/[bold]x",
    ):
        assert text in out


def test_check_takes_the_fewest_ranks_that_fit(run):
    assert "on 4 ranks" in run("check", RECIPES / "tiny_llama.toml", "parallel.pp=2", "parallel.tp=2")[1]


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (["check", "nowhere.toml"], ["error: recipe nowhere.toml: no such file"]),
        (["check"], ["error: Missing argument 'RECIPE'. (see meshtron check --help)"]),
        (["check", RECIPES / "tiny_llama.toml", "--world", "0"], ["error: Invalid value for '--world'"]),
        (["chek"], ["error: No such command 'chek'."]),
        (["train"], ["error: Missing argument 'RECIPE'. (see meshtron train --help)"]),
        (["train", RECIPES / "tiny_llama.toml", "training.step=3"], ["error: training.step: unknown key"]),
        (["ckpt", "list", "nowhere"], ["error: nowhere: not there; expected a step folder or a run's folder"]),
        (["parity", RECIPES / "tiny_llama.toml", "--dtype", "bf16"], ["error: dtype 'bf16': expected float32 or"]),
        (["parity", RECIPES / "tiny_llama.toml", "--layouts", "2x1x1"], ["error: layouts: 2x1x1 1F1B alone has"]),
        (
            ["check", RECIPES / "tiny_llama.toml", "parallel.tp=x", "training.step=3"],
            [
                'error: parallel.tp: expected a whole number, found "x"',
                "error: training.step: unknown key; did you mean",
            ],
        ),
        (
            ["check", RECIPES / "tiny_llama.toml", "parallel.tp=3", "--world", "7"],
            [
                "error: parallel: pp(1) * tp(3) = 3, but the world has 7 ranks",
                *["error: parallel.tp: 3 does not divide model.num_"] * 2,
                "error: training.seq_len: 128 is not a multiple of tp(3)",
            ],
        ),
        (
            ["check", RECIPES / "llama_8b.toml", "model.intermediate_size=85"],
            ["error: parallel.tp: 2 does not divide model.intermediate_size(85): use one of [1, 5, 17, 85]"],
        ),
        (
            ["check", RECIPES / "tiny_llama.toml", "model.family=no.such:Model"],
            ["error: model.family = 'no.such:Model'"],
        ),
    ],
)
def test_a_mistake_is_one_line_each_and_status_1(run, arguments, lines):
    status, out, err = run(*arguments)
    assert (status, out) == (1, "")
    printed = err.splitlines()
    assert len(printed) == len(lines)
    assert all(shown.startswith(line) for shown, line in zip(printed, lines, strict=True))


def test_schema_is_json(run):
    status, out, _ = run("schema")
    assert status == 0
    assert json.loads(out)["properties"]["parallel"]


def test_version_names_what_a_report_needs(run):
    status, out, err = run("--version")
    assert (status, err) == (0, "")
    assert re.fullmatch(r"meshtron \d\S*, torch \d\S*, Python \d\S*\n", out)


def test_check_names_data_that_is_not_there(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    changes = ["data.train=[{path='here'}, {path='mega'}, {path='hf:x'}, {path='gone'}]", "validation.interval=5"]
    (tmp_path / "here").mkdir()
    (tmp_path / "mega.idx").touch()  # a Megatron-LM prefix is no file itself
    status, out, _ = run("check", RECIPES / "tiny_llama.toml", *changes, "validation.data=[{path='held_out'}]")
    assert status == 0
    missing = re.findall(r"not there in (.*): (.*)", out)
    assert missing == [(str(tmp_path), "gone"), (str(tmp_path), "held_out")]


def test_a_tokenizer_path_without_a_tokenizer_is_said(tmp_path, caplog):
    check_tokenizer(load_recipe(RECIPES / "tiny_llama.toml", [f"tokenizer.path={tmp_path / 'gone'}"]))
    assert "gone: not there; training does without" in caplog.text


def test_no_command_prints_help_and_fails(run):
    status, out, err = run()
    assert (status, err) == (2, "")
    assert "check" in out


def test_train_script_refuses_a_recipe_before_torch_is_imported(tmp_path):
    recipe = tmp_path / "bad.toml"
    recipe.write_text("[model]\nhiden_size = 3\n")
    code = (
        "from meshtron.cli import train_main; import atexit, sys; "
        f"atexit.register(lambda: print('torch' in sys.modules)); sys.argv[1:] = [{str(recipe)!r}]; train_main()"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stdout == "False\n"
    assert all(line.startswith("error: ") for line in ended.stderr.splitlines())
    assert f'error: {recipe}: model.hiden_size: unknown key; did you mean "hidden_size"?' in ended.stderr


def test_the_readme_shows_what_is_really_printed(run, monkeypatch):
    root = RECIPES.parent
    monkeypatch.chdir(root)
    blocks = (root / "README.md").read_text().split("```")
    (block,) = [block for block in blocks if "$ meshtron" in block]
    for example in block.strip().split("$ meshtron ")[1:]:
        command, *shown = example.strip().splitlines()
        assert run(*command.split())[2].splitlines() == shown
