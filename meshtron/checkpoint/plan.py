"""Which rank writes which part of which tensor, and which saved parts make up a rank's tensor again.

torch.distributed.checkpoint's planners say which box of the global tensor each rank holds, and which saved boxes
overlap a box that is wanted. Between the two this module spreads what several ranks hold over those ranks.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    create_default_local_load_plan,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.tensor import DTensor

from meshtron.checkpoint.files import DTYPE_NAMES, DTYPES
from meshtron.checkpoint.untrusted import counts, instance
from meshtron.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A box of a global tensor."""

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    def rows(self, begin: int, end: int) -> "Chunk":
        """Rows ``begin`` to ``end`` of the box, counted from its own first."""
        return Chunk(
            name=self.name,
            offsets=(self.offsets[0] + begin, *self.offsets[1:]),
            sizes=(end - begin, *self.sizes[1:]),
        )

    @property
    def key(self) -> str:
        """Name of the box in a tensor file: ``"embed.weight[0:128,0:64]"``."""
        box = ",".join(f"{o}:{o + s}" for o, s in zip(self.offsets, self.sizes, strict=True))
        return f"{self.name}[{box}]"


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """What all ranks must agree on about a tensor."""

    dtype: str
    """Name in the tensor files: ``"F32"``, ``"BF16"`` ..."""
    shape: tuple[int, ...]
    """Of the global tensor."""


@dataclass(frozen=True, kw_only=True)
class Holding:
    """What one rank holds."""

    chunks: list[Chunk]
    tensors: dict[str, TensorInfo]


def holding(tensors: Mapping[str, Tensor]) -> Holding:
    """What this rank holds of the global tensors.

    Raises:
        CheckpointError: a value is no tensor, is on the meta device, has a dtype that cannot be saved, or is a
            DTensor with partial sums.
    """
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise CheckpointError(f"{name}: expected a Tensor or DTensor, found {type(tensor).__name__}; use meta")
        if tensor.is_meta:
            raise CheckpointError(f"{name}: is on the meta device, so there is nothing to save")
        if tensor.dtype not in DTYPE_NAMES:
            raise CheckpointError(
                f"{name}: dtype {tensor.dtype} cannot be saved; expected one of {', '.join(DTYPES)}"
            )
        if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
            raise CheckpointError(f"{name}: placements {tensor.placements} hold partial sums: redistribute it first")
    chunks, infos = [], {}
    for item in create_default_local_save_plan(dict(tensors), is_coordinator=True).items:
        data, name = item.tensor_data, item.index.fqn
        assert data is not None
        infos[name] = TensorInfo(dtype=DTYPE_NAMES[data.properties.dtype], shape=tuple(data.size))
        chunk = Chunk(name=name, offsets=tuple(data.chunk.offsets), sizes=tuple(data.chunk.sizes))
        if chunk.numel or not prod(data.size):  # the empty shard of a tensor that is not empty is nobody's business
            chunks.append(chunk)
    return Holding(chunks=chunks, tensors=infos)


def box_of(tensor: Tensor, origin: tuple[int, ...], chunk: Chunk) -> Tensor:
    """The view of this rank's local tensor, which begins at ``origin`` of the global one, that is ``chunk``."""
    box = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    for dim, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
        box = box.narrow(dim, offset - origin[dim], size)
    return box


def spread(holdings: list[Holding]) -> tuple[list[list[Chunk]], dict[str, TensorInfo]]:
    """Give each box to exactly one of the ranks that hold it, so that ranks write about as many bytes each.

    A box that several ranks hold is cut by rows where it is large, and each piece goes to the rank with the
    least to write, the largest pieces first. A box that one rank holds is written by that rank.

    Returns:
        Each rank's boxes, and what the tensors are.

    Raises:
        CheckpointError: ranks disagree on a tensor's dtype or shape, or their boxes do not make up a tensor.
    """
    tensors = _agreed(holdings)
    holders: dict[Chunk, list[int]] = {}
    for rank, held in enumerate(holdings):
        for chunk in held.chunks:
            holders.setdefault(chunk, []).append(rank)
    _check_cover(holders, tensors)

    def size_bytes(chunk: Chunk) -> int:
        return chunk.numel * DTYPES[tensors[chunk.name].dtype].itemsize

    # Pieces of an eighth of a rank's mean share even out well, and keep the number of pieces small.
    piece_bytes = max(1, sum(map(size_bytes, holders)) // (8 * len(holdings)))
    assigned: list[list[Chunk]] = [[] for _ in holdings]
    load = [0] * len(holdings)
    shared: list[tuple[Chunk, list[int]]] = []
    for chunk, ranks in holders.items():
        if len(ranks) == 1:
            assigned[ranks[0]].append(chunk)
            load[ranks[0]] += size_bytes(chunk)
        else:
            shared += [(piece, ranks) for piece in _cut(chunk, ceil(size_bytes(chunk) / piece_bytes), len(ranks))]
    for chunk, ranks in sorted(shared, key=lambda entry: (-size_bytes(entry[0]), entry[0].key)):
        rank = min(ranks, key=load.__getitem__)
        assigned[rank].append(chunk)
        load[rank] += size_bytes(chunk)
    return assigned, tensors


def _cut(chunk: Chunk, wanted: int, most: int) -> Iterable[Chunk]:
    rows = chunk.sizes[0] if chunk.sizes else 1
    pieces = min(wanted, most, rows)
    if pieces <= 1:
        return [chunk]
    bounds = [rows * piece // pieces for piece in range(pieces + 1)]
    return [chunk.rows(begin, end) for begin, end in pairwise(bounds)]


def _agreed(holdings: list[Holding]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for rank, held in enumerate(holdings):
        for name, info in held.tensors.items():
            known = tensors.setdefault(name, info)
            if known != info:
                raise CheckpointError(
                    f"{name}: rank {rank} holds {info.dtype} of shape {info.shape}, an earlier rank {known.dtype} of "
                    f"shape {known.shape}; ranks may share a name only for the same tensor"
                )
    return tensors


def _check_cover(chunks: Iterable[Chunk], tensors: dict[str, TensorInfo]) -> None:
    covered = dict.fromkeys(tensors, 0)
    for chunk in chunks:
        covered[chunk.name] += chunk.numel
    for name, info in tensors.items():
        if covered[name] != prod(info.shape):
            raise CheckpointError(
                f"{name}: all ranks' shards hold {covered[name]} elements, the tensor of shape {info.shape} has "
                f"{prod(info.shape)}: its placements do not describe it, or a rank did not pass its shard"
            )


@dataclass(frozen=True, kw_only=True)
class Index:
    """Where every part of every tensor lies: the content of index.json."""

    tensors: dict[str, TensorInfo]
    chunks: dict[str, list[tuple[Chunk, str]]]
    """For each name its boxes, each with the file that holds it."""

    @classmethod
    def of(cls, assigned: list[list[Chunk]], tensors: dict[str, TensorInfo], files: list[str]) -> "Index":
        """The index of a checkpoint whose rank ``i`` writes the boxes ``assigned[i]`` to ``files[i]``."""
        chunks: dict[str, list[tuple[Chunk, str]]] = {name: [] for name in tensors}
        for file, boxes in zip(files, assigned, strict=True):
            for chunk in boxes:
                chunks[chunk.name].append((chunk, file))
        return cls(tensors=tensors, chunks=chunks)

    def to_json(self) -> dict[str, Any]:
        """Plain lists and dicts: name -> dtype, shape, and chunks as [offsets, sizes, file]."""
        return {
            name: {
                "dtype": info.dtype,
                "shape": info.shape,
                "chunks": [(chunk.offsets, chunk.sizes, file) for chunk, file in self.chunks[name]],
            }
            for name, info in sorted(self.tensors.items())
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Index":
        """Read back what ``to_json`` gave.

        Raises:
            ValueError, KeyError: something else, or boxes that do not make up their tensor.
        """
        tensors: dict[str, TensorInfo] = {}
        chunks: dict[str, list[tuple[Chunk, str]]] = {}
        for name, entry in content.items():
            entry = instance(entry, dict)
            tensors[name] = info = TensorInfo(dtype=instance(entry["dtype"], str), shape=counts(entry["shape"]))
            if info.dtype not in DTYPES:
                raise ValueError(f"{name} has dtype {info.dtype}")
            chunks[name] = []
            for box in instance(entry["chunks"], list):
                offsets, sizes, file = instance(box, list)
                chunk = Chunk(name=name, offsets=counts(offsets), sizes=counts(sizes))
                ends = [offset + size for offset, size in zip(chunk.offsets, chunk.sizes, strict=True)]
                if any(end > extent for end, extent in zip(ends, info.shape, strict=True)):
                    raise ValueError(f"{chunk.key} is outside the shape {info.shape}")
                chunks[name].append((chunk, instance(file, str)))
            if (held := sum(chunk.numel for chunk, _ in chunks[name])) != prod(info.shape):
                raise ValueError(f"{name} of shape {info.shape} is made up of {held} elements")
        return cls(tensors=tensors, chunks=chunks)

    def reads(self, tensors: Mapping[str, Tensor]) -> list[tuple[ReadItem, Chunk, str]]:
        """Overlaps of saved boxes with this rank's ``tensors``: what to read, from which box, in which file."""
        metadata = Metadata(
            {
                name: TensorStorageMetadata(
                    properties=TensorProperties(dtype=DTYPES[self.tensors[name].dtype]),
                    size=torch.Size(self.tensors[name].shape),
                    chunks=[
                        ChunkStorageMetadata(offsets=torch.Size(chunk.offsets), sizes=torch.Size(chunk.sizes))
                        for chunk, _ in self.chunks[name]
                    ],
                )
                for name in tensors
            }
        )
        places = {(chunk.name, chunk.offsets): (chunk, file) for name in tensors for chunk, file in self.chunks[name]}
        items = create_default_local_load_plan(dict(tensors), metadata).items
        return [(item, *places[item.storage_index.fqn, tuple(item.storage_index.offset or ())]) for item in items]
