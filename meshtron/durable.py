"""Writing that survives a power cut, and says which file a disk refused."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meshtron.errors import MeshtronError


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
