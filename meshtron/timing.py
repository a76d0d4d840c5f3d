"""Where the time of a run goes: a stopwatch for the log, traces of chosen steps, garbage collection on a schedule."""

import gc
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from meshtron import world

log = logging.getLogger(__name__)

_COLLECT_EVERY = 200  # steps


class Stopwatch:
    """Wall-clock time of the steps since the last lap."""

    def __init__(self) -> None:
        self._restart()

    def _restart(self) -> None:
        self._started, self._steps, self._waited_s = time.perf_counter(), 0, 0.0

    def count(self, data_wait_s: float) -> None:
        """Note that a step was started, and how long it waited for data."""
        self._steps += 1
        self._waited_s += data_wait_s

    @contextmanager
    def stopped(self, device: torch.device) -> Iterator[None]:
        """Leave out what happens inside (validation, saving); steps that were started are waited for first."""
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        since = time.perf_counter()
        yield
        self._started += time.perf_counter() - since

    def lap(self) -> tuple[float, float]:
        """Seconds a step, and seconds a step waited for data, since the last lap."""
        steps = max(1, self._steps)
        means = (time.perf_counter() - self._started) / steps, self._waited_s / steps
        self._restart()
        return means


@contextmanager
def scheduled_garbage_collection() -> Iterator[Callable[[int], None]]:
    """Keep Python from collecting whenever it likes, at another step on every rank; gives a function of the step.

    A full collection takes a tenth of a second or more and stalls all ranks, which wait for the one that collects.
    """
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield _collect_on_schedule
    finally:
        if was_enabled:
            gc.enable()


def _collect_on_schedule(step: int) -> None:
    if step % _COLLECT_EVERY == 0:
        gc.collect()


@contextmanager
def profiler(steps: str, folder: Path) -> Iterator[Callable[[int], None]]:
    """Trace steps ``"first:last"`` into ``folder/traces``; gives a function to call before each step.

    The files open in Perfetto (ui.perfetto.dev). An empty ``steps`` traces nothing.
    """
    first, last = map(int, steps.split(":")) if steps else (0, -1)
    tracing: list[torch.profiler.profile] = []

    def before(step: int) -> None:
        if step == first:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            tracing.append(torch.profiler.profile(activities=activities))
            tracing[0].start()
        elif step == last + 1 and tracing:
            _finish(tracing.pop(), folder, f"steps-{first}-{last}")

    try:
        yield before
        if tracing:
            _finish(tracing.pop(), folder, f"steps-{first}-{last}")
    finally:
        for unfinished in tracing:  # an error ended the run inside: torch allows only one profiler at a time
            unfinished.stop()


def _finish(profile: torch.profiler.profile, folder: Path, name: str) -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    profile.stop()
    path = folder / "traces" / f"{name}-rank{world.rank()}.json.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    profile.export_chrome_trace(str(path))
    log.info("trace of %s in %s", name, path)
