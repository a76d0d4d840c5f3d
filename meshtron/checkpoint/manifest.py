"""The manifest: the last file written to a checkpoint, naming every other one with its size and hash."""

import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import xxhash

from meshtron.checkpoint.files import FileRecord
from meshtron.checkpoint.untrusted import check_levels, count, instance, open_file, read_json
from meshtron.errors import CheckpointError, CheckpointFormatError

MANIFEST = "manifest.json"
INDEX = "index.json"
FORMAT_VERSION = 1
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def rank_file(rank: int) -> str:
    """Name of the file that holds one rank's tensors."""
    return f"rank-{rank:05d}.safetensors"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint says of itself."""

    step: int
    meta: dict[str, Any]
    """What the caller of ``save`` gave: samples, recipe, layout ..."""
    files: dict[str, FileRecord]
    """Every file of the folder but the manifest itself, by name."""
    world_size: int
    """Ranks that saved it."""
    saved_at: float
    """Seconds since the epoch."""
    torch: str
    meshtron: str
    format_version: int = FORMAT_VERSION

    @classmethod
    def of(cls, step: int, meta: Mapping[str, Any], files: dict[str, FileRecord], world_size: int) -> "Manifest":
        """A manifest for a checkpoint that is being written here and now."""
        return cls(
            step=step,
            meta=dict(meta),
            files=files,
            world_size=world_size,
            saved_at=time.time(),
            torch=torch.__version__,
            meshtron=_own_version(),
        )

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Manifest":
        """The manifest that ``fields`` are, if they are one.

        Raises:
            ValueError, KeyError: they are none.
        """
        if fields.keys() != cls.__dataclass_fields__.keys():
            raise ValueError(f"fields {sorted(fields)}, expected {sorted(cls.__dataclass_fields__)}")
        files = {}
        for name, record in instance(fields["files"], dict).items():
            if not _PLAIN_NAME.fullmatch(name):
                raise ValueError(f"{name!r} is no name of a file in this folder")
            record = instance(record, dict)
            files[name] = FileRecord(size=count(record["size"]), xxh3_128=instance(record["xxh3_128"], str))
        check_levels(fields["meta"])
        return cls(
            step=count(fields["step"]),
            meta=instance(fields["meta"], dict),
            files=files,
            world_size=count(fields["world_size"]),
            saved_at=instance(fields["saved_at"], float),
            torch=instance(fields["torch"], str),
            meshtron=instance(fields["meshtron"], str),
        )

    @property
    def size_bytes(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(record.size for record in self.files.values())

    def render(self) -> str:
        """The text of the file. The hash in its last line covers every byte before that line."""
        return _sealed(json.dumps(asdict(self), indent=1, sort_keys=True, allow_nan=False))


def _own_version() -> str:
    try:
        return version("meshtron")
    except PackageNotFoundError:  # a checkout on PYTHONPATH without an install
        return "0+unknown"


# The envelope, "format_version" and "meshtron" are the same in every format, so that a manifest of a later one can
# be told from a damaged one.
_HEAD = '{"manifest":\n'


def _sealed(body: str) -> str:
    return f'{_HEAD}{body},\n"xxh3_128": "{xxhash.xxh3_128_hexdigest(body.encode())}"}}\n'


_TAIL_LENGTH = len(_sealed("")) - len(_HEAD)


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a step folder.

    Raises:
        CheckpointError: there is none, or it is damaged.
        CheckpointFormatError: a later meshtron wrote it.
    """
    path = Path(folder) / MANIFEST
    try:
        with open_file(path) as file:
            text = file.read().decode()
        body = text[len(_HEAD) : -_TAIL_LENGTH]
        if _sealed(body) != text:
            raise CheckpointError(f"{path}: damaged, its hash does not match its content")
        fields = instance(read_json(body), dict)
        if (found := count(fields["format_version"])) > FORMAT_VERSION:
            raise CheckpointFormatError(
                f"{path}: checkpoint format {found}, written by meshtron {ascii(fields['meshtron'])[1:-1]:.40}; this "
                f"meshtron, {_own_version()}, reads format {FORMAT_VERSION}: upgrade meshtron to load it"
            )
        return Manifest.from_json(fields)
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: no {MANIFEST}, so this is no whole checkpoint") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError) as error:
        raise CheckpointError(f"{path}: damaged, cannot be read ({error})") from error


def faults(folder: Path, manifest: Manifest) -> dict[str, str]:
    """What the folder's listing already tells: file name -> missing, wrong size, or not of this checkpoint."""
    with os.scandir(folder) as entries:
        found = {entry.name: entry for entry in entries}
    problems = {}
    for name, record in manifest.files.items():
        entry = found.pop(name, None)
        if entry is None:
            problems[name] = "missing"
        elif entry.is_symlink():
            problems[name] = "a link, expected a file: put what it points to in its place"
        elif not entry.is_file():
            problems[name] = "not a file"
        elif (size := entry.stat().st_size) != record.size:
            problems[name] = f"{size} bytes, expected {record.size}"
    found.pop(MANIFEST, None)
    return problems | dict.fromkeys(sorted(found), "not a file of this checkpoint")


def unwhole(folder: Path) -> str:
    """What keeps a step folder from being whole, as far as its manifest and sizes tell; empty where nothing does.

    Raises:
        CheckpointFormatError: a later meshtron wrote it.
    """
    try:
        return "; ".join(f"{name}: {problem}" for name, problem in faults(folder, read_manifest(folder)).items())
    except CheckpointFormatError:
        raise
    except (CheckpointError, OSError) as error:
        return str(error)


def is_whole(folder: Path) -> bool:
    """Whether this meshtron reads the manifest and every file is there at its full size; hashes are not computed."""
    try:
        return not unwhole(folder)
    except CheckpointFormatError:
        return False
