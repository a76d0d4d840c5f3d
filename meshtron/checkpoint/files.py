"""The files of a checkpoint: safetensors and JSON, hashed while they are written, synced before they count.

A tensor file is eight bytes of header length, a JSON header and the tensors' bytes one after the other
(https://huggingface.co/docs/safetensors: any safetensors reader opens it). It holds no code, and no length or
offset in it is believed before it was compared with the size of the file.
"""

import json
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from meshtron.checkpoint.untrusted import count, counts, instance, open_file, read_json
from meshtron.errors import CheckpointError

BLOCK_BYTES = 16 << 20  # read, hashed and written at a time: large enough for any disk, small enough to stay in cache

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """What a file must be: the manifest holds one for each."""

    size: int
    """Bytes."""
    xxh3_128: str
    """XXH3 128-bit hash of the whole file in hexadecimal, as ``xxhsum -H2`` prints it."""


def write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> FileRecord:
    """Write ``pieces`` one after the other to a new file and sync it.

    Raises:
        OSError: the disk is full, read-only or broken, or the file exists; ``filename`` is set.
    """
    size, digest = 0, xxhash.xxh3_128()
    try:
        with open(path, "xb", buffering=0) as file:
            for piece in pieces:
                view = memoryview(piece)
                while len(view):
                    written = file.write(view[:BLOCK_BYTES])
                    digest.update(view[:written])
                    size += written
                    view = view[written:]
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    return FileRecord(size=size, xxh3_128=digest.hexdigest())


def hash_file(path: Path) -> FileRecord:
    """Size and hash of a file as it is on disk now."""
    size, digest = 0, xxhash.xxh3_128()
    with open_file(path) as file:
        block = memoryview(bytearray(min(BLOCK_BYTES, os.fstat(file.fileno()).st_size + 1)))
        while length := file.readinto(block):
            digest.update(block[:length])
            size += length
    return FileRecord(size=size, xxh3_128=digest.hexdigest())


def bytes_of(tensor: Tensor) -> Tensor:
    """The elements of a tensor in row-major order as a flat uint8 tensor on the same device; a view if it can be."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a CPU tensor, shared with it if it is contiguous."""
    return memoryview(bytes_of(tensor).numpy())  # type: ignore[arg-type]


def tensor_header(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """Lay out a tensor file.

    Args:
        tensors: what the file will hold, on any device.
        metadata: strings for the header's ``__metadata__``.

    Returns:
        The bytes up to the first tensor, and each tensor's begin and end in the bytes that follow, in the order
        in which they are to be written: widest elements first, so that every tensor is aligned.

    Raises:
        CheckpointError: a tensor's dtype has no place in the format.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    spans, position = {}, 0
    for key in sorted(tensors, key=lambda key: (-tensors[key].element_size(), key)):
        tensor = tensors[key]
        if tensor.dtype not in DTYPE_NAMES:
            raise CheckpointError(f"{key}: dtype {tensor.dtype} cannot be saved; expected one of {', '.join(DTYPES)}")
        end = position + tensor.numel() * tensor.element_size()
        header[key] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        spans[key], position = (position, end), end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, spans


class TensorFile:
    """A tensor file open for reading, from several threads if need be.

    Raises:
        CheckpointError: the header does not describe this file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = open_file(path)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
        try:
            self.metadata, self.entries = self._read_header()
        except (ValueError, KeyError) as error:
            self._file.close()
            raise CheckpointError(f"{path}: not a tensor file ({error})") from error

    def _read_header(self) -> tuple[dict[str, str], dict[str, tuple[torch.dtype, tuple[int, ...], int]]]:
        """Metadata, and each tensor's dtype, shape and first byte in the file."""
        file_size = os.fstat(self._file.fileno()).st_size
        (length,) = struct.unpack("<Q", self._file.read(8).ljust(8, b"\xff"))
        if length > file_size - 8:
            raise ValueError(f"a header of {length} bytes in a file of {file_size}")
        header = instance(read_json(self._file.read(length)), dict)
        metadata, entries = instance(header.pop("__metadata__", {}), dict), {}
        for key, entry in header.items():
            entry = instance(entry, dict)
            dtype, shape = DTYPES[instance(entry["dtype"], str)], counts(entry["shape"])
            begin, end = map(count, instance(entry["data_offsets"], list))
            if end - begin != prod(shape) * dtype.itemsize or not begin <= end <= file_size - 8 - length:
                raise ValueError(f"{key} of shape {shape} at bytes {begin} to {end}")
            entries[key] = (dtype, shape, 8 + length + begin)
        return metadata, entries

    def read_into(self, buffer: memoryview, position: int) -> None:
        """Fill ``buffer`` from byte ``position`` of the file on."""
        while len(buffer):
            length = os.preadv(self._file.fileno(), [buffer[:BLOCK_BYTES]], position)
            if length == 0:
                raise CheckpointError(f"{self.path}: ends before byte {position + len(buffer)}")
            buffer, position = buffer[length:], position + length

    def read(self, key: str) -> Tensor:
        """One whole tensor, on the CPU."""
        dtype, shape, position = self.entries[key]
        tensor = torch.empty(shape, dtype=dtype)
        self.read_into(memory_of(tensor), position)
        return tensor

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "TensorFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
