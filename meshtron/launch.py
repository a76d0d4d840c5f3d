"""How a program ends when something goes wrong: one message, from the rank that failed first, then every rank.

Under torchrun a mistake usually shows on every rank, or on one rank whose peers then lose their connection to it.
The first rank of a node to fail claims a file that torchrun's ranks share and prints; the others keep quiet and
wait for torchrun to end them. The message also goes into torchrun's error file, so that the summary torchrun
prints at the very end repeats it in place of a traceback.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meshtron.errors import MeshtronError

# What gloo and NCCL say on ranks whose peer has gone away.
_LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "remote process exited", "Broken pipe")
_CULPRIT_S = 1.0  # how long a rank that has lost a peer lets that peer, or the launcher, speak first
_END_S = 10.0  # how long a quiet rank waits for torchrun to end it; torchrun looks ten times a second


@contextmanager
def reported_errors() -> Iterator[None]:
    """Turn an exception into what a user should see, and end the process with status 1.

    A MeshtronError becomes a line starting ``error:`` on stderr for each of its lines, without a traceback; any
    other exception keeps its traceback. Under torchrun it is printed once a node, and the process ends at once
    (without waiting for threads or communicators that may never finish), so that torchrun ends all the others.
    """
    try:
        yield
    except MeshtronError as error:
        _end("".join(f"error: {line}\n" for line in str(error).splitlines()))
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if _shared_folder() is None:
            raise
        if any(phrase in str(error) for phrase in _LOST_PEER):
            time.sleep(_CULPRIT_S)
            first_line = (str(error).splitlines() or [""])[0]
            _end(f"error: rank {_rank()} lost another rank, which ended without a message ({first_line})\n")
        _end(f"rank {_rank()}:\n{traceback.format_exc()}")


def failure_reported() -> bool:
    """Whether a rank of this node has already failed: a handler of SIGTERM should then end at once, not save."""
    folder = _shared_folder()
    return folder is not None and _claim_file(folder).exists()


def _end(message: str) -> None:
    folder = _shared_folder()
    if folder is None:
        sys.stderr.write(message)
        sys.exit(1)
    if _claim(folder):
        sys.stderr.write(message)
        _write_error_file(message)
    else:
        time.sleep(_END_S)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _rank() -> str:
    return os.environ.get("RANK", "0")


def _shared_folder() -> Path | None:
    """A folder that this node's ranks of one torchrun (and one restart of it) share; None without torchrun."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(error_file).parent.parent if error_file else None


def _claim_file(folder: Path) -> Path:
    return folder / "meshtron-failed"


def _claim(folder: Path) -> bool:
    """Whether this rank is the first of its node to fail."""
    try:
        _claim_file(folder).touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:  # torchrun has removed the folder already, or the disk is full: better twice than never
        return True
    return True


def _write_error_file(message: str) -> None:
    """Leave ``message`` where torchrun looks for it (its documented format; the callstack is what it prints)."""
    details = {"py_callstack": message.rstrip(), "timestamp": str(int(time.time()))}
    try:
        with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w", encoding="utf-8") as file:
            json.dump({"message": {"message": message.rstrip(), "extraInfo": details}}, file)
    except OSError:
        pass  # it is on stderr already
