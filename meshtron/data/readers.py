"""From a file to raw records, one after the other.

A record is what one document is made of before it is looked at: a line of JSON, the bytes of a whole file, or
a row. Looking at it (JSON, UTF-8, empty or not) is left to the workers that tokenize.
"""

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from typing import IO, Any, cast

from meshtron.data.documents import TextFile
from meshtron.errors import DataError

_READ_BYTES = 1 << 20

Record = bytes | dict
"""Bytes of a text file or of a line of JSON, or an object with at least the wanted keys that it has."""


class BadRecord(Exception):
    """A record that cannot be read; the file goes on behind it, or ends there when ``ends`` is set."""

    def __init__(self, reason: str, *, ends: bool = False) -> None:
        super().__init__(reason)
        self.ends = ends


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
    if path.lower().endswith(".gz"):
        return cast(IO[bytes], gzip.open(path, "rb"))
    if path.lower().endswith(".zst"):
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
    buffer, place, ended = "", 0, False
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
            place, inside = place + 1, None  # another array may follow, as in archives put one behind the other
            continue
        if place < len(buffer):
            try:
                value, place = parse(buffer, place)
                want = _READ_BYTES
                yield value if isinstance(value, dict) else BadRecord("not a JSON object")
                continue
            except json.JSONDecodeError as error:
                if ended:
                    raise BadRecord(f"bad JSON ({error.msg})", ends=True) from None
            except (ValueError, RecursionError) as error:  # a number of thousands of digits; lists within lists
                raise BadRecord(f"bad JSON ({error})", ends=True) from None
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
            raise BadRecord(f"not UTF-8 ({error.reason})", ends=True) from None


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

    try:
        loaded = datasets.load_from_disk(path)
    except Exception as error:  # the library raises whatever its readers do
        raise DataError(f"{path}: cannot be read by the datasets library ({error})") from error
    for part in loaded.values() if isinstance(loaded, datasets.DatasetDict) else [loaded]:
        yield from _columns(part, keys)


def _read_hub(path: str, keys: list[str]) -> Iterator[Record]:
    rows = open_hub(path.removeprefix("hf:"))
    try:
        yield from _columns(rows, keys)
    except BadRecord:
        raise
    except Exception as error:  # the library raises whatever its readers and the network do
        raise DataError(f"{path}: cannot be read to the end ({error})") from error


def open_hub(name: str, **options: Any) -> Any:
    """Open ``NAME[:SPLIT]`` of Hugging Face's hub, or a local folder, as a stream of rows.

    Args:
        name: the split is "train" where none is named.
        options: further arguments of ``datasets.load_dataset``.

    Raises:
        DataError: the library cannot open it.
    """
    import datasets

    path, _, split = name.partition(":")
    try:
        return datasets.load_dataset(path, split=split or "train", streaming=True, **options)
    except Exception as error:  # the library raises whatever its loaders and the network do
        raise DataError(f"hf:{name}: cannot be opened by the datasets library ({error})") from error


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
