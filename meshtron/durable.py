"""Files and folders of a run: names that survive a power cut, disks that refuse, one run a folder."""

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


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable: what was created, renamed or removed in it stays so after a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Create a folder and those above it that are missing, durably; one that is there already is left as it is."""
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(exist_ok=True)
    sync_folder(path.parent)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Say in one line which file or folder could not be written, and why.

    Raises:
        MeshtronError: in place of an OSError of the body.
    """
    try:
        yield
    except OSError as error:
        raise MeshtronError(f"{error.filename or path}: cannot be written: {error.strerror or error}") from error


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
