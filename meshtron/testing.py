"""Run a function on N gloo ranks inside one pytest process.

Importing torch, DTensor and pipelining costs seconds a process, so the ranks are forked from a server that has
imported them already, and they stay alive between calls. A call gives every rank a fresh process group; a rank
that raises ends the call at once with that rank's traceback, and all ranks of the call are replaced.
"""

import atexit
import functools
import gc
import multiprocessing
import os
import pickle
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

_PRELOAD = [
    "torch",
    "torch._dynamo",  # the first DTensor operation of a process imports it: seconds, if each rank did so itself
    "torch.distributed.checkpoint",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
]
_frozen_caches: list[Any] = []  # sharding caches that gc.get_objects no longer lists
_GRACE_S = 1.0  # how long the other ranks may go on after one has failed, to report their own errors


class RankFailure(AssertionError):
    """A rank of ``run_ranks`` raised, died or did not end in time; the message holds its traceback."""


def _serve(connection: Connection, path: list[str], directory: str) -> None:
    """Body of a rank: run one function after another, each in a process group of its own."""
    sys.path[:] = path
    os.chdir(directory)
    torch.set_num_threads(1)
    while True:
        try:
            rank, world_size, store, function, args = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        _freeze()
        identity = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": world_size,
            "LOCAL_WORLD_SIZE": world_size,
        }
        os.environ.update({key: str(value) for key, value in identity.items()})
        try:
            torch.distributed.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size
            )
            result = function(*args)
            torch.distributed.barrier()
            torch.distributed.destroy_process_group()
            _forget_meshes()
            gc.collect()  # a group in a cycle lives on, and each gloo group has a thread that wakes every 10 ms
            message = pickle.dumps((True, result))
        except BaseException:
            message = pickle.dumps((False, traceback.format_exc()))
        connection.send_bytes(message)


def _freeze() -> None:
    """Leave all that is imported by now out of later collections: torch alone makes each of them 0.2 s long."""
    _frozen_caches.extend(_sharding_caches())
    gc.freeze()


def _sharding_caches() -> list[Any]:
    """torch.distributed's functions with a cache, of those objects that are not frozen."""
    return [
        cached
        for cached in gc.get_objects()
        if type(cached) is functools._lru_cache_wrapper  # isinstance would wake deprecated objects of torch
        and (getattr(cached, "__module__", None) or "").startswith("torch.distributed")
    ]


def _forget_meshes() -> None:
    """Empty torch's caches of sharding decisions: they hold meshes, and so process groups that are gone.

    Meshes of equal shape compare equal, so a later call would be handed the earlier call's mesh.
    """
    for cached in _frozen_caches + _sharding_caches():
        cached.cache_clear()
    clear_fast_path = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)  # torch 2.13 has it
    if clear_fast_path is not None:
        clear_fast_path()
    planners = sys.modules.get("torch.distributed.tensor._redistribute")
    getattr(planners, "_planner_cache", {}).clear()


class _Rank:
    """One living worker process and the pipe to it."""

    def __init__(self, context: Any) -> None:
        self.connection, theirs = context.Pipe()
        self.process = context.Process(
            target=_serve, args=(theirs, list(sys.path), os.getcwd()), daemon=True, name="meshtron-rank"
        )
        self.process.start()
        theirs.close()

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


class RankPool:
    """Worker processes that are started when first needed and reused by every later call."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOAD)
        self._ranks: list[_Rank] = []
        self._folder = tempfile.mkdtemp(prefix="meshtron-ranks-")
        self._calls = 0

    def run(self, function: Callable[..., Any], world_size: int, args: tuple, timeout_s: float) -> list[Any]:
        """Run ``function(*args)`` on ranks 0 .. world_size - 1; return their results in rank order."""
        while len(self._ranks) < world_size:
            self._ranks.append(_Rank(self._context))
        self._calls += 1
        store = os.path.join(self._folder, f"store-{self._calls}")
        ranks = self._ranks[:world_size]
        for number, rank in enumerate(ranks):
            rank.connection.send_bytes(pickle.dumps((number, world_size, store, function, args)))
        results, failures = self._collect(ranks, time.monotonic() + timeout_s)
        if failures:
            for rank in ranks:
                rank.stop()
            self._ranks = self._ranks[world_size:]
            raise RankFailure("\n".join(failures))
        return [results[number] for number in range(world_size)]

    def _collect(self, ranks: list[_Rank], deadline: float) -> tuple[dict[int, Any], list[str]]:
        waiting = {rank.connection: number for number, rank in enumerate(ranks)}
        results: dict[int, Any] = {}
        failures: list[str] = []
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                if not failures:
                    failures.append(f"ranks {sorted(waiting.values())} did not end in time")
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                number = waiting.pop(connection)
                try:
                    succeeded, value = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    succeeded, value = False, "the process died"
                if succeeded:
                    results[number] = value
                else:
                    failures.append(f"rank {number} of {len(ranks)}:\n{value}")
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        return results, failures

    def close(self) -> None:
        """End every rank."""
        for rank in self._ranks:
            rank.stop()
        self._ranks.clear()
        shutil.rmtree(self._folder, ignore_errors=True)


_pool: list[RankPool] = []


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120.0) -> list[Any]:
    """Run ``function(*args)`` on ``world_size`` gloo ranks and return what each returned, in rank order.

    Args:
        function: a function at the top level of an importable module (it is pickled by name). It finds a
            process group ready and one thread a rank.
        world_size: number of ranks, all on this machine.
        args: picklable arguments, the same for every rank.
        timeout_s: seconds after which the call fails and its ranks are ended.

    Raises:
        RankFailure: a rank raised, died, or did not end in time.
    """
    if not _pool:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        _pool.append(RankPool())
        atexit.register(_pool[0].close)
    return _pool[0].run(function, world_size, args, timeout_s)
