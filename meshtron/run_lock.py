"""One run a folder: two at a time would write each other's checkpoints."""

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meshtron.errors import MeshtronError

log = logging.getLogger(__name__)

# Ranks of a run that was just killed need a moment to end.
_WAIT_S = 60.0


@contextmanager
def only_run(folder: Path, wait_s: float = _WAIT_S) -> Iterator[None]:
    """Hold ``folder`` for this run while the body runs; the operating system lets go of it when the process ends.

    Where the file system cannot lock a folder (NFS), nothing is held.

    Args:
        folder: a run's folder, which exists.
        wait_s: how long to wait for another run to end.

    Raises:
        MeshtronError: another run still holds it then.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        deadline, told = time.monotonic() + wait_s, False
        while not _locked(descriptor):
            if not told:
                log.warning("%s: another run is writing there; waiting %.0f s for it to end", folder, wait_s)
                told = True
            if time.monotonic() > deadline:
                raise MeshtronError(
                    f"{folder}: another run is writing there: end its processes (touch {folder / 'STOP'} asks them "
                    "to), or give this run another run.name"
                )
            time.sleep(0.1)
        yield
    finally:
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # NFS locks only files that are open for writing
        log.info("no lock on this file system (%s): see to it that no other run writes there", error.strerror)
    return True
