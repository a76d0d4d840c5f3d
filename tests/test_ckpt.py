"""meshtron ckpt list, verify and show, as a user types them."""

import shutil

import pytest
import torch

from meshtron import cli
from meshtron.checkpoint import Checkpointer


@pytest.fixture
def meshtron(monkeypatch, capsys):
    """Runs ``meshtron ckpt ARGUMENTS``; returns its status and what it printed to stdout and stderr."""

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["meshtron", "ckpt", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed = capsys.readouterr()
        return ended.value.code or 0, printed.out, printed.err

    return run


@pytest.fixture
def run_folder(tmp_path):
    """A run with steps 5, 10 and 15, of which 10 has a flipped bit and 15 lacks a file."""
    with Checkpointer(tmp_path / "run" / "checkpoints") as checkpointer:
        for step in (5, 10, 15):
            tensors = {
                "model.w": torch.randn(300, 1000),
                "model.b": torch.ones(7).bfloat16(),
                "count": torch.tensor(3),
            }
            checkpointer.save(
                step,
                tensors,
                {
                    "samples": step * 8,
                    "layout": "1x1x1",
                    "recipe": "[run]\nname = 'x'\n",
                    "data": {"cursors": {"a": {"used": 7}}},
                },
            )
    tensor_file = tmp_path / "run" / "checkpoints" / "step-00000010" / "rank-00000.safetensors"
    content = bytearray(tensor_file.read_bytes())
    content[5000] ^= 1
    tensor_file.write_bytes(content)
    (tmp_path / "run" / "checkpoints" / "step-00000015" / "index.json").unlink()
    return tmp_path / "run"


def test_list_shows_every_step(run_folder, meshtron):
    status, printed, _ = meshtron("list", run_folder)
    assert status == 0
    header, five, ten, fifteen = printed.splitlines()
    assert header.split() == ["step", "age", "size", "layout", "state"]
    assert five.split()[0] == "5"
    assert "1.14 MiB" in five
    assert five.endswith("1x1x1  whole")
    assert ten.endswith("whole")  # sizes do not tell; verify does
    assert fifteen.endswith("DAMAGED index.json: missing")


def test_verify_names_what_is_damaged_and_fails(run_folder, meshtron):
    status, printed, error = meshtron("verify", run_folder)
    assert status == 1
    assert error == f"error: {run_folder}: damaged: step-00000010, step-00000015\n"
    assert "step-00000005/index.json: ok" in printed
    assert "step-00000010/manifest.json: ok" in printed
    assert "step-00000010/rank-00000.safetensors: DAMAGED hash" in printed
    assert "step-00000015/index.json: DAMAGED missing" in printed
    sound = run_folder / "checkpoints" / "step-00000005"
    assert meshtron("verify", sound)[0] == 0
    (sound / "manifest.json").write_text("{}")
    status, printed, _ = meshtron("verify", sound)
    assert status == 1
    assert "manifest.json: DAMAGED" in printed
    first = meshtron("list", run_folder)[1].splitlines()[1]
    assert first.split()[:4] == ["5", "-", "-", "-"]
    assert "DAMAGED" in first


def test_show_lists_tensors(run_folder, meshtron):
    status, printed, _ = meshtron("show", run_folder / "checkpoints" / "step-00000005")
    assert status == 0
    lines = {line.split()[0]: line.split()[1:] for line in printed.splitlines() if line}
    assert lines["model.w"] == ["F32", "300x1000", "1", "shard"]
    assert lines["model.b"] == ["BF16", "7", "1", "shard"]
    assert lines["count"] == ["I64", "scalar", "1", "shard"]
    assert lines["samples:"] == ["40"]
    assert "data:\n  cursors:\n    a:\n      used: 7\n" in printed
    assert "[run]" not in printed


def test_a_path_without_checkpoints_is_an_error(tmp_path, meshtron):
    for command in ("list", "verify", "show"):
        status, _, error = meshtron(command, tmp_path)
        assert status == 1
        assert error.startswith(f"error: {tmp_path}: holds no checkpoint")


def test_a_renamed_step_can_be_looked_at(run_folder, meshtron):
    copy = shutil.copytree(run_folder / "checkpoints" / "step-00000005", run_folder / "best")
    assert meshtron("verify", copy)[0] == 0
    assert "5" in meshtron("list", copy)[1].splitlines()[1].split()
