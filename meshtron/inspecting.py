"""Look at one rank while the others wait: a debugger, or a function that prints what this rank holds."""

import bdb
import os
import pdb
import sys
import threading
from collections.abc import Callable
from functools import cache
from types import FrameType
from typing import Any

from torch import distributed as dist

from meshtron.errors import MeshtronError
from meshtron.world import DEBUG_RANK, WAIT, debug_rank

DEBUG_PORT = "MESHTRON_DEBUG_PORT"
"""Environment variable: a port on which debugpy waits for an editor, in place of pdb in the terminal."""


def inspect_rank(rank: int | None = None, look: Callable[[], Any] | None = None) -> None:
    """Stop every rank while rank ``rank`` runs ``look`` or is in a debugger; the others wait without a time limit.

    Every rank makes the call. Without ``look`` the rank enters pdb where the call stands, or, where
    ``MESHTRON_DEBUG_PORT`` is set, waits for an editor to attach to that port of 127.0.0.1 and shows it that line.
    The others go on when the rank does. To stop at breakpoints later on as well, set ``MESHTRON_DEBUG_RANK`` for
    the whole run: the process group is then made without a time limit, and train.py stops that rank before its first
    step.

    Args:
        rank: the rank to look at; by default the one in ``MESHTRON_DEBUG_RANK``, and if that is not set nothing is
            done.
        look: called on that rank, for instance to print shards: ``lambda: print(stage.head.weight.to_local())``.

    Raises:
        MeshtronError: there is no such rank, or an editor is to be waited for and debugpy is not installed or the
            port not free.
    """
    rank = debug_rank() if rank is None else rank
    if rank is None:
        return
    size = dist.get_world_size() if dist.is_initialized() else 1
    if not 0 <= rank < size:
        raise MeshtronError(f"inspect_rank({rank}): there are {size} ranks, from 0 (see {DEBUG_RANK})")
    here = (dist.get_rank() if dist.is_initialized() else 0) == rank
    # A group of its own: on this one alone ranks may wait for as long as somebody thinks.
    group = dist.new_group(backend="gloo", timeout=WAIT) if size > 1 else None
    if here and look is not None:
        look()
    elif here:
        _debug(rank)
    if group is not None:
        dist.barrier(group)
        dist.destroy_process_group(group)


def _debug(rank: int) -> None:
    port = os.environ.get(DEBUG_PORT)
    if port is None:
        print(f"rank {rank}: continue lets all ranks go on", file=sys.stderr, flush=True)
        _CallerPdb(skip=["bdb", "pdb", __name__]).look(sys._getframe(2))
        return
    _await_editor(port, rank)
    _suspend(sys._getframe(2))


def _await_editor(port: str, rank: int) -> None:
    """Return once an editor is attached; one that has stayed attached since an earlier call serves again."""
    try:
        import debugpy
    except ImportError:
        raise MeshtronError(f"{DEBUG_PORT} = {port}: an editor needs debugpy: pip install debugpy") from None
    if debugpy.is_client_connected():
        return
    _listen(port)
    print(f"rank {rank}: waiting for an editor on port {port}", file=sys.stderr, flush=True)
    debugpy.wait_for_client()


@cache  # debugpy listens once a process, and goes on doing so
def _listen(port: str) -> None:
    import debugpy

    try:
        debugpy.listen(("127.0.0.1", int(port)))
    except (ValueError, RuntimeError) as error:
        raise MeshtronError(f"{DEBUG_PORT} = {port!r}: expected the number of a free port ({error})") from None


def _suspend(frame: FrameType) -> None:
    """Show ``frame`` in the editor, before the call it stands in returns and lets the others go on.

    ``debugpy.breakpoint`` would stop inside this module or only after that call, so debugpy's engine is asked to
    wait in that frame; with tracing on it would take the first line of its own for the place to stop.
    """
    import debugpy
    import pydevd  # the engine, found once debugpy is imported

    debugger, thread = pydevd.get_global_debugger(), threading.current_thread()
    debugpy.trace_this_thread(False)
    debugger.set_suspend(thread, pydevd.CMD_SET_BREAK)
    debugger.do_wait_suspend(thread, frame, "line", None)
    debugpy.trace_this_thread(True)


class _CallerPdb(pdb.Pdb):
    """pdb in the frame of whoever called ``inspect_rank``, before that call returns and lets the others go on.

    ``set_trace`` would stop at the next line that runs: inside this module or torch, or only after the call.
    """

    def look(self, frame: FrameType) -> None:
        self.reset()
        self.interaction(frame, None)
        if self.quitting:
            raise bdb.BdbQuit
        goes_on = self.stoplineno == -1  # how bdb writes down ``continue``; next and step leave another value
        if goes_on and not self.breaks:
            return
        self.set_trace(frame)
        if goes_on:
            self.set_continue()
        else:
            self.set_next(frame)
