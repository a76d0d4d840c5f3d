"""The folder that holds a run's checkpoints: names, the commit, leftovers of a kill, retention.

    step-00000100             a whole checkpoint
    step-00000100.writing     being written; a leftover if no run is alive
    step-00000100.replaced    the former content of a step that is being saved again
    step-00000100.removing    being deleted by retention

Only the first name counts. Each change of state is one rename inside this folder, so a kill at any moment leaves
one of the states above. Everything here is done by one rank.
"""

import logging
import os
import re
import shutil
from pathlib import Path

from meshtron.checkpoint.manifest import MANIFEST, is_whole, unwhole
from meshtron.durable import make_folder, sync_folder
from meshtron.errors import CheckpointError

log = logging.getLogger(__name__)

WRITING, REPLACED, REMOVING = ".writing", ".replaced", ".removing"
_STEP = re.compile(r"step-(\d{8,})")


def step_folder(folder: Path, step: int) -> Path:
    """Where step ``step`` lies, or would lie, in a folder of checkpoints."""
    return Path(folder) / f"step-{step:08d}"


def named_steps(folder: Path) -> list[int]:
    """Numbers of all folders that bear a step's final name, in rising order; other names are ignored."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    matches = [match for name in names if (match := _STEP.fullmatch(name))]
    steps = {int(match[1]) for match in matches if match.string == step_folder(Path(), int(match[1])).name}
    return sorted(step for step in steps if step_folder(folder, step).is_dir())


def whole_steps(folder: Path) -> list[int]:
    """Steps with every file at its full size, in rising order; hashes are not computed."""
    return [step for step in named_steps(folder) if is_whole(step_folder(folder, step))]


def newest(folder: Path) -> Path | None:
    """The folder of the newest whole step, or None.

    Raises:
        CheckpointFormatError: a later meshtron wrote a step that is newer than all that are whole.
    """
    for step in reversed(named_steps(folder)):
        if not unwhole(step_folder(folder, step)):
            return step_folder(folder, step)
    return None


def find_step(path: Path | str) -> Path:
    """The step folder that a user means by ``path``.

    Args:
        path: a step folder, a folder of checkpoints, or a run's folder; of the last two the newest whole step.
            Newer ones that are not whole are logged as errors.

    Raises:
        CheckpointError: there is no checkpoint under ``path``.
        CheckpointFormatError: a later meshtron wrote the newest step.
    """
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder; expected a step folder or a run's folder")
    if (path / MANIFEST).exists():
        return path
    if _STEP.fullmatch(path.name):
        raise CheckpointError(f"{path}: no {MANIFEST}, so this is no whole checkpoint")
    for folder in (path, path / "checkpoints"):
        named = named_steps(folder)
        damaged: list[str] = []
        for step in reversed(named):
            problem = unwhole(step_folder(folder, step))
            if not problem:
                for line in damaged:
                    log.error(line)
                return step_folder(folder, step)
            damaged.append(f"{step_folder(folder, step)} is damaged and is passed over: {problem}")
        if named:
            steps = ", ".join(map(str, named))
            raise CheckpointError(f"{folder}: no whole checkpoint; damaged: {steps} (see meshtron ckpt verify)")
    raise CheckpointError(f"{path}: holds no checkpoint; expected a step folder or a run's folder")


def writing_folder(folder: Path, step: int) -> Path:
    """Where a step lies until it is whole."""
    return _beside(step_folder(folder, step), WRITING)


def begin(folder: Path, step: int) -> None:
    """Create the empty folder in which a step is written."""
    make_folder(folder)
    _remove(writing_folder(folder, step))
    writing_folder(folder, step).mkdir()


def commit(folder: Path, step: int) -> None:
    """Publish what ``begin`` started: every file in it is written and synced."""
    final, writing = step_folder(folder, step), writing_folder(folder, step)
    replaced = _beside(final, REPLACED)
    sync_folder(writing)
    former = os.path.lexists(final)
    if former:
        _remove(replaced)
        final.rename(replaced)
    try:
        writing.rename(final)
    except OSError:
        if former:  # the next start would put it back too; readers need not wait for that
            replaced.rename(final)
        raise
    sync_folder(folder)
    _remove(replaced)


def discard(folder: Path, step: int) -> None:
    """Remove what ``begin`` started, after a failure; what cannot be removed is left to ``clear_leftovers``."""
    shutil.rmtree(writing_folder(folder, step), ignore_errors=True)


def clear_leftovers(folder: Path) -> list[str]:
    """Tidy up after a kill, and say what was found: one line a leftover.

    A step that was whole before its replacement had its name gets it back; everything else is deleted. What cannot
    be deleted stays: it has no step's name, so it does no harm.
    """
    found = []
    names = os.listdir(folder) if folder.is_dir() else []
    for name in sorted(names):
        stem, dot, suffix = name.partition(".")
        if not _STEP.fullmatch(stem) or dot + suffix not in (WRITING, REPLACED, REMOVING):
            continue
        leftover, final = folder / name, folder / stem
        if dot + suffix == REPLACED and not final.exists():
            leftover.rename(final)
            found.append(f"{name}: stopped while {stem} was saved again; put back the former {stem}")
        else:
            try:
                _remove(leftover)
                done = "removed"
            except OSError as error:
                done = f"cannot be removed: {error}"
            found.append(f"{name}: stopped before it was complete; {done}")
    if found:
        sync_folder(folder)
    return found


def retain(folder: Path, *, keep_last: int, keep_every: int, saved: int) -> None:
    """Delete whole steps beyond the newest ``keep_last``, except milestones and the one just saved.

    Steps that are not whole are neither counted nor deleted. What cannot be deleted is logged and left.

    Args:
        folder: a folder of checkpoints.
        keep_last: how many to keep; 0 keeps all.
        keep_every: steps that are a multiple of this are kept for ever; 0 means no such steps.
        saved: the step that was just committed.
    """
    if keep_last == 0:
        return
    for step in whole_steps(folder)[:-keep_last]:
        if step == saved or (keep_every and step % keep_every == 0):
            continue
        doomed = step_folder(folder, step)
        removing = _beside(doomed, REMOVING)
        try:
            _remove(removing)
            doomed.rename(removing)
            _remove(removing)
        except OSError as error:
            log.warning("checkpoint step %d is due for deletion but stays: %s", step, error)


def _beside(final: Path, suffix: str) -> Path:
    return final.with_name(final.name + suffix)


def _remove(folder: Path) -> None:
    if folder.is_symlink():  # a step that somebody has moved to another disk: the link goes, the content is theirs
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)  # which unlinks what is a link in it
