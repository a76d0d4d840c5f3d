"""inspect_rank: one rank is looked at, the others wait as long as it takes."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch import distributed as dist

import meshtron as mt
from meshtron.testing import run_ranks

PROGRAM = """
import pathlib, torch, meshtron as mt
from meshtron.world import process_group
with process_group(torch.device("cpu")):
    rank = torch.distributed.get_rank()
    shard = torch.full((2,), float(rank))
    mt.inspect_rank()
    total = shard.clone()
    torch.distributed.all_reduce(total)
    pathlib.Path(f"rank-{rank}").write_text(str(total.tolist()))
"""


def looked_at() -> tuple[list[int], float]:
    seen: list[int] = []
    mt.inspect_rank(1, lambda: (time.sleep(0.5), seen.append(dist.get_rank())))
    started = time.monotonic()
    mt.inspect_rank()  # MESHTRON_DEBUG_RANK is not set
    return seen, time.monotonic() - started


def test_only_the_rank_asked_for_looks():
    ranks = run_ranks(looked_at, 3)
    assert [seen for seen, _ in ranks] == [[], [1], []]
    assert all(idle < 0.1 for _, idle in ranks)


def no_such_rank() -> None:
    mt.inspect_rank(5)


def test_a_rank_that_does_not_exist_is_refused():
    with pytest.raises(AssertionError, match=r"inspect_rank\(5\): there are 2 ranks"):
        run_ranks(no_such_rank, 2)


def test_the_environment_names_a_rank_for_pdb_under_torchrun(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)],
        input="p shard.tolist()\nn\np 'stepped', shard.tolist()\nb 9\nc\np 'broke', total.tolist()\nc\n",
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=os.environ
        | {"MESHTRON_DEBUG_RANK": "1", "PYTHONPATH": str(Path(mt.__file__).parents[1]), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "mt.inspect_rank()" in done.stdout  # pdb stands where the user's call stands
    assert "[1.0, 1.0]\n" in done.stdout
    assert "('stepped', [1.0, 1.0])" in done.stdout
    assert "('broke', [1.0, 1.0])" in done.stdout
    assert [(tmp_path / f"rank-{rank}").read_text() for rank in range(2)] == ["[1.0, 1.0]"] * 2


def test_an_environment_that_is_no_rank_is_refused(monkeypatch):
    monkeypatch.setenv("MESHTRON_DEBUG_RANK", "first")
    with pytest.raises(mt.LayoutError, match="MESHTRON_DEBUG_RANK = 'first': expected the number of a rank"):
        mt.inspect_rank()
