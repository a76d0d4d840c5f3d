"""Loading: strict about names and shapes, indifferent to the layout that saved."""

import logging
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.tensor import DTensor

from meshtron.checkpoint.files import BLOCK_BYTES, DTYPES, TensorFile, memory_of
from meshtron.checkpoint.manifest import INDEX, Manifest, rank_file, read_manifest
from meshtron.checkpoint.plan import Chunk, Index
from meshtron.checkpoint.ranks import Ranks
from meshtron.checkpoint.untrusted import check_levels, instance, open_file, read_json
from meshtron.checkpoint.verify import damage
from meshtron.errors import CheckpointError

log = logging.getLogger(__name__)


def load(
    folder: Path | str,
    tensors: Mapping[str, Tensor],
    *,
    prefix: str = "",
    partial: Sequence[str] = (),
    check_hashes: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Fill ``tensors`` in place from a step folder, whatever layout saved it. Every rank makes the call.

    Nothing is changed unless all names and shapes fit on all ranks. Floating-point values are converted to the
    dtype of the tensor they go to.

    Args:
        folder: a step folder.
        tensors: global name -> Tensor or DTensor; a rank passes the names that it holds.
        prefix: stored names that do not begin with this are not expected to be loaded: ``"model."`` leaves the
            optimizer's state where it is.
        partial: patterns (``*`` and ``?``) of names that may be missing, unexpected or of another shape; those are
            left as they are and logged.
        check_hashes: read every file once in full and compare its hash before anything is loaded.
        process_group: the ranks that take part; by default the whole world, or this process alone.

    Returns:
        The ``meta`` that was saved.

    Raises:
        CheckpointError: the checkpoint is damaged (each file is named), names or shapes differ (all are listed),
            or a pattern of ``partial`` matches no name.
        CheckpointFormatError: a later meshtron wrote it.
    """
    folder = Path(folder)
    with Ranks(process_group) as ranks:
        if check_hashes and (found := damage(folder, ranks)):
            listed = "; ".join(f"{name}: {problem}" for name, problem in found.items())
            raise CheckpointError(f"{folder} is damaged: {listed}")
        doing = f"loading {folder}"
        manifest = ranks.answer(lambda: read_manifest(folder))
        index = ranks.together(doing, lambda: read_index(folder, manifest))
        wanted = _matched(folder, tensors, index, prefix, partial, ranks)
        ranks.together(doing, lambda: _fill(folder, manifest, wanted, index))
    return manifest.meta


def read_index(folder: Path, manifest: Manifest) -> Index:
    """What tensors a checkpoint holds, and where.

    Raises:
        CheckpointError: the index is not what ``save`` writes.
    """
    path, held = folder / INDEX, Counter[str]()
    try:
        with open_file(path) as file:
            index = Index.from_json(instance(read_json(file.read()), dict))
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path}: damaged, cannot be read ({error})") from error
    for name, boxes in index.chunks.items():
        for chunk, where in boxes:
            held[where] += chunk.numel * DTYPES[index.tensors[name].dtype].itemsize
    # Never open what the manifest does not vouch for, nor make room for more than there is.
    if strangers := held.keys() - manifest.files.keys():
        raise CheckpointError(f"{path}: names files that the manifest does not: {sorted(strangers)}")
    if short := [name for name, num_bytes in held.items() if num_bytes > manifest.files[name].size]:
        raise CheckpointError(f"{path}: says of {', '.join(sorted(short))} that they hold more than their size")
    return index


def stored_tensors(folder: Path | str) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape and dtype of every tensor in a step folder, by name.

    Raises:
        CheckpointError: there is no whole checkpoint.
    """
    index = read_index(Path(folder), read_manifest(Path(folder)))
    return {name: (torch.Size(info.shape), DTYPES[info.dtype]) for name, info in index.tensors.items()}


def read_tensors(folder: Path | str, names: Iterable[str]) -> dict[str, Tensor]:
    """Some whole tensors of a step folder in the dtype they are stored in, on the CPU and for this process alone.

    Hashes are not compared; ``verify`` does that.

    Raises:
        CheckpointError: there is no whole checkpoint, or it has no such tensor.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    index = read_index(folder, manifest)
    tensors = {}
    for name in names:
        if name not in index.tensors:
            raise CheckpointError(f"{folder}: has no tensor {name}")
        info = index.tensors[name]
        tensors[name] = torch.empty(info.shape, dtype=DTYPES[info.dtype])
    _fill(folder, manifest, tensors, index)
    return tensors


def read_rank_state(folder: Path | str, rank: int) -> dict[str, Any] | None:
    """What rank ``rank`` gave to ``save`` as its ``rank_state``; None if fewer ranks saved.

    Raises:
        CheckpointError: the manifest or that rank's file is damaged.
    """
    folder = Path(folder)
    if rank >= read_manifest(folder).world_size:
        return None
    with TensorFile(folder / rank_file(rank)) as file:
        try:
            state = instance(read_json(instance(file.metadata["rank_state"], str)), dict)
            check_levels(state)
        except (ValueError, KeyError) as error:
            raise CheckpointError(f"{file.path}: holds no state of a rank ({error})") from error
        own = [key for key in file.entries if key.startswith("rank_state.")]
        return state | {key.removeprefix("rank_state."): file.read(key) for key in own}


def _matched(
    folder: Path,
    tensors: Mapping[str, Tensor],
    index: Index,
    prefix: str,
    partial: Sequence[str],
    ranks: Ranks,
) -> dict[str, Tensor]:
    """The tensors to fill, once every name and shape on every rank is accounted for."""
    shapes: dict[str, tuple[int, ...]] = {}
    for part in ranks.all_gather({name: tuple(tensor.shape) for name, tensor in tensors.items()}):
        shapes |= part
    stored = {name: info.shape for name, info in index.tensors.items()}
    expected = {name for name in stored if name.startswith(prefix)}
    problems = {name: f"missing {name}" for name in shapes.keys() - stored.keys()}
    problems |= {name: f"unexpected {name} {stored[name]}" for name in expected - shapes.keys()}
    problems |= {
        name: f"{name} has shape {stored[name]} in the checkpoint and {shape} here"
        for name, shape in shapes.items()
        if name in stored and stored[name] != shape
    }
    problems |= {
        name: f"{name} has dtype {index.tensors[name].dtype} in the checkpoint and {tensor.dtype} here"
        for name, tensor in tensors.items()
        if name in stored and not _convertible(DTYPES[index.tensors[name].dtype], tensor.dtype)
    }
    for pattern in partial:
        if not _matching(shapes.keys() | expected, [pattern]):
            raise CheckpointError(f"partial pattern {pattern!r} matches no name in {folder} and none here")
    excused = _matching(problems, partial)
    if problems.keys() - excused:
        listed = "; ".join(problems[name] for name in sorted(problems.keys() - excused))
        raise CheckpointError(f"{folder} does not fit: {listed}")
    if excused and ranks.rank == 0:
        log.warning("%s: left as it is: %s", folder, "; ".join(problems[name] for name in sorted(excused)))
    return {name: tensor for name, tensor in tensors.items() if name not in excused}


def _matching(names: Iterable[str], patterns: Sequence[str]) -> set[str]:
    return {name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)}


def _convertible(stored: torch.dtype, here: torch.dtype) -> bool:
    return stored == here or (stored.is_floating_point and here.is_floating_point)


def _fill(folder: Path, manifest: Manifest, tensors: Mapping[str, Tensor], index: Index) -> None:
    """Read what this rank needs, several pieces at a time."""
    reads = index.reads(tensors)
    locals_ = {
        name: (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
        for name, tensor in tensors.items()
    }
    with ExitStack() as stack, ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        files = {
            name: stack.enter_context(TensorFile(folder / name)) for name in sorted({file for _, _, file in reads})
        }

        def read(entry: tuple[ReadItem, Chunk, str]) -> None:
            item, chunk, file = entry
            target = locals_[chunk.name]
            for dim, (offset, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
                target = target.narrow(dim, offset, length)
            _read_box(files[file], chunk, DTYPES[index.tensors[chunk.name].dtype], item, target)

        for _ in pool.map(read, reads):
            pass


def _read_box(file: TensorFile, chunk: Chunk, dtype: torch.dtype, item: ReadItem, target: Tensor) -> None:
    """Copy the part of a saved box that ``item`` asks for into ``target``, which has that part's shape.

    Whole rows of the box are read, at most a block at a time, straight into the target where that is possible.
    """
    entry = file.entries.get(chunk.key)
    if entry is None or entry[:2] != (dtype, chunk.sizes):
        raise CheckpointError(f"{file.path}: does not hold {chunk.key} as {dtype}, though the index says so")
    position = entry[2]
    if not chunk.sizes:
        target.copy_(file.read(chunk.key))
        return
    row = chunk.sizes[1:]
    row_bytes = prod(row) * dtype.itemsize
    offset, count = item.storage_offsets[0], item.lengths[0]
    if count * row_bytes == 0:
        return
    whole_rows = tuple(item.lengths[1:]) == row
    if whole_rows and target.dtype == dtype and target.device.type == "cpu" and target.is_contiguous():
        file.read_into(memory_of(target), position + offset * row_bytes)
        return
    step = max(1, BLOCK_BYTES // row_bytes)
    for begin in range(0, count, step):
        rows = torch.empty((min(step, count - begin), *row), dtype=dtype)
        file.read_into(memory_of(rows), position + (offset + begin) * row_bytes)
        for dim, (start, length) in enumerate(zip(item.storage_offsets[1:], item.lengths[1:], strict=True), start=1):
            rows = rows.narrow(dim, start, length)
        target.narrow(0, begin, len(rows)).copy_(rows)
