"""Kill a group of ranks that saves in a loop, at random moments, and check what the next start finds.

    python benchmarks/kill_resume.py --kills 200 --ranks 2

Every rank is a process that resumes from the newest sound step, checks what it loaded, and then saves step after
step, some of them twice, with retention on. SIGKILL reaches all ranks or one of them, while they start, save or
delete. The next start must find a step at least as new as the last one that was committed before the kill, with the
content of that step and no other, no leftover, and every folder that bears a step's name sound.

No training here: what is written is a few hundred kilobytes, so that kills come thick and fast.
"""

import argparse
import collections
import logging
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first DTensor operation imports it: seconds in every forked rank
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from meshtron.checkpoint import Checkpointer, load, read_rank_state, step_folder, verify, whole_steps
from meshtron.checkpoint.steps import REMOVING, REPLACED, WRITING

_STARTED = -1  # sent instead of a step when the first save begins


def state(step: int, mesh: DeviceMesh) -> dict[str, Any]:
    """Sharded, replicated and plain tensors whose every element tells the step that wrote it."""
    whole = torch.full((301, 101), float(step))
    return {
        "model.shard": distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None),
        "model.copy": distribute_tensor(whole, mesh, [Replicate()], src_data_rank=None),
        "count": torch.tensor(step),
    }


def check_loaded(folder: Path, step: int, mesh: DeviceMesh) -> None:
    """Fail unless ``folder`` holds exactly what step ``step`` saved."""
    loaded = state(0, mesh)
    meta = load(folder, loaded)
    for name, tensor in loaded.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        assert bool((local == step).all()), f"{folder}: {name} is not of step {step}"
    assert meta == {"step": step, "text": str(step) * 3}, f"{folder}: meta {meta}"
    own = read_rank_state(folder, dist.get_rank())
    assert own is not None, f"{folder}: no state of this rank"
    assert own["step"] == step, f"{folder}: rank state of step {own['step']}"
    assert int(own["rng"]) == step * 1000 + dist.get_rank(), f"{folder}: rank state {own['rng']}"


def resume_and_save(
    rank: int, world_size: int, store: Path, folder: Path, async_save: bool, tell: Connection
) -> None:
    """What one rank does until it is killed."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", (world_size,))
    alone = dist.new_group([rank], backend="gloo", use_local_synchronization=True)
    checkpointer = Checkpointer(folder, keep_last=2, async_save=async_save)
    if rank == 0:
        names = os.listdir(folder) if folder.exists() else []
        assert not any("." in name for name in names), f"leftovers stay: {names}"
        for step in whole_steps(folder):
            found = verify(step_folder(folder, step), alone)
            assert not found, f"step {step} has a final name and is damaged: {found}"
    newest = checkpointer.newest_sound()
    step = 0
    if newest is not None:
        step = int(newest.name.removeprefix("step-"))
        check_loaded(newest, step, mesh)
    if rank == 0:
        tell.send((_STARTED, step))
    while True:
        again = step > 0 and step % 3 == 0
        for _ in range(1 + again):
            rng = {"rng": torch.tensor(step * 1000 + rank), "step": step}
            checkpointer.save(step, state(step, mesh), {"step": step, "text": str(step) * 3}, rng)
            if step % 2:
                checkpointer.wait()
                if rank == 0:
                    tell.send((step, step))
        step += 1


@dataclass
class Report:
    """What happened over all kills."""

    kills: int = 0
    states: collections.Counter = field(default_factory=collections.Counter)
    """What a kill left behind: which kinds of leftover, or none."""
    failures: list[str] = field(default_factory=list)
    newest: int = -1
    """Newest step that a start resumed from."""
    lingered: int = 0
    """Times a rank outlived the one that was killed by more than ten seconds."""


def kill_and_resume(folder: Path, *, kills: int, ranks: int, seed: int) -> Report:
    """Start, kill, start again, ``kills`` times and once more to check the last one."""
    chance, report = random.Random(seed), Report()
    committed = -1
    for number in range(kills + 1):
        store = folder.parent / f"store-{number}"
        async_save = chance.random() < 0.75
        receive, send = Pipe(duplex=False)
        pids = [_fork(resume_and_save, rank, ranks, store, folder, async_save, send) for rank in range(ranks)]
        send.close()
        last = number == kills
        early = not last and chance.random() < 0.1  # while ranks start, resume and tidy up
        if not early:
            told = _receive(receive, seconds=60)
            if told is None:
                report.failures.append(f"start {number}: the ranks did not start")
            else:
                report.newest = told[1]
                if told[1] < committed:
                    report.failures.append(f"start {number}: step {committed} was committed, resumed from {told[1]}")
        time.sleep(0 if last else chance.uniform(0, 0.3 if early else 0.15))
        # A rank alone only once all have met: torch's own rendezvous waits minutes for one that never comes.
        victims = pids if early or last or chance.random() < 0.6 else [chance.choice(pids)]
        report.failures += _complaints(folder.parent, "ended")
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        report.lingered += _reap(pids, seconds=10)
        while (told := _receive(receive, seconds=0)) is not None:
            committed = max(committed, told[0])
        report.kills += not last
        report.failures += _complaints(folder.parent, "wrong")
        for path in folder.parent.glob("ended-*"):  # where another rank was killed, to fail is right
            path.unlink()
        kinds = sorted({suffix for suffix in (WRITING, REPLACED, REMOVING) for _ in folder.glob(f"*{suffix}")})
        report.states[" and ".join(kinds) or "nothing"] += not last
        if report.failures:
            break
    return report


def _fork(body: Any, rank: int, *args: Any) -> int:
    """Run ``body`` in a forked process: torch is imported already, and no thread runs in this one."""
    pid = os.fork()
    if pid:
        return pid
    try:
        torch.set_num_threads(1)
        logging.disable(logging.WARNING)  # of leftovers, at almost every start
        body(rank, *args)
    except BaseException as error:
        kind = "wrong" if isinstance(error, AssertionError) else "ended"
        (args[2].parent / f"{kind}-{rank}").write_text(traceback.format_exc())
    os._exit(1)


def _complaints(folder: Path, kind: str) -> list[str]:
    """What ranks wrote before they ended: ``"wrong"`` of what they found, ``"ended"`` for any other reason."""
    return [path.read_text() for path in sorted(folder.glob(f"{kind}-*"))]


def _receive(connection: Connection, seconds: float) -> tuple[int, int] | None:
    try:
        return connection.recv() if connection.poll(seconds) else None
    except EOFError:
        return None


def _reap(pids: list[int], seconds: float) -> bool:
    """Wait for every process; kill those that outlive ``seconds``, and say whether there were any."""
    deadline, waiting = time.monotonic() + seconds, set(pids)
    while waiting and time.monotonic() < deadline:
        waiting -= {pid for pid in waiting if os.waitpid(pid, os.WNOHANG)[0]}
        time.sleep(0.005)
    for pid in waiting:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return bool(waiting)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = kill_and_resume(
            Path(folder) / "checkpoints", kills=options.kills, ranks=options.ranks, seed=options.seed
        )
    print(f"{report.kills} kills of {options.ranks} ranks in {time.monotonic() - started:.0f} s, seed {options.seed}")
    print(f"steps saved: {report.newest + 1}; ranks that outlived a killed one by 10 s: {report.lingered}")
    for left, count in sorted(report.states.items()):
        print(f"left behind {left}: {count}")
    for failure in report.failures:
        print(f"FAILED {failure}")
    return 1 if report.failures or report.lingered else 0


if __name__ == "__main__":
    sys.exit(main())
