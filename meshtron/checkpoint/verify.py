"""Whether every byte of a checkpoint is as it was written; the work is divided over ranks and threads."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch.distributed as dist

from meshtron.checkpoint.files import FileRecord, hash_file
from meshtron.checkpoint.manifest import MANIFEST, Manifest, faults, read_manifest
from meshtron.checkpoint.ranks import Ranks, reason
from meshtron.errors import CheckpointError, CheckpointFormatError


def verify(folder: Path | str, process_group: dist.ProcessGroup | None = None) -> dict[str, str]:
    """Compare every file of a step folder with the manifest, hashes included.

    Args:
        folder: a step folder.
        process_group: the ranks that share the work, each of them calling this; by default the whole world, or
            this process alone.

    Returns:
        What is wrong by file name, the same on every rank; empty where the checkpoint is sound.

    Raises:
        CheckpointFormatError: a later meshtron wrote it, so what is right is not known.
    """
    with Ranks(process_group) as ranks:
        return damage(Path(folder), ranks)


def damage(folder: Path, ranks: Ranks) -> dict[str, str]:
    """``verify`` by ranks that exist already."""
    manifest, found = ranks.answer(lambda: _listing(folder))
    if manifest is not None:
        unread = {name: record for name, record in manifest.files.items() if name not in found}
        mine = _share(unread, ranks.rank, ranks.size)
        with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
            problems = pool.map(lambda item: (item[0], _hash_fault(folder, *item)), mine.items())
            wrong = {name: problem for name, problem in problems if problem is not None}
        for part in ranks.all_gather(wrong):
            found |= part
    return dict(sorted(found.items()))


def _listing(folder: Path) -> tuple[Manifest | None, dict[str, str]]:
    try:
        manifest = read_manifest(folder)
        return manifest, faults(folder, manifest)
    except CheckpointFormatError:
        raise
    except (CheckpointError, OSError) as error:
        return None, {MANIFEST: reason(error)}


def _share(files: dict[str, FileRecord], rank: int, size: int) -> dict[str, FileRecord]:
    """The files that one rank reads: the largest ones first, dealt out in turn."""
    names = sorted(files, key=lambda name: (-files[name].size, name))
    return {name: files[name] for name in names[rank::size]}


def _hash_fault(folder: Path, name: str, record: FileRecord) -> str | None:
    try:
        found = hash_file(folder / name)
    except OSError as error:
        return reason(error)
    if found == record:
        return None
    return f"hash {found.xxh3_128}, expected {record.xxh3_128}: its content has changed since it was written"
