"""Writing that survives a power cut, and says which file a disk refused."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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


def write_whole(path: Path, text: str) -> None:
    """Put ``text`` into a file by one rename, synced: a kill or a full disk leaves the former file or the new one.

    Raises:
        OSError: it cannot be written; ``filename`` is set.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        error.filename = str(path)
        raise


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
