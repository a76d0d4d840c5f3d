"""Asking a run to stop: SIGTERM, SIGINT or a file named STOP, and all ranks' agreement on the step to stop at."""

import logging
import os
import select
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from meshtron.launch import failure_reported

log = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# A terminal's Ctrl-C reaches every rank and the launcher, which passes it on: that is still one request.
_SAME_REQUEST_S = 1.0
_LAUNCHER_S = 1.0  # how often a rank looks whether its launcher is there


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """What holds on at least one rank, and is therefore done by all."""

    stop: bool
    """The run is to stop."""
    save_failed: bool
    """A checkpoint could not be written in the background."""


class StopRequests:
    """Listens while it is open; a context manager, for the main thread.

    The first signal is a request. A second one, more than a second later, ends the process at once, wherever it
    is: signals are read by a thread of their own, because the main thread may be inside a collective that waits
    for a rank that is gone. So does a signal that arrives after a rank of this node has failed. Under torchrun its
    death is a request too: nobody would end its ranks, and the next start would find them writing.

    Args:
        file: a request too, as soon as it exists; it is removed when the run stops.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._requested: str | None = None
        self._flags = torch.zeros(2, dtype=torch.int32)
        self._work: dist.Work | None = None

    # Listening

    def __enter__(self) -> "StopRequests":
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        self._wakeup = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        self._handlers: dict[int, Any] = {number: signal.signal(number, _ignored) for number in _SIGNALS}
        self._launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self._thread = threading.Thread(target=self._listen, name="stop-requests", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._pipe[1])  # ends the thread's read
        self._thread.join()
        os.close(self._pipe[0])

    def _listen(self) -> None:
        first = None
        while True:
            if not select.select([self._pipe[0]], [], [], _LAUNCHER_S)[0]:
                if self._launcher not in (None, os.getppid()) and self._requested is None:
                    self._requested = "the launcher is gone"
                    log.warning("%s: stopping after this step", self._requested)
                continue
            if not (numbers := os.read(self._pipe[0], 1)):
                return
            if numbers[0] not in _SIGNALS:
                continue
            if failure_reported():
                _end(1)
            if first is None:
                first = time.monotonic()
                self._requested = signal.Signals(numbers[0]).name
                log.warning("%s: stopping after this step; a second signal ends the run at once", self._requested)
            elif time.monotonic() - first > _SAME_REQUEST_S:
                _end(128 + numbers[0])

    # Agreeing

    def ask(self, save_failed: bool) -> None:
        """Begin to tell the other ranks what this one knows, once in every step; ``agreed`` has the answer."""
        if self._requested is None and dist.get_rank() == 0 and self._file.exists():
            self._requested = str(self._file)
            log.warning("%s exists: stopping after this step", self._file)
        self._flags[0], self._flags[1] = self._requested is not None, save_failed
        if dist.get_world_size() > 1:
            self._work = dist.all_reduce(self._flags, dist.ReduceOp.MAX, async_op=True)

    def agreed(self) -> Agreement:
        """What the ranks knew at the last ``ask``, the same on all of them."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        stop, save_failed = map(bool, self._flags.tolist())
        if stop and dist.get_rank() == 0:
            self._file.unlink(missing_ok=True)
        return Agreement(stop=stop, save_failed=save_failed)


def _ignored(_number: int, _frame: Any) -> None:
    """A handler that has to be there for a signal's number to reach the pipe."""


def _end(status: int) -> None:
    """End the process without waiting for threads or communicators that may never finish."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
