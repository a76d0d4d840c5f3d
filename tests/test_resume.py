"""Resuming and stopping a run: bit-equal continuation, changed recipes, signals, steps that are skipped."""

import errno
import logging
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from torch import distributed as dist
from torch.nn import functional as F

import meshtron as mt
from meshtron import durable, loop
from meshtron.build import build_job
from meshtron.changes import log_changes
from meshtron.checkpoint import checkpointer, files, read_manifest, whole_steps
from meshtron.checkpoint.manifest import _sealed
from meshtron.errors import CheckpointError, CheckpointFormatError, MeshtronError
from meshtron.loop import train
from meshtron.recipe import Recipe, dump_recipe
from meshtron.run_lock import only_run
from meshtron.testing import run_ranks
from tests.runs import logged, small_recipe, token_folder

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return token_folder(tmp_path_factory.mktemp("corpus") / "data", documents=50)


@pytest.fixture
def folder(tmp_path, corpus) -> Path:
    (tmp_path / "data").symlink_to(corpus)
    return tmp_path


def checkpoints(folder: Path) -> Path:
    return folder / "run" / "checkpoints"


def files_of(step_folder: Path) -> dict[str, str]:
    """Hashes of the tensor files: equal hashes are equal weights, moments and random states of every rank."""
    return {name: record.xxh3_128 for name, record in read_manifest(step_folder).files.items()}


def build_with_dropout(recipe: Recipe, device: torch.device) -> loop.Job:
    job = build_job(recipe, device)
    for stage in job.model.stages:
        for layer in stage.layers:
            layer.register_forward_hook(lambda _module, _inputs, output: F.dropout(output, 0.1))
    return job


def train_with_dropout(recipe: Recipe, stops: bool) -> int:
    """Train to the end; with ``stops`` by one process a step, as far as training can tell."""
    starts = 0
    loop.build_job = build_with_dropout
    try:
        while True:
            if stops and dist.get_rank() == 0:
                Path(recipe.run.dir).mkdir(exist_ok=True)
                (Path(recipe.run.dir) / "STOP").touch()
            for generator in (torch.manual_seed, random.seed, np.random.seed):
                generator(starts)  # whatever another process would begin with
            starts += 1
            dist.barrier()
            if train(recipe).step == recipe.training.steps:
                return starts
    finally:
        loop.build_job = build_job


@pytest.mark.parametrize("layout", ["2x1x1", "1x2x1"])
def test_a_run_that_stops_after_every_step_is_bit_equal_to_one_that_never_stops(folder, layout):
    """Over warm-up, decay, and the end of an epoch: 50 documents of 41 tokens are 8 steps of 16 sequences of 16."""
    hashes, lines = [], []
    for stops in (False, True):
        where = folder / str(stops)
        where.mkdir()
        (where / "data").symlink_to(folder / "data")
        recipe = small_recipe(where, layout, checkpoint={"interval": 0})
        starts = run_ranks(train_with_dropout, 2, recipe, stops)
        assert starts == [10 if stops else 1] * 2
        hashes.append(files_of(checkpoints(where) / "step-00000010"))
        lines.append(
            [{key: line[key] for key in ("step", "samples", "loss", "grad_norm", "lr")} for line in logged(where)]
        )
    assert lines[0] == lines[1]
    assert hashes[0] == hashes[1]


def test_a_changed_recipe_is_logged_and_followed(folder, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    train(small_recipe(folder, training={"steps": 6}, lr_schedule={"warmup_steps": 2, "decay_steps": 4}))
    changed = small_recipe(
        folder, training={"steps": 12, "global_batch_size": 8}, lr_schedule={"warmup_steps": 2, "decay_steps": 10}
    )
    caplog.clear()
    progress = train(changed)
    assert "changed since the checkpoint was saved: training.steps = 12, was 6" in caplog.text
    assert "changed since the checkpoint was saved: training.global_batch_size = 8, was 16" in caplog.text
    cosine = 0.003 * 0.5 * (1 + np.cos(np.pi * 4 / 10))
    assert f"learning rate of step 7: {cosine:.4g}, by the saved recipe 0; horizon 12 steps, was 6" in caplog.text
    assert logged(folder)[6]["lr"] == pytest.approx(cosine)
    assert (progress.step, progress.samples) == (12, 6 * 16 + 6 * 8)
    caplog.clear()
    train(changed)
    assert "changed since" not in caplog.text
    caplog.clear()
    monkeypatch.setenv("RANK", "1")  # what every rank finds alike, rank 0 says
    log_changes({"training.steps": (6, 12)}, dump_recipe(changed), changed, 12)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_another_batch_size_alone_says_that_the_learning_rate_is_the_same(folder, caplog):
    caplog.set_level(logging.INFO)
    train(small_recipe(folder, training={"steps": 4}, checkpoint={"interval": 2}))
    shutil.rmtree(checkpoints(folder) / "step-00000004")
    caplog.clear()
    train(small_recipe(folder, training={"steps": 4, "global_batch_size": 8}))
    assert "learning rate of step 3: 0.003, by the saved recipe 0.003; horizon 4 steps, was 4" in caplog.text


def test_a_checkpoint_of_another_model_is_refused_with_both_values(folder):
    train(small_recipe(folder, training={"steps": 1}))
    other = small_recipe(folder, model={"hidden_size": 64, "num_hidden_layers": 2})
    with pytest.raises(CheckpointError) as raised:
        train(other)
    assert "step-00000001 is of another model" in str(raised.value)
    assert "model.hidden_size is 32 in the checkpoint and 64 in the recipe" in str(raised.value)
    assert "model.num_hidden_layers is 4 in the checkpoint and 2 in the recipe" in str(raised.value)


def test_a_new_run_from_the_weights_of_another_and_again_after_a_kill(folder, caplog):
    caplog.set_level(logging.INFO)
    first, second = folder / "first", folder / "second"
    for where in (first, second):
        where.mkdir()
        (where / "data").symlink_to(folder / "data")
    train(small_recipe(first))
    recipe = small_recipe(second, checkpoint={"interval": 5, "resume": str(first / "run"), "load": "weights"})
    train(recipe)
    assert logged(second)[0]["loss"] < logged(first)[0]["loss"] - 0.1
    assert logged(second)[0]["lr"] == logged(first)[0]["lr"]
    # the same command again, when the last step was lost: its own step 5 is the newest
    shutil.rmtree(checkpoints(second) / "step-00000010")
    before = logged(second)
    caplog.clear()
    train(recipe)
    assert "is where this run began; it goes on from its own newest step" in caplog.text
    assert f"resumed {checkpoints(second) / 'step-00000005'} at step 5" in caplog.text
    assert [line["loss"] for line in logged(second)] == [line["loss"] for line in before]


def test_a_new_run_cannot_begin_in_the_folder_of_the_run_whose_weights_it_takes(folder):
    train(small_recipe(folder, training={"steps": 2}, checkpoint={"interval": 1}))
    before = files_of(checkpoints(folder) / "step-00000002")
    (folder / "link").symlink_to(folder / "run")
    for path in (folder / "run", folder / "link", checkpoints(folder), checkpoints(folder) / "step-00000001"):
        with pytest.raises(CheckpointError, match=r"run\.name or run\.dir\), or .*load = .all.") as raised:
            train(small_recipe(folder, checkpoint={"resume": str(path), "load": "weights"}))
        assert f'checkpoint.load = "weights" begins a new run, but {path} is a checkpoint of' in str(raised.value)
    assert whole_steps(checkpoints(folder)) == [1, 2]
    assert files_of(checkpoints(folder) / "step-00000002") == before
    assert [line["step"] for line in logged(folder)] == [1, 2]


def test_a_run_whose_newest_step_is_of_a_later_format_is_refused(folder, caplog):
    recipe = small_recipe(folder, training={"steps": 4}, checkpoint={"interval": 2})
    train(recipe)
    later = checkpoints(folder) / "step-00000004" / "manifest.json"
    later.write_text(_sealed('{"format_version": 9, "meshtron": "77.0"}'))
    for resume in ("auto", 4, str(folder / "run"), str(later.parent)):
        with pytest.raises(CheckpointFormatError, match=r"checkpoint format 9, written by meshtron 77\.0;.* upgrade"):
            train(small_recipe(folder, training={"steps": 4}, checkpoint={"interval": 2, "resume": resume}))
    assert "damaged" not in caplog.text
    assert later.exists()


def test_a_checkpoint_that_no_training_run_saved_is_refused(folder):
    mt.save(folder / "mine" / "checkpoints", {"model": torch.nn.Linear(2, 2)})
    with pytest.raises(CheckpointError, match="no training run saved it"):
        train(small_recipe(folder, checkpoint={"resume": str(folder / "mine")}))


def test_partial_leaves_a_replaced_head_as_it_is(folder):
    first, second = folder / "first", folder / "second"
    for where in (first, second):
        where.mkdir()
        (where / "data").symlink_to(folder / "data")
    train(small_recipe(first, training={"steps": 1}))
    section = {"resume": str(first / "run"), "load": "weights"}
    wider = {"vocab_size": 128}
    with pytest.raises(CheckpointError, match=r"model.vocab_size is 96 in the checkpoint and 128 in the recipe"):
        train(small_recipe(second, model=wider, checkpoint=section, training={"steps": 1}))
    names = ["model.lm_head*", "model.embed_tokens*"]
    train(small_recipe(second, model=wider, checkpoint=section | {"partial": names}, training={"steps": 1}))
    with pytest.raises(CheckpointError, match=r"partial pattern 'model\.heat\*' matches no name"):
        train(small_recipe(second, checkpoint={"resume": 1, "partial": ["model.heat*"]}))


def test_auto_passes_over_damage_and_an_explicit_step_stops(folder, caplog):
    caplog.set_level(logging.INFO)
    recipe = small_recipe(folder)
    with pytest.raises(CheckpointError, match=r"checkpoint\.resume = 7: .* has no whole step$"):
        train(small_recipe(folder, checkpoint={"resume": 7}))
    train(recipe)
    before = logged(folder)
    damaged = checkpoints(folder) / "step-00000010" / "rank-00000.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-100] ^= 4
    damaged.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"step-00000010 is damaged: rank-00000\.safetensors: hash"):
        train(small_recipe(folder, checkpoint={"resume": 10}))
    with pytest.raises(CheckpointError, match=r"checkpoint\.resume = 7: .* has whole steps 5, 10"):
        train(small_recipe(folder, checkpoint={"resume": 7}))
    caplog.clear()
    train(recipe)
    assert "step-00000010 is damaged and is passed over: rank-00000.safetensors: hash" in caplog.text
    assert "step-00000005 at step 5" in caplog.text
    assert [line["loss"] for line in logged(folder)] == [line["loss"] for line in before]
    caplog.clear()
    train(small_recipe(folder, checkpoint={"resume": 5}))
    assert "also holds the later steps 10" in caplog.text


def test_an_explicit_step_that_lacks_a_file_is_refused_by_its_name(folder):
    train(small_recipe(folder))
    (checkpoints(folder) / "step-00000010" / "index.json").unlink()
    with pytest.raises(CheckpointError, match=r"step-00000010 is damaged: index\.json: missing; .* whole steps 5"):
        train(small_recipe(folder, checkpoint={"resume": 10}))


def test_frozen_parameters_and_persistent_buffers_are_part_of_a_checkpoint(folder, monkeypatch):
    def count(module: torch.nn.Module, _inputs: tuple) -> None:
        module.seen.add_(1)

    def build(recipe: Recipe, device: torch.device) -> loop.Job:
        job = build_job(recipe, device)
        stage = job.model.stages[0]
        stage.register_parameter("frozen", torch.nn.Parameter(torch.zeros(3), requires_grad=False))
        stage.register_buffer("seen", torch.zeros(()))
        stage.register_forward_pre_hook(count)
        jobs.append(stage)
        return job

    jobs: list[torch.nn.Module] = []
    monkeypatch.setattr(loop, "build_job", build)
    train(small_recipe(folder, training={"steps": 2}))
    first = jobs[0].seen.item()
    assert first > 0
    train(small_recipe(folder, training={"steps": 4}))
    assert jobs[1].seen.item() == 2 * first


def test_a_second_run_in_one_folder_is_refused(tmp_path):
    with (
        only_run(tmp_path),
        pytest.raises(MeshtronError, match="another run is writing there"),
        only_run(tmp_path, 0),
    ):
        pass
    with only_run(tmp_path, 0):
        pass


# Stopping


def train_and_signal(recipe: Recipe, number: int, at_step: int) -> tuple[int, str]:
    """Train on a slow disk; the last rank alone gets a signal while it takes step ``at_step``."""
    forward_backward, write, steps = loop.forward_backward, checkpointer.write_file, []

    def with_signal(*args):
        steps.append(1)
        if len(steps) == at_step and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), number)
            time.sleep(0.3)  # until the listener has it
        return forward_backward(*args)

    def slow_write(*args):
        time.sleep(0.5)
        return write(*args)

    loop.forward_backward, checkpointer.write_file = with_signal, slow_write
    handler = signal.getsignal(number)
    try:
        progress = train(recipe)
    finally:
        loop.forward_backward, checkpointer.write_file = forward_backward, write
    assert signal.getsignal(number) is handler
    return progress.step, str(threading.enumerate())


@pytest.mark.parametrize(("number", "save_on_exit"), [(signal.SIGTERM, True), (signal.SIGINT, False)])
def test_a_signal_to_one_rank_stops_all_at_the_same_step_in_the_middle_of_a_save(folder, number, save_on_exit):
    recipe = small_recipe(folder, "1x2x1", checkpoint={"interval": 4, "save_on_exit": save_on_exit})
    ended = run_ranks(train_and_signal, 2, recipe, number, 5)
    assert {step for step, _ in ended} == {5}
    assert not any("stop-requests" in threads or "checkpoint-step" in threads for _, threads in ended)
    assert whole_steps(checkpoints(folder)) == ([4, 5] if save_on_exit else [4])


def test_a_stop_file_is_honoured_once(folder):
    recipe = small_recipe(folder)
    (folder / "run").mkdir()
    (folder / "run" / "STOP").touch()
    assert train(recipe).step == 1
    assert not (folder / "run" / "STOP").exists()
    assert whole_steps(checkpoints(folder)) == [1]
    assert train(recipe).step == 10


LISTEN = """
import sys, threading
from pathlib import Path
from meshtron.stopping import StopRequests
with StopRequests(Path("STOP")):
    print("ready", flush=True)
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()  # as a collective does: no Python code runs in this thread any more
"""


def test_a_second_signal_ends_the_process_at_once(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", LISTEN], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)  # the launcher passing on a Ctrl-C
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.5)
    process.send_signal(signal.SIGTERM)
    assert process.wait(5) == 128 + signal.SIGTERM
    process.communicate()


def torchrun(folder: Path, script: Path = ROOT / "train.py") -> subprocess.Popen:
    """``torchrun --nproc-per-node 2 train.py folder/recipe.toml``."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(script)]
    return subprocess.Popen(
        [*command, str(folder / "recipe.toml")],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_step(folder: Path, step: int, process: subprocess.Popen) -> None:
    """Until ``step`` or a later one is whole."""
    deadline = time.monotonic() + 120
    while not any(found >= step for found in whole_steps(checkpoints(folder))):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_signal_to_the_launcher_saves_and_leaves_no_process(folder):
    recipe = small_recipe(folder, "1x2x1", training={"steps": 100000}, checkpoint={"interval": 3, "keep_last": 2})
    (folder / "recipe.toml").write_text(dump_recipe(recipe))
    process = torchrun(folder)
    wait_for_step(folder, 3, process)
    ranks = psutil.Process(process.pid).children(recursive=True)
    assert len(ranks) >= 2
    asked = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - asked < 30
    assert "stopped as asked, after step" in errors, errors
    stopped_at = int(errors.partition("stopped as asked, after step ")[2].split()[0])
    assert whole_steps(checkpoints(folder))[-1] == stopped_at
    assert not any(rank.is_running() for rank in ranks)
    assert not [path for path in checkpoints(folder).iterdir() if "." in path.name]


SLOW = """
import sys, threading, time
from pathlib import Path
from meshtron.checkpoint import checkpointer
from meshtron.data.samples import Windows

folder = Path(sys.argv[1]).parent
write_file, read = checkpointer.write_file, Windows.__getitem__

def write_when_signalled(path, pieces):
    saving = folder / f"saving-{path.name}"
    if not saving.exists():
        saving.write_text(" ".join(thread.name for thread in threading.enumerate()))
    while not (folder / "signalled").exists():
        time.sleep(0.01)
    return write_file(path, pieces)

def read_slowly(windows, index):
    time.sleep(0.002)
    return read(windows, index)

checkpointer.write_file, Windows.__getitem__ = write_when_signalled, read_slowly
"""


def test_a_signal_while_data_workers_run_and_a_save_is_in_flight_ends_with_status_0(folder):
    """Both ranks are writing step 3 when one of them is told to stop, and write on only after that."""
    recipe = small_recipe(
        folder, "1x2x1", training={"steps": 100000}, checkpoint={"interval": 3, "keep_last": 2}, data={"workers": 3}
    )
    (folder / "recipe.toml").write_text(dump_recipe(recipe))
    (folder / "slow.py").write_text(SLOW + (ROOT / "train.py").read_text())
    process = torchrun(folder, folder / "slow.py")
    while len(list(folder.glob("saving-rank-*"))) < 2:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.02)
    assert whole_steps(checkpoints(folder)) == []
    ranks = {rank.environ().get("RANK"): rank for rank in psutil.Process(process.pid).children()}
    ranks["1"].send_signal(signal.SIGTERM)
    (folder / "signalled").touch()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "SIGTERM: stopping after this step" in errors
    stopped_at = int(errors.partition("stopped as asked, after step ")[2].split()[0])
    assert whole_steps(checkpoints(folder))[-1] == stopped_at
    assert not any(rank.is_running() for rank in ranks.values())
    assert not [path for path in checkpoints(folder).iterdir() if "." in path.name]
    for file in folder.glob("saving-rank-*"):
        assert "meshtron-data_1" in file.read_text()


def test_ranks_whose_launcher_is_killed_save_and_end(folder):
    recipe = small_recipe(folder, "1x2x1", training={"steps": 100000}, checkpoint={"interval": 3, "keep_last": 2})
    (folder / "recipe.toml").write_text(dump_recipe(recipe))
    process = torchrun(folder)
    wait_for_step(folder, 3, process)
    ranks = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    try:
        assert not psutil.wait_procs(ranks, timeout=30)[1]
    finally:
        for rank in ranks:
            with suppress(psutil.NoSuchProcess):
                rank.kill()
    errors = process.communicate()[1]
    assert "the launcher is gone" in errors, errors
    stopped_at = int(errors.partition("stopped as asked, after step ")[2].split()[0])
    assert whole_steps(checkpoints(folder))[-1] == stopped_at


def test_train_py_is_killed_and_ends_where_it_would_have(folder):
    uninterrupted = folder / "uninterrupted"
    uninterrupted.mkdir()
    (uninterrupted / "data").symlink_to(folder / "data")
    sections = {"training": {"steps": 40}, "checkpoint": {"interval": 1, "keep_last": 3}}
    run_ranks(train, 2, small_recipe(uninterrupted, "1x2x1", **sections))
    (folder / "recipe.toml").write_text(dump_recipe(small_recipe(folder, "1x2x1", **sections)))
    process = torchrun(folder)
    wait_for_step(folder, 5, process)
    psutil.Process(process.pid).children()[1].kill()
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert whole_steps(checkpoints(folder))[-1] < 40
    process = torchrun(folder)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert [line["step"] for line in logged(folder)] == list(range(1, 41))
    assert [line["loss"] for line in logged(folder)] == [line["loss"] for line in logged(uninterrupted)]
    last = [files_of(checkpoints(where) / "step-00000040") for where in (folder, uninterrupted)]
    assert last[0] == last[1]


def test_one_rank_to_eight_and_back(folder):
    """Steps 1 to 3 on one rank, to 6 on eight, to 10 on one: the losses are those of one rank throughout."""
    uninterrupted = folder / "uninterrupted"
    uninterrupted.mkdir()
    (uninterrupted / "data").symlink_to(folder / "data")
    run_ranks(train, 1, small_recipe(uninterrupted))
    for layout, ranks, at_step in (("1x1x1", 1, 3), ("2x2x2", 8, 3), ("1x1x1", 1, 0)):
        run_ranks(train_and_signal, ranks, small_recipe(folder, layout), signal.SIGTERM, at_step)
    assert [line["step"] for line in logged(folder)] == list(range(1, 11))
    losses, expected = ([line["loss"] for line in logged(where)] for where in (folder, uninterrupted))
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)
    rates, expected = ([line["lr"] for line in logged(where)] for where in (folder, uninterrupted))
    assert rates == expected


# Failures


class FailingDisk:
    """Opens files, but creates none with ``refused`` in its path."""

    def __init__(self, refused: str, error: int) -> None:
        self.refused, self.error = refused, error

    def __call__(self, path, mode="r", **options):
        if mode in ("xb", "w") and self.refused in str(path):
            raise OSError(self.error, os.strerror(self.error), str(path))
        return open(path, mode, **options)


def train_on_a_failing_disk(recipe: Recipe, error: int) -> tuple[str, int]:
    steps, forward_backward = [], loop.forward_backward

    def slower(*args):
        steps.append(1)
        time.sleep(0.05)
        return forward_backward(*args)

    loop.forward_backward = slower
    if dist.get_rank() == 1:
        files.open = FailingDisk("step-00000004", error)
    try:
        with pytest.raises(CheckpointError) as raised:
            train(recipe)
    finally:
        loop.forward_backward = forward_backward
        vars(files).pop("open", None)
    return str(raised.value), len(steps)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS])
def test_a_disk_that_fails_one_rank_stops_the_run_long_before_its_end(folder, error):
    recipe = small_recipe(folder, "1x2x1", training={"steps": 200}, checkpoint={"interval": 2})
    (first, steps), (second, also) = run_ranks(train_on_a_failing_disk, 2, recipe, error)
    assert first == second
    path = checkpoints(folder) / "step-00000004"
    failed = f"rank 1: {path}.writing/rank-00001.safetensors: {os.strerror(error)}"
    assert first == f"saving step 4 to {path} failed: {failed}"
    assert steps == also <= 6
    assert os.listdir(checkpoints(folder)) == ["step-00000002"]


def train_where_no_recipe_can_be_written(recipe: Recipe) -> list[str]:
    messages = []
    for error in (errno.ENOSPC, errno.EROFS):
        durable.open = FailingDisk("recipe.toml", error)
        try:
            with pytest.raises(MeshtronError) as raised:
                train(recipe)
        finally:
            del durable.open
        messages.append(str(raised.value))
    return messages


def test_a_recipe_that_cannot_be_written_stops_every_rank_and_leaves_the_former_one(folder):
    train(small_recipe(folder, training={"steps": 1}))
    before = (folder / "run" / "recipe.toml").read_text()
    first, second = run_ranks(train_where_no_recipe_can_be_written, 2, small_recipe(folder, "1x2x1"))
    assert first == second
    path = folder / "run" / "recipe.toml"
    reasons = ("No space left on device", "Read-only file system")
    assert first == [f"writing {path} failed: rank 0: {path}: {reason}" for reason in reasons]
    assert path.read_text() == before
    assert sorted(os.listdir(folder / "run")) == ["checkpoints", "metrics.jsonl", "recipe.toml"]
    assert [line["step"] for line in logged(folder)] == [1]


def train_with_poison(recipe: Recipe, at_steps: list[int], where: str, poisoned_rank: int) -> str:
    """Train while one rank of two puts out infinities, or has one gradient that is not a number, at some steps."""
    forward_backward, steps = loop.forward_backward, []

    def poisoned(job, batch):
        steps.append(1)
        if len(steps) not in at_steps or dist.get_rank() != poisoned_rank:
            return forward_backward(job, batch)
        stage = job.model.stages[0]
        if where == "loss":
            handle = stage.register_forward_hook(lambda _module, _inputs, output: output * float("inf"))
        else:
            weight = next(p for name, p in stage.named_parameters() if name.endswith("q_proj.weight"))
            handle = weight.register_hook(lambda gradient: gradient * float("nan"))
        loss = forward_backward(job, batch)
        handle.remove()
        return loss

    loop.forward_backward = poisoned
    try:
        train(recipe)
    except MeshtronError as error:
        return str(error)
    finally:
        loop.forward_backward = forward_backward
    return ""


# With pp the loss is the last stage's alone, and a gradient may be wrong on the first one only; with tp one rank's
# shard of it may be.
POISON = [
    ("1x2x1", "loss", 1),
    ("1x2x1", "gradient", 1),
    ("2x1x1", "loss", 1),
    ("2x1x1", "gradient", 0),
    ("1x1x2", "loss", 1),
    ("1x1x2", "gradient", 1),
]


@pytest.mark.parametrize(("layout", "where", "rank"), POISON)
def test_a_step_that_is_not_finite_is_skipped_by_all_ranks(folder, layout, where, rank):
    recipe = small_recipe(folder, layout, training={"steps": 5}, checkpoint={"interval": 1})
    assert run_ranks(train_with_poison, 2, recipe, [3], where, rank) == ["", ""]
    lines = logged(folder)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert [line["grad_norm"] is None for line in lines] == [False, False, True, False, False]
    assert [line["samples"] for line in lines] == [16, 32, 48, 64, 80]
    hashes = [files_of(checkpoints(folder) / f"step-{step:08d}") for step in range(1, 6)]
    for name in ("rank-00000.safetensors", "rank-00001.safetensors"):
        assert hashes[1][name] == hashes[2][name]
        assert hashes[2][name] != hashes[3][name]


@pytest.mark.parametrize(("layout", "where", "rank"), [POISON[0], POISON[3], POISON[5]])
def test_too_many_skipped_steps_end_the_run_and_name_the_last_checkpoint(folder, layout, where, rank):
    training = {"steps": 9, "max_skipped_steps": 3}
    recipe = small_recipe(folder, layout, training=training, checkpoint={"interval": 2})
    first, second = run_ranks(train_with_poison, 2, recipe, [2, 3, 5, 6, 7], where, rank)
    assert first == second
    assert re.search(r"step 7: loss \S+, gradient norm nan; 3 steps in a row were skipped", first)
    assert f"the last whole checkpoint is {checkpoints(folder)}/step-00000006" in first
    # the row is still counted after a resume
    assert "step 7: loss " in run_ranks(train_with_poison, 2, recipe, [1, 2], where, rank)[0]
