"""Token shards: the folder that ``meshtron prepare`` writes and training maps into memory.

    tokens.json            header: version, dtype, counts, vocabulary size, tokenizer hash, sources, shards
    shard-00000.bin        token ids, little-endian uint16 (vocabulary up to 65,536) or uint32, nothing else
    shard-00000.ends       where each document ends, little-endian uint64, counted in tokens over all shards
    shard-00000.prompts    only in corpora with prompts: how many leading tokens of each document are prompt,
    uint32 tokenizer.json         the tokenizer that made the ids

The shards of a folder are one long row of tokens; a document never spans two shards. A folder is published
whole: it is written beside its place, synced, and renamed.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from meshtron.errors import DataError

HEADER = "tokens.json"
FORMAT = "meshtron-tokens"
VERSION = 1
DTYPES: dict[str, np.dtype] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


def dtype_name(vocab_size: int) -> str:
    """Name of the smallest dtype that holds ids 0 .. ``vocab_size`` - 1: 65,536 ids still fit two bytes."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One ``.bin`` file and the indexes beside it."""

    name: str
    """File name without its ending."""
    num_tokens: int
    num_documents: int


@dataclass(frozen=True, kw_only=True)
class Header:
    """What ``tokens.json`` holds."""

    dtype: str
    """A key of ``DTYPES``."""
    vocab_size: int
    """Ids are below this."""
    eos_id: int
    """The id that ends every document."""
    tokenizer_hash: str
    """SHA-256 of tokenizer.json, in hex."""
    shards: tuple[Shard, ...]
    has_prompts: bool = False
    """Whether ``.prompts`` files are there."""
    sources: tuple[str, ...] = ()
    """What the text was read from."""
    counts: dict[str, int] = field(default_factory=dict)
    """What prepare saw: documents read, empty, skipped as bad, bytes of text."""

    @property
    def num_tokens(self) -> int:
        return sum(shard.num_tokens for shard in self.shards)

    @property
    def num_documents(self) -> int:
        return sum(shard.num_documents for shard in self.shards)

    def dumps(self) -> str:
        """The header as JSON, with the totals for people who read it."""
        totals = {"num_tokens": self.num_tokens, "num_documents": self.num_documents}
        return json.dumps({"format": FORMAT, "version": VERSION, **totals, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def read(cls, folder: Path) -> "Header":
        """Read the header of a folder.

        Raises:
            DataError: no header there, not one of ours, or of another version.
        """
        path = folder / HEADER
        try:
            raw: dict[str, Any] = json.loads(path.read_text())
        except FileNotFoundError:
            raise DataError(f"{folder}: no {HEADER} there, so not a folder made by `meshtron prepare`") from None
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: unreadable header ({error})") from None
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            raise DataError(f'{path}: expected "format": "{FORMAT}"')
        if raw.get("version") != VERSION:
            raise DataError(f"{path}: format version {raw.get('version')!r}, this meshtron reads {VERSION}")
        try:
            shards = tuple(Shard(**shard) for shard in raw["shards"])
            known = {name: raw[name] for name in cls.__dataclass_fields__ if name not in ("shards", "sources")}
            header = cls(**known, shards=shards, sources=tuple(raw["sources"]))
        except (KeyError, TypeError) as error:
            raise DataError(f"{path}: incomplete header ({error!r}); prepare the folder again") from None
        if header.dtype not in DTYPES:
            raise DataError(f"{path}: dtype {header.dtype!r}, expected one of {', '.join(DTYPES)}")
        return header


class TokenSource(Protocol):
    """A long row of tokens with documents in it; own shards and foreign formats alike."""

    name: str
    num_tokens: int
    document_ends: np.ndarray
    """Where each document ends, in tokens from the start; the last entry is ``num_tokens``."""
    prompt_lengths: np.ndarray | None
    """Leading tokens of each document that carry no loss, or None."""

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens [start, start + count), in the file's dtype."""

    def locate(self, position: int) -> str:
        """File and offset of a token, for error messages."""


class TokenFiles:
    """Token files of one dtype, mapped and read as one row (a TokenSource).

    Args:
        name: what error messages call it.
        files: path and number of tokens of each file, in order.
        dtype: of the ids in the files.
        document_ends: see TokenSource; empty where documents are unknown.
        prompt_lengths: see TokenSource.

    Raises:
        DataError: a file is missing or its size is not what its number of tokens says.
    """

    def __init__(
        self,
        name: str,
        files: Sequence[tuple[Path, int]],
        dtype: np.dtype,
        document_ends: np.ndarray,
        prompt_lengths: np.ndarray | None = None,
    ) -> None:
        self.name = name
        self.dtype = dtype
        self.files = [path for path, _ in files]
        self.document_ends = document_ends
        self.prompt_lengths = prompt_lengths
        self._maps = [map_file(path, dtype, count) for path, count in files]
        self._starts = np.cumsum([0, *(count for _, count in files)])
        self.num_tokens = int(self._starts[-1])

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens [start, start + count): a view of the map, or a copy where they lie in several files."""
        number = int(np.searchsorted(self._starts, start, side="right")) - 1
        offset = start - int(self._starts[number])
        part = self._maps[number][offset : offset + count]
        if len(part) == count:
            return part
        return np.concatenate([part, self.read(start + len(part), count - len(part))])

    def locate(self, position: int) -> str:
        """File, token number in it and byte offset of a token."""
        number = int(np.searchsorted(self._starts, position, side="right")) - 1
        offset = position - int(self._starts[number])
        return f"{self.files[number]}, token {offset} (byte {offset * self.dtype.itemsize})"


def map_file(path: Path, dtype: np.dtype, count: int) -> np.ndarray:
    """Map ``count`` values of ``dtype`` that fill a file.

    Raises:
        DataError: the file is missing or has another size.
    """
    try:
        size = path.stat().st_size
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None
    if size != count * dtype.itemsize:
        raise DataError(
            f"{path}: {size} bytes, expected {count * dtype.itemsize} ({count} values of {dtype.name}): the "
            "file is "
            "cut short or was written with another dtype"
        )
    return np.memmap(path, dtype=dtype, mode="r", shape=(count,)) if count else np.empty(0, dtype)


def open_shards(folder: str | Path) -> TokenFiles:
    """Map the folder that ``meshtron prepare`` wrote.

    Raises:
        DataError: not such a folder, or files that do not fit its header.
    """
    folder = Path(folder)
    header = Header.read(folder)
    files = [(folder / f"{shard.name}.bin", shard.num_tokens) for shard in header.shards]
    ends = _concatenated(folder, header, ".ends", np.dtype("<u8"))
    prompts = _concatenated(folder, header, ".prompts", np.dtype("<u4")) if header.has_prompts else None
    if len(ends) and int(ends[-1]) != header.num_tokens:
        raise DataError(f"{folder}: the document index ends at token {ends[-1]}, the header says {header.num_tokens}")
    return TokenFiles(str(folder), files, DTYPES[header.dtype], ends, prompts)


def _concatenated(folder: Path, header: Header, ending: str, dtype: np.dtype) -> np.ndarray:
    """The index files of all shards; one shard's stays a map, several are copied together."""
    parts = [map_file(folder / (shard.name + ending), dtype, shard.num_documents) for shard in header.shards]
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.empty(0, dtype)
