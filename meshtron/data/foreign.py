"""Token files that others wrote, mapped without conversion.

datatrove and nanotron: ``NAME.ds`` holds little-endian ids of two or four bytes, ``NAME.ds.index`` the end of each
document in tokens (uint64), ``NAME.ds.metadata`` the lines ``tokenizer|bytes per id`` (older files: without the
size) and number of tokens. A folder of them is read in the order of names.

Megatron-LM: ``PREFIX.bin`` holds ids; ``PREFIX.idx`` is b"MMIDIDX\\0\\0", version 1 (uint64), a dtype code (uint8),
the numbers of sequences and of document bounds (uint64 each), then the length of each sequence (int32), its byte
offset (int64) and the first sequence of each document (int64, with the total at the end).
"""

import struct
from pathlib import Path

import numpy as np

from meshtron.data.shards import TokenFiles, map_file
from meshtron.errors import DataError

_MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
_MEGATRON_HEADER = struct.Struct("<9sQBQQ")
_MEGATRON_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_MEGATRON_FLOATS = (6, 7)


def is_datatrove(path: Path) -> bool:
    """Whether a path is a .ds file or a folder with some."""
    return path.suffix == ".ds" if path.is_file() else any(path.glob("*.ds"))


def open_datatrove(path: Path) -> TokenFiles:
    """Map a .ds file, or all of a folder.

    Raises:
        DataError: sizes that contradict the metadata or the index, or files with ids of different sizes.
    """
    paths = [path] if path.is_file() else sorted(path.glob("*.ds"))
    files, dtypes, ends = [], set(), []
    total = 0
    for file in paths:
        dtype, count = _datatrove_layout(file)
        files.append((file, count))
        dtypes.add(dtype)
        index = _datatrove_index(file, count)
        if index is not None:
            ends.append(index.astype(np.int64) + total)
        total += count
    if len(dtypes) > 1:
        sizes = sorted(dtype.itemsize for dtype in dtypes)
        raise DataError(f"{path}: files with ids of {' and '.join(map(str, sizes))} bytes; give them as two sources")
    complete = len(ends) == len(files)
    document_ends = np.concatenate(ends).astype(np.uint64) if complete else np.empty(0, np.uint64)
    return TokenFiles(str(path), files, dtypes.pop(), document_ends)


def _datatrove_layout(file: Path) -> tuple[np.dtype, int]:
    """Dtype and number of ids in a .ds file, as its metadata says."""
    size = file.stat().st_size
    metadata = file.with_name(file.name + ".metadata")
    if not metadata.is_file():
        raise DataError(f"{metadata}: not there, so nobody knows how many bytes an id of {file.name} has")
    lines = metadata.read_text().splitlines()
    _, separator, width = lines[0].rpartition("|") if lines else ("", "", "")
    if len(lines) < 2 or not lines[1].strip().isdecimal() or (separator and width not in ("2", "4")):
        raise DataError(
            f"{metadata}: expected the lines TOKENIZER|BYTES (2 or 4) and NUMBER OF TOKENS, found {lines}"
        )
    count = int(lines[1])
    itemsize = int(width) if separator else (size // count if count else 2)
    if itemsize not in (2, 4) or size != count * itemsize:
        raise DataError(
            f"{file}: {size} bytes, but {metadata.name} says {count} tokens of {itemsize} bytes: the file is cut "
            "short or the metadata is of another one"
        )
    return np.dtype(f"<u{itemsize}"), count


def _datatrove_index(file: Path, count: int) -> np.ndarray | None:
    index = file.with_name(file.name + ".index")
    if not index.is_file():
        return None
    ends = map_file(index, np.dtype("<u8"), index.stat().st_size // 8)
    if not len(ends) or int(ends[-1]) != count:
        raise DataError(f"{index}: ends at token {int(ends[-1]) if len(ends) else 0}, but {file.name} has {count}")
    return ends


def megatron_prefix(path: Path) -> Path | None:
    """PREFIX of the PREFIX.bin and PREFIX.idx that a path is (or is one of), where there is an .idx."""
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    return prefix if prefix.with_name(prefix.name + ".idx").is_file() else None


def open_megatron(prefix: Path) -> TokenFiles:
    """Map PREFIX.bin with PREFIX.idx.

    Raises:
        DataError: not such an index, ids that are not whole numbers, or sizes that contradict each other.
    """
    index, data = prefix.with_name(prefix.name + ".idx"), prefix.with_name(prefix.name + ".bin")
    content = np.memmap(index, dtype="u1", mode="r") if index.stat().st_size else np.empty(0, "u1")
    start = _MEGATRON_HEADER.size
    if len(content) < start or bytes(content[:9]) != _MEGATRON_MAGIC:
        raise DataError(f"{index}: not an index of Megatron-LM (MMIDIDX)")
    _, version, code, num_sequences, num_bounds = _MEGATRON_HEADER.unpack(content[:start].tobytes())
    if version != 1 or code not in _MEGATRON_DTYPES:
        kind = "floats" if code in _MEGATRON_FLOATS else f"dtype code {code}"
        raise DataError(f"{index}: version {version} with {kind}; expected version 1 and whole numbers")
    sizes_end = start + 4 * num_sequences
    offsets_end = sizes_end + 8 * num_sequences
    bounds_end = offsets_end + 8 * num_bounds
    if len(content) < bounds_end or not num_sequences:
        raise DataError(f"{index}: {len(content)} bytes, expected {bounds_end} for {num_sequences} sequences")
    dtype = np.dtype(_MEGATRON_DTYPES[code])
    ends = np.cumsum(content[start:sizes_end].view("<i4"), dtype=np.int64)
    offsets = content[sizes_end:offsets_end].view("<i8")
    if int(offsets[0]) != 0 or not np.array_equal(offsets[1:], ends[:-1] * dtype.itemsize):
        raise DataError(f"{index}: sequences do not follow one another in {data.name}, as meshtron expects")
    bounds = content[offsets_end:bounds_end].view("<i8")
    if not len(bounds) or int(bounds[0]) != 0 or int(bounds[-1]) != num_sequences or (np.diff(bounds) < 0).any():
        raise DataError(f"{index}: the document bounds do not go from 0 to {num_sequences}")
    document_ends = ends[bounds[1:][np.diff(bounds) > 0] - 1].astype(np.uint64)
    return TokenFiles(str(prefix), [(data, int(ends[-1]))], dtype, document_ends)
