"""Which part of a global tensor a rank holds: the arithmetic of DTensor's ``Shard``, without communication."""

import math

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard


def shard_range(length: int, parts: int, index: int) -> range:
    """Indices of ``length`` that part ``index`` of ``parts`` holds: equal parts rounded up, the last ones short.

    The rule of ``torch.chunk`` and of DTensor's ``Shard``; late parts may be empty.
    """
    size = math.ceil(length / parts)
    return range(min(index * size, length), min((index + 1) * size, length))


def local_slices(shape: torch.Size, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> tuple[slice, ...]:
    """Slices of a global tensor of ``shape`` that this rank holds under ``placements`` on ``mesh``.

    Mesh axes are applied in order, each to what the ones before have left, as DTensor does.
    """
    ranges = [range(size) for size in shape]
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            held = ranges[placement.dim]
            part = shard_range(len(held), mesh.size(axis), mesh.get_local_rank(axis))
            ranges[placement.dim] = held[part.start : part.stop]
    return tuple(slice(r.start, r.stop) for r in ranges)


def slices_of(tensor: Tensor) -> tuple[slice, ...]:
    """Slices of the global tensor that this rank's part of ``tensor`` is; all of it for a plain tensor."""
    if isinstance(tensor, DTensor):
        return local_slices(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(0, size) for size in tensor.shape)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of ``tensor``, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def contiguous_stride(shape: torch.Size) -> tuple[int, ...]:
    """Stride of a contiguous tensor of ``shape``; DTensor needs it beside the shape for uneven shards."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
