"""The manifest: the last file written to a checkpoint, naming every other one with its size and hash."""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import xxhash

from meshtron.checkpoint.files import FileRecord
from meshtron.errors import CheckpointError

MANIFEST = "manifest.json"
INDEX = "index.json"
FORMAT_VERSION = 1


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
        try:
            own_version = version("meshtron")
        except PackageNotFoundError:  # a checkout on PYTHONPATH without an install
            own_version = "0+unknown"
        return cls(
            step=step,
            meta=dict(meta),
            files=files,
            world_size=world_size,
            saved_at=time.time(),
            torch=torch.__version__,
            meshtron=own_version,
        )

    @property
    def size_bytes(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(record.size for record in self.files.values())

    def render(self) -> str:
        """The text of the file. The hash in its last line covers every byte before that line."""
        body = json.dumps(asdict(self), indent=1, sort_keys=True, allow_nan=False)
        return f'{{"manifest":\n{body},\n"xxh3_128": "{_hash(body)}"}}\n'


def _hash(text: str) -> str:
    return xxhash.xxh3_128_hexdigest(text.encode())


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a step folder.

    Raises:
        CheckpointError: there is none, a byte of it has changed, or a later format wrote it.
    """
    path = folder / MANIFEST
    try:
        text = path.read_bytes().decode()
        fields = json.loads(text)["manifest"]
        if fields["format_version"] > FORMAT_VERSION:
            raise CheckpointError(
                f"{path}: written in checkpoint format {fields['format_version']}, this meshtron reads up to "
                f"{FORMAT_VERSION}: load it with the version that wrote it, {fields['meshtron']}, or a later one"
            )
        records = {name: FileRecord(**record) for name, record in fields.pop("files").items()}
        manifest = Manifest(**fields, files=records)
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: no {MANIFEST}, so this is no whole checkpoint") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: damaged, cannot be read ({error})") from error
    if manifest.render() != text:
        raise CheckpointError(f"{path}: damaged, its hash does not match its content")
    return manifest


def faults(folder: Path, manifest: Manifest) -> dict[str, str]:
    """What the folder's listing already tells: file name -> missing, wrong size, or not of this checkpoint."""
    found = {path.name: path for path in folder.iterdir()}
    problems = {}
    for name, record in manifest.files.items():
        path = found.pop(name, None)
        if path is None or not path.is_file():
            problems[name] = "missing"
        elif (size := path.stat().st_size) != record.size:
            problems[name] = f"{size} bytes, expected {record.size}"
    found.pop(MANIFEST, None)
    return problems | dict.fromkeys(sorted(found), "not a file of this checkpoint")


def unwhole(folder: Path) -> str:
    """What keeps a step folder from being whole, as far as its manifest and sizes tell; empty where nothing does."""
    try:
        return "; ".join(f"{name}: {problem}" for name, problem in faults(folder, read_manifest(folder)).items())
    except (CheckpointError, OSError) as error:
        return str(error)


def is_whole(folder: Path) -> bool:
    """Whether the manifest is sound and every file is there at its full size; hashes are not computed."""
    return not unwhole(folder)
