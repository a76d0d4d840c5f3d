"""Checkpoints under kills, full disks, flipped bits and hostile files."""

import errno
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshtron.checkpoint import (
    Checkpointer,
    files,
    find_step,
    load,
    newest,
    read_rank_state,
    steps,
    verify,
    whole_steps,
)
from meshtron.checkpoint import checkpointer as checkpointer_module
from meshtron.errors import CheckpointError
from meshtron.testing import run_ranks

ROOT = Path(__file__).parent.parent


def save(folder: Path, step: int, **options) -> Path:
    with Checkpointer(folder, **options) as checkpointer:
        checkpointer.save(step, {"a": torch.full((40, 3), float(step))}, {"step": step}, {"rng": torch.tensor(step)})
    return folder / f"step-{step:08d}"


def step_of(folder: Path) -> int:
    """The step whose content ``folder`` holds; fails where parts are of different steps."""
    tensor = torch.zeros(40, 3)
    step = load(folder, {"a": tensor})["step"]
    assert bool((tensor == step).all())
    assert int(read_rank_state(folder, 0)["rng"]) == step
    return step


# Kills


def test_fifty_kills_at_random_moments():
    command = [sys.executable, "benchmarks/kill_resume.py", "--kills", "50", "--seed", str(time.time_ns() % 10**6)]
    ran = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "50 kills of 2 ranks" in ran.stdout
    assert "left behind .writing" in ran.stdout, f"no kill hit a save: {ran.stdout}"


def die_before_change(folder: Path, countdown: int, work) -> bool:
    """Run ``work`` in a child that dies right before its ``countdown``-th change below ``folder``; whether it did."""
    if (pid := os.fork()) == 0:
        remaining = [countdown]

        def about_to_change(path) -> None:
            if str(path).startswith(str(folder)):
                remaining[0] -= 1
                if remaining[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        def hook(event: str, args: tuple) -> None:
            written = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
            if written or event in ("os.rename", "os.mkdir", "os.rmdir", "os.remove"):
                # shutil.rmtree removes names relative to an open folder
                path = args[0]
                relative = event in ("os.rmdir", "os.remove") and not os.path.isabs(path)
                about_to_change(folder if relative else path)

        os.fsync = lambda _descriptor: about_to_change(folder)  # a kill, unlike a power cut, leaves what is written
        sys.addaudithook(hook)
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the child failed before it was killed"
    return os.WIFSIGNALED(status)


def kill_before_each_change(root: str) -> dict[str, int]:
    """Save 4, save 4 again, with retention, and die before each single change to the disk in turn."""
    seen: dict[str, int] = {}
    for step in (1, 2, 3):
        save(Path(root) / "start", step, async_save=False)
    for countdown in range(1, 1000):
        folder = Path(root) / str(countdown)
        shutil.copytree(Path(root) / "start", folder)

        def work(folder: Path = folder) -> None:
            for _ in range(2):
                save(folder, 4, keep_last=2, async_save=False)

        killed = die_before_change(folder, countdown, work)
        left = sorted({name.partition(".")[2] for name in os.listdir(folder) if "." in name})
        seen[" ".join(left)] = seen.get(" ".join(left), 0) + 1
        before = newest(folder)
        assert before is not None
        assert verify(before) == {}
        assert step_of(before) == int(before.name[5:]) >= 3
        with Checkpointer(folder) as checkpointer:
            found = checkpointer.newest_sound()
        assert found is not None
        assert found >= before
        assert not any("." in name for name in os.listdir(folder))
        for step in whole_steps(folder):
            assert step_of(steps.step_folder(folder, step)) == step
        save(folder, 4, async_save=False)
        assert step_of(find_step(folder)) == 4
        if not killed:
            return seen
    raise AssertionError("never ran to its end")


def kill_while_tidying(root: str) -> int:
    """Leftovers of every kind, and a kill before each change while they are cleared away."""
    start = Path(root) / "start"
    for step in (1, 2, 3, 4, 5):
        save(start, step, async_save=False)
    for step, suffix in ((1, ".removing"), (3, ".replaced"), (5, ".writing")):
        os.rename(start / f"step-{step:08d}", start / f"step-{step:08d}{suffix}")
    for countdown in range(1, 1000):
        folder = Path(root) / str(countdown)
        shutil.copytree(start, folder)
        killed = die_before_change(folder, countdown, lambda folder=folder: Checkpointer(folder))
        Checkpointer(folder).close()
        assert sorted(os.listdir(folder)) == [f"step-{step:08d}" for step in (2, 3, 4)]
        assert [step_of(steps.step_folder(folder, step)) for step in (2, 3, 4)] == [2, 3, 4]
        if not killed:
            return countdown
    raise AssertionError("never ran to its end")


def test_a_kill_before_any_change_to_the_disk_loses_nothing(tmp_path):
    (seen,) = run_ranks(kill_before_each_change, 1, str(tmp_path / "save"))
    assert seen["writing"] > 8
    assert seen["replaced writing"] >= 1
    assert seen["replaced"] >= 1
    assert seen["removing"] >= 1
    (changes,) = run_ranks(kill_while_tidying, 1, str(tmp_path / "tidy"))
    assert changes > 6


def test_a_step_that_cannot_be_replaced_keeps_its_former_content(tmp_path, monkeypatch):
    save(tmp_path, 1)
    rename = Path.rename

    def refused(path: Path, target: Path) -> Path:
        if path.name.endswith(".writing"):
            raise OSError(errno.EIO, "Input/output error", str(path))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(CheckpointError, match="Input/output error"):
        save(tmp_path, 1)
    assert step_of(tmp_path / "step-00000001") == 1


def test_leftovers_are_named_once(tmp_path, caplog):
    save(tmp_path, 1)
    (tmp_path / "step-00000002.writing").mkdir()
    os.rename(tmp_path / "step-00000001", tmp_path / "step-00000001.replaced")
    (tmp_path / "step-00000009.notes").mkdir()
    Checkpointer(tmp_path).close()
    assert "set aside step-00000002.writing" in caplog.text
    assert "put back the former step-00000001" in caplog.text
    caplog.clear()
    Checkpointer(tmp_path).close()
    assert not caplog.text
    assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000009.notes"]


def test_links_are_unlinked_and_what_cannot_be_deleted_stops_no_start(tmp_path, monkeypatch, caplog):
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    for step in (1, 2):
        save(folder, step)
    os.rename(folder / "step-00000001", elsewhere)
    (folder / "step-00000001").symlink_to(elsewhere)
    save(folder, 3, keep_last=1)
    assert os.listdir(folder) == ["step-00000003"]
    assert step_of(elsewhere) == 1
    (folder / "step-00000002.removing").mkdir()

    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(steps, "_remove", refuse)
    Checkpointer(folder).close()
    assert "step-00000002.removing: stopped before it was complete; cannot be removed" in caplog.text


def test_an_error_in_training_lets_the_save_in_flight_end(tmp_path, monkeypatch):
    write = checkpointer_module.write_file

    def slow(*args):
        time.sleep(0.3)
        return write(*args)

    monkeypatch.setattr(checkpointer_module, "write_file", slow)
    with suppress(ZeroDivisionError), Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"a": torch.ones(2)}, {})
        assert whole_steps(tmp_path) == []
        raise ZeroDivisionError
    assert whole_steps(tmp_path) == [1]


# Damage


def test_nothing_begins_anew_where_every_step_is_damaged(tmp_path):
    for step in (1, 2):
        (save(tmp_path, step) / "index.json").unlink()
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(CheckpointError, match="every step is damaged: 1, 2"):
        checkpointer.newest_sound()


def test_a_run_folder_stands_for_its_newest_whole_step_and_names_those_it_passes_over(tmp_path, caplog):
    sound, damaged = save(tmp_path, 1), save(tmp_path, 2)
    (damaged / "index.json").unlink()
    assert find_step(tmp_path) == sound
    assert f"{damaged} is damaged and is passed over: index.json: missing" in caplog.text


def flip(path: Path, position: int, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["manifest.json", "index.json", "rank-00000.safetensors"])
def test_any_flipped_bit_is_found_and_named(tmp_path, name):
    folder, chance = save(tmp_path, 1), random.Random(0)
    path = folder / name
    for position in range(0, path.stat().st_size, 5):
        bit = chance.randrange(8)
        flip(path, position, bit)
        assert list(verify(folder)) == [name], position
        flip(path, position, bit)
    assert verify(folder) == {}


def test_damage_is_refused_by_name_and_passed_over(tmp_path, caplog):
    def cut(path: Path) -> None:
        os.truncate(path, path.stat().st_size - 1)

    damages = {
        "rank-00000.safetensors": lambda path: flip(path, path.stat().st_size - 5, 3),
        "index.json": cut,
        "manifest.json": cut,
        "stranger": lambda path: path.write_text("?"),
    }
    sound = save(tmp_path, 1)
    for number, (name, harm) in enumerate(damages.items()):
        folder = save(tmp_path, 2 + number)
        harm(folder / name)
        with pytest.raises(CheckpointError, match=rf"{folder.name} is damaged: {name}: "):
            load(folder, {"a": torch.zeros(40, 3)})
    missing = save(tmp_path, 9)
    (missing / "rank-00000.safetensors").unlink()
    assert verify(missing) == {"rank-00000.safetensors": "missing"}
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.newest_sound() == sound
        for number in (2, 3, 4, 5, 9):
            assert f"step-0000000{number} is damaged and is passed over" in caplog.text
        checkpointer.save(9, {"a": torch.full((40, 3), 9.0)}, {"step": 9}, {"rng": torch.tensor(9)})
        checkpointer.wait()
        assert checkpointer.newest_sound() == missing
    assert step_of(missing) == 9


# Disks that fail


class FailingFile:
    """A file whose ``write`` fails after some bytes, as a full or broken disk does."""

    def __init__(self, file, budget: int, error: int) -> None:
        self.file, self.budget, self.error = file, budget, error

    def write(self, data) -> int:
        if self.budget <= 0:
            raise OSError(self.error, os.strerror(self.error))
        written = self.file.write(data[: self.budget])
        self.budget -= written
        return written

    def fileno(self) -> int:
        return self.file.fileno()

    def __enter__(self) -> "FailingFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()


def failing_open(name: str, budget: int, error: int):
    """``open``, but a new file of this name takes ``budget`` bytes, or is not even created if that is below 0."""

    def opened(path, mode="r", **options):
        if Path(path).name != name or "x" not in mode:
            return open(path, mode, **options)
        if budget < 0:
            raise OSError(error, os.strerror(error), str(path))
        return FailingFile(open(path, mode, **options), budget, error)

    return opened


@contextmanager
def failing(what: str, budget: int, error: int) -> Iterator[None]:
    """A disk that refuses to write a file of this name, or, on rank 0, one of the other calls."""

    def refuse(path: Path, *_args: Any, **_options: Any) -> None:
        raise OSError(error, os.strerror(error), str(path))

    with pytest.MonkeyPatch.context() as patch:
        if "." in what:
            patch.setattr(files, "open", failing_open(what, budget, error), raising=False)
        elif dist.get_rank() == 0:
            patch.setattr(steps if what == "sync_folder" else Path, what, refuse)
        yield


DISKS = [
    ("rank-00001.safetensors", 0, errno.ENOSPC),  # of rank 1: weights, optimizer, random states
    ("rank-00001.safetensors", 100, errno.EIO),
    ("index.json", 10, errno.ENOSPC),
    ("manifest.json", 100, errno.ENOSPC),  # position in the data, recipe
    ("rank-00001.safetensors", -1, errno.EROFS),
    ("index.json", -1, errno.EROFS),
    ("manifest.json", -1, errno.EROFS),
    ("mkdir", 0, errno.EROFS),
    ("sync_folder", 0, errno.EIO),
    ("rename", 0, errno.EROFS),
]


def disks_that_fail(folder: str) -> list[str]:
    """Inject a failure on one rank into each kind of file and each call, sync and async; all ranks raise the same."""
    rank, messages = dist.get_rank(), []
    with Checkpointer(folder, async_save=False) as checkpointer:
        checkpointer.save(1, {"a": torch.ones(40, 3)}, {"step": 1}, {"rng": torch.tensor(1)})
    for async_save in (False, True):
        for case in DISKS:
            checkpointer = Checkpointer(folder, async_save=async_save)
            with failing(*case), pytest.raises(CheckpointError) as raised, checkpointer:
                checkpointer.save(2, {"a": torch.zeros(40, 3)}, {"step": 2})
            messages.append(str(raised.value))
            dist.barrier()
            assert os.listdir(folder) == ["step-00000001"]
    # a limit of the operating system itself, lowered once the group exists: its store is a file, too
    checkpointer = Checkpointer(folder)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        with pytest.raises(CheckpointError) as raised, checkpointer:
            checkpointer.save(2, {"a": torch.zeros(40, 3)}, {"step": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    messages.append(str(raised.value))
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(2, {"a": torch.full((40, 3), 2.0)}, {"step": 2}, {"rng": torch.tensor(2)})
    return messages


def test_a_full_or_broken_disk_stops_every_rank_with_path_and_reason(tmp_path):
    first, second = run_ranks(disks_that_fail, 2, str(tmp_path))
    assert first == second
    assert len(first) == 2 * len(DISKS) + 1
    path = tmp_path / "step-00000002"
    for message, (name, _, error) in zip(
        first, [*DISKS, *DISKS, ("rank-00001.safetensors", 64, errno.EFBIG)], strict=True
    ):
        failed = f"rank {int('00001' in name)}: {path}.writing{'/' + name if '.' in name else ''}"
        assert message == f"saving step 2 to {path} failed: {failed}: {os.strerror(error)}"
    assert step_of(find_step(tmp_path)) == 2


# In the background


def failure_in_the_background(folder: str) -> list[str]:
    """Step 1 fails while it is written: ``failed`` says so, and the next save, wait or close raises it, once."""
    messages = []
    for finish in ("save", "wait", "close"):
        checkpointer = Checkpointer(folder)
        files.open = failing_open("rank-00000.safetensors", 0, errno.EIO)
        try:
            checkpointer.save(1, {"a": torch.ones(2)}, {})
            while not checkpointer.failed:
                time.sleep(0.01)
        finally:
            del files.open
        arguments = (2, {"a": torch.ones(2)}, {}) if finish == "save" else ()
        with pytest.raises(CheckpointError) as raised:
            getattr(checkpointer, finish)(*arguments)
        messages.append(str(raised.value))
        assert not checkpointer.failed
        if finish != "close":
            checkpointer.save(2, {"a": torch.ones(2)}, {})
            checkpointer.close()
    return messages


def test_a_failure_in_the_background_is_raised_on_all_ranks(tmp_path):
    first, second = run_ranks(failure_in_the_background, 2, str(tmp_path))
    assert first == second
    for message in first:
        assert message.startswith(f"saving step 1 to {tmp_path}/step-00000001 failed: rank 0: ")
    assert whole_steps(tmp_path) == [2]


def test_a_save_waits_for_the_one_in_flight_and_close_for_the_last(tmp_path, monkeypatch):
    writing, together, gate = [], [], threading.Event()
    write = checkpointer_module.write_file

    def slow(path: Path, pieces):
        writing.append(path)
        together.append(sum(file.exists() for file in tmp_path.glob("*.writing")))
        gate.wait(10)
        time.sleep(0.1)
        return write(path, pieces)

    monkeypatch.setattr(checkpointer_module, "write_file", slow)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"a": torch.ones(2)}, {})
    assert whole_steps(tmp_path) == []
    opened = time.monotonic()
    threading.Timer(0.3, gate.set).start()
    checkpointer.save(2, {"a": torch.ones(2)}, {})
    assert time.monotonic() - opened > 0.3
    assert whole_steps(tmp_path) == [1]
    checkpointer.close()
    assert whole_steps(tmp_path) == [1, 2]
    assert set(together) == {1}


# Retention


def test_retention_counts_whole_steps_and_spares_milestones_and_strangers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    folder = tmp_path / "run"
    (folder / "notes").mkdir(parents=True)
    (folder / "step-00000005").mkdir()  # not whole: neither counted nor deleted
    checkpointer = Checkpointer("run", keep_last=2, keep_every=4, async_save=False)
    monkeypatch.chdir(tmp_path / "elsewhere")
    for step in (1, 2, 3, 4, 6, 7, 8, 9, 10):
        checkpointer.save(step, {"a": torch.ones(2)}, {})
    assert checkpointer.steps() == [4, 8, 9, 10]
    checkpointer.save(3, {"a": torch.ones(2)}, {})  # the one just saved stays, whatever its number
    assert checkpointer.steps() == [3, 4, 8, 9, 10]
    assert sorted(path.name for path in folder.iterdir() if path.name in ("notes", "step-00000005")) == [
        "notes",
        "step-00000005",
    ]
    assert not list((tmp_path / "elsewhere").iterdir())
    checkpointer.close()
    with Checkpointer(folder) as keeps_all:
        for step in (11, 12, 13):
            keeps_all.save(step, {"a": torch.ones(2)}, {})
    assert whole_steps(folder) == [3, 4, 8, 9, 10, 11, 12, 13]


def test_what_cannot_be_deleted_is_logged_and_left(tmp_path, monkeypatch, caplog):
    for step in (1, 2):
        save(tmp_path, step)

    def refuse(_path: Path, _target: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "rename", refuse)
    steps.retain(tmp_path, keep_last=1, keep_every=0, saved=2)
    assert whole_steps(tmp_path) == [1, 2]
    assert "step 1 is due for deletion but stays" in caplog.text
