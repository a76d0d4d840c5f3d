"""From files to raw records: which files a source names, and one record after the other out of each.

A record is what one document is made of before it is looked at: a line of JSON, the bytes of a whole file, or
a string. Looking at it (JSON, UTF-8, empty or not) is left to the workers that tokenize.
"""

import fnmatch
import glob
import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

from meshtron.errors import DataError

# Whole-file documents that a folder is searched for; a file named outright may end in anything.
_PROSE = (".txt", ".md", ".rst", ".tex", ".html")
_CODE = (
    ".py",
    ".pyi",
    ".c",
    ".h",
    ".cc",
    ".cpp",
    ".hpp",
    ".cu",
    ".rs",
    ".go",
    ".java",
    ".kt",
    ".scala",
    ".js",
    ".ts",
)
_SCRIPTS = (".css", ".rb", ".php", ".lua", ".sh", ".sql")
TEXT_SUFFIXES = _PROSE + _CODE + _SCRIPTS
RECORD_SUFFIXES = (".jsonl", ".json", ".parquet")
COMPRESSED_SUFFIXES = (".gz", ".zst")
DEFAULT_INCLUDE = tuple(f"*{suffix}" for suffix in TEXT_SUFFIXES + RECORD_SUFFIXES)
DEFAULT_EXCLUDE = (".*", "__pycache__", "site-packages", "dist-packages", "node_modules", "test", "tests")
_READ_BYTES = 1 << 20

Record = bytes | dict
"""Bytes of a text file or of a line of JSON, or an object with at least the wanted keys that it has."""


@dataclass(frozen=True, kw_only=True)
class TextFile:
    """One input, with what decides whether it is still the same after a restart."""

    path: str
    """A path, or ``hf:NAME:SPLIT``."""
    kind: str
    """text, jsonl, json, parquet, dataset (a folder saved by ``datasets``) or hf (a streamed dataset)."""
    size: int = 0
    modified_ns: int = 0


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which files of a folder are read."""

    include: tuple[str, ...] = DEFAULT_INCLUDE
    """Patterns of file names; a compressed file is matched without its .gz or .zst."""
    exclude: tuple[str, ...] = DEFAULT_EXCLUDE
    """Patterns of file and folder names below the source."""
    left_out: list[str] = field(default_factory=list)
    """Files that matched ``include`` and were left out because of ``exclude``; filled by ``find_files``."""


class BadRecord(Exception):
    """A record that cannot be read; the file goes on behind it, or ends there when ``ends`` is set."""

    def __init__(self, reason: str, *, ends: bool = False) -> None:
        super().__init__(reason)
        self.ends = ends


def find_files(sources: Sequence[str], selection: Selection) -> list[TextFile]:
    """Every file that the sources name, in the order of the sources, folders sorted by path.

    Args:
        sources: files, folders, globs, folders saved by ``datasets``, or ``hf:NAME[:SPLIT]``.
        selection: which files of folders count.

    Raises:
        DataError: a source names nothing, or a file is named twice.
    """
    found: list[TextFile] = []
    for source in sources:
        if source.startswith("hf:"):
            found.append(TextFile(path=source, kind="hf"))
            continue
        path = Path(source)
        if path.is_dir():
            files = _walk(path, selection)
        elif path.is_file():
            files = [path]
        else:
            files = []
            for match in sorted(glob.glob(source, recursive=True)):
                files += _walk(Path(match), selection) if Path(match).is_dir() else [Path(match)]
        if not files:
            raise DataError(
                f"{source}: nothing to read there; expected a file, a folder with files such as "
                f"{', '.join(selection.include[:3])} (--include), a glob, or hf:NAME[:SPLIT]"
            )
        found += [_describe(file) for file in files]
    seen: set[str] = set()
    for file in found:
        if file.path in seen:
            raise DataError(f"{file.path}: named by two sources")
        seen.add(file.path)
    return found


def _walk(folder: Path, selection: Selection) -> list[Path]:
    if _is_dataset(folder):
        return [folder]

    def excluded(name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in selection.exclude)

    files = []
    for path in sorted(folder.rglob("*")):
        name = path.name.removesuffix(".gz").removesuffix(".zst")
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in selection.include) or not path.is_file():
            continue
        if any(excluded(part) for part in path.relative_to(folder).parts):
            selection.left_out.append(str(path))
        else:
            files.append(path)
    return files


def _is_dataset(folder: Path) -> bool:
    return (folder / "dataset_info.json").exists() or (folder / "dataset_dict.json").exists()


def _describe(path: Path) -> TextFile:
    if path.is_dir():
        return TextFile(path=str(path), kind="dataset")
    suffix = Path(path.name.removesuffix(".gz").removesuffix(".zst")).suffix
    kind = suffix[1:] if suffix in RECORD_SUFFIXES else "text"
    status = path.stat()
    return TextFile(path=str(path), kind=kind, size=status.st_size, modified_ns=status.st_mtime_ns)


def read_records(file: TextFile, keys: Sequence[str]) -> Iterator[Record | BadRecord]:
    """Records of one file, in order; a BadRecord takes the place of one that cannot be read.

    Args:
        file: what to read.
        keys: the columns that are read of a parquet file or dataset.
    """
    try:
        if file.kind in _COLUMN_READERS:
            yield from _COLUMN_READERS[file.kind](file.path, list(keys))
        else:
            with _open(file.path) as stream:
                yield from _STREAM_READERS[file.kind](stream)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        yield BadRecord(f"damaged or cut short ({error})", ends=True)
    except BadRecord as error:
        yield error


def _open(path: str) -> IO[bytes]:
    """A file of bytes, decompressed by its ending."""
    if path.endswith(".gz"):
        return cast(IO[bytes], gzip.open(path, "rb"))
    if path.endswith(".zst"):
        return _ZstdFile(path)  # type: ignore[return-value]
    return open(path, "rb")


class _ZstdFile:
    """Reads every frame of a .zst file, and notices when the last one is cut short."""

    def __init__(self, path: str) -> None:
        import zstandard

        self._error = zstandard.ZstdError
        self._new = zstandard.ZstdDecompressor().decompressobj
        self._file = open(path, "rb")  # noqa: SIM115 (closed by __exit__)
        self._frame = self._new()
        self._fresh = True
        self._rest = b""

    def __enter__(self) -> "_ZstdFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, size: int) -> bytes:
        """Some decompressed bytes (not exactly ``size``); empty at the end."""
        while True:
            packed = self._rest or self._file.read(max(1, size // 8))
            self._rest = b""
            if not packed:
                if not self._fresh:
                    raise EOFError("the last frame is not complete")
                return b""
            self._fresh = False
            try:
                unpacked = self._frame.decompress(packed)
            except self._error as error:
                raise EOFError(str(error)) from None
            if self._frame.eof:
                self._rest = self._frame.unused_data
                self._frame, self._fresh = self._new(), True
            if unpacked:
                return unpacked


def _read_text(stream: IO[bytes]) -> Iterator[Record]:
    parts = []
    while part := stream.read(_READ_BYTES):
        parts.append(part)
    yield b"".join(parts)


def _read_lines(stream: IO[bytes]) -> Iterator[Record]:
    """Lines end at a line feed only: U+2028 and the like belong to the text."""
    rest: list[bytes] = []
    first = True
    while part := stream.read(_READ_BYTES):
        if first:
            part, first = part.removeprefix(b"\xef\xbb\xbf"), False
        lines = part.split(b"\n")
        if len(lines) > 1:
            yield b"".join([*rest, lines[0]])
            yield from lines[1:-1]
            rest = []
        rest.append(lines[-1])
    last = b"".join(rest)
    if last:
        yield last


def _read_json(stream: IO[bytes]) -> Iterator[Record | BadRecord]:
    """Elements of a JSON array, or objects one after the other, without holding more than one and a read."""
    import codecs

    decode = codecs.getincrementaldecoder("utf-8-sig")().decode
    parse = json.JSONDecoder().raw_decode
    buffer, place, number, ended = "", 0, 0, False
    inside: bool | None = None
    want = _READ_BYTES
    while True:
        while place < len(buffer) and buffer[place] in " \t\r\n,":
            place += 1
        if inside is None and place < len(buffer):
            inside = buffer[place] == "["
            place += inside
            continue
        if place < len(buffer) and buffer[place] == "]" and inside:
            return
        if place < len(buffer):
            try:
                value, place = parse(buffer, place)
                number += 1
                want = _READ_BYTES
                yield value if isinstance(value, dict) else BadRecord(f"element {number} is not an object")
                continue
            except json.JSONDecodeError as error:
                if ended:
                    raise BadRecord(f"element {number + 1}: bad JSON ({error.msg})", ends=True) from None
        if ended:
            if inside:
                raise BadRecord("the array is cut short", ends=True)
            return
        part = stream.read(want)
        want *= 2  # a long element is parsed again for every doubling only
        ended = not part
        try:
            buffer, place = buffer[place:] + decode(part, final=ended), 0
        except UnicodeDecodeError as error:
            raise BadRecord(f"element {number + 1}: not UTF-8 ({error.reason})", ends=True) from None


def _read_parquet(path: str, keys: list[str]) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            _check_columns(file.schema_arrow.names, keys)
            for batch in file.iter_batches(batch_size=256, columns=keys):
                yield from batch.to_pylist()
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise BadRecord(f"damaged or cut short ({error})", ends=True) from None


def _read_dataset(path: str, keys: list[str]) -> Iterator[Record]:
    import datasets

    loaded = datasets.load_from_disk(path)
    for part in loaded.values() if isinstance(loaded, datasets.DatasetDict) else [loaded]:
        yield from _columns(part, keys)


def _read_hub(path: str, keys: list[str]) -> Iterator[Record]:
    import datasets

    name, _, split = path.removeprefix("hf:").partition(":")
    yield from _columns(datasets.load_dataset(name, split=split or "train", streaming=True), keys)


def _columns(dataset: Any, keys: list[str]) -> Iterator[Record]:
    if dataset.column_names:  # a streamed dataset may not know them
        _check_columns(dataset.column_names, keys)
        dataset = dataset.select_columns(keys)
    yield from dataset


def _check_columns(names: Sequence[str], keys: Sequence[str]) -> None:
    for key in keys:
        if key not in names:
            raise BadRecord(f"no column {key!r}; there are {', '.join(names)}", ends=True)


_STREAM_READERS = {"text": _read_text, "jsonl": _read_lines, "json": _read_json}
_COLUMN_READERS = {"parquet": _read_parquet, "dataset": _read_dataset, "hf": _read_hub}
