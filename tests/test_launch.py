"""How programs end: one message, from the rank that failed first, and soon after every rank is gone."""

import os
import subprocess
import sys
import time

import pytest

# Rank 1 fails while rank 0 is busy and, as a rank that saves on SIGTERM would, does not die of the signal alone.
SCRIPT = """
import os, signal, sys, time
from meshtron.errors import CheckpointError
from meshtron.launch import failure_reported, reported_errors

with reported_errors():
    signal.signal(signal.SIGTERM, lambda *_: os._exit(1) if failure_reported() else None)
    if os.environ["RANK"] == "1":
        time.sleep(0.5)
        raise CheckpointError("first problem of the disk\\nsecond problem of the disk")
    time.sleep(60)
"""


def torchrun(script, *arguments, ranks=2):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), str(script), *arguments]
    environment = os.environ | {"PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)


def test_one_failing_rank_ends_all_and_its_message_comes_last(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text(SCRIPT)
    started = time.monotonic()
    ended = torchrun(script)
    assert ended.returncode == 1
    assert time.monotonic() - started < 30  # most of it is torchrun's own start; rank 0 would sleep for 60 s
    lines = ended.stderr.splitlines()
    printed = [line for line in lines if line.startswith("error:")]
    assert printed == ["error: first problem of the disk", "error: second problem of the disk"]
    assert [line.strip() for line in lines[-3:-1]] == [
        "traceback : error: first problem of the disk",
        "error: second problem of the disk",
    ]


RANK = """
import sys, time
from meshtron.errors import RecipeError
from meshtron.launch import reported_errors

with reported_errors():
    {body}
"""


def ranks_ending_alike(tmp_path, body, count=3):
    """Start ``count`` processes as torchrun would, without torchrun's two seconds; return their stderr and status."""
    processes = []
    for rank in range(count):
        folder = tmp_path / str(rank)
        folder.mkdir()
        environment = os.environ | {"PYTHONPATH": os.getcwd(), "RANK": str(rank)}
        environment["TORCHELASTIC_ERROR_FILE"] = str(folder / "error.json")
        command = [sys.executable, "-c", RANK.format(body=body)]
        processes.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment))
    first = None
    while first is None:
        first = next((process for process in processes if process.poll() is not None), None)
        time.sleep(0.02)
    for process in processes:
        process.kill()  # as torchrun does
    return [process.communicate()[1] for process in processes], first.returncode


@pytest.mark.parametrize(
    ("body", "printed"),
    [
        ("raise RecipeError('run.name: bad')", "error: run.name: bad\n"),
        ("raise RuntimeError('[gloo] Connection closed by peer')", "which ended without a message ([gloo]"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_mistake_of_all_ranks_is_printed_by_one(tmp_path, body, printed):
    outputs, status = ranks_ending_alike(tmp_path, body)
    assert status == 1
    assert sum(bool(output) for output in outputs) == 1
    assert printed in "".join(outputs)


@pytest.mark.parametrize(
    ("body", "printed", "status"),
    [
        ("raise RecipeError('a: x\\nb: y')", "error: a: x\nerror: b: y\n", 1),
        ("raise KeyboardInterrupt", "", 130),
        ("sys.exit(3)", "", 3),
        ("print('fine')", "", 0),
    ],
)
def test_without_torchrun(body, printed, status):
    environment = {key: value for key, value in os.environ.items() if key != "TORCHELASTIC_ERROR_FILE"}
    command = [sys.executable, "-c", RANK.format(body=body)]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment | {"PYTHONPATH": os.getcwd()})
    assert (ended.stderr, ended.returncode) == (printed, status)
