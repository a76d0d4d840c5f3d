"""Initial weights that are the same at every layout: a function of (seed, parameter name) alone.

A parameter is drawn in blocks of whole rows, each block by a generator seeded with a hash of (seed, name, block),
on the CPU and in float32 whatever the device and the parameter's dtype. A rank draws only the blocks that its
shard touches, so no rank ever holds a whole large parameter.
"""

import hashlib
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshtron.parallel.placement import contiguous_stride, local_part, slices_of
from meshtron.parallel.tied import retie

_BLOCK_ELEMENTS = 1 << 20  # 4 MiB of float32 at a time


def materialize(
    stages: list[nn.Module],
    device: torch.device | str,
    dtype: torch.dtype,
    ties: Mapping[str, str] | None = None,
) -> None:
    """Give meta parameters memory on ``device`` in ``dtype``; DTensors keep mesh and placements, ties are kept.

    Args:
        stages: modules whose parameters are replaced. Values are undefined until ``init_weights`` or a load.
        device: where the memory is taken.
        dtype: of floating-point parameters and buffers.
        ties: later name -> first name for parameters that two stages of this rank share.
    """
    replaced: dict[int, nn.Parameter] = {}
    for stage in stages:
        for module in stage.modules():
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                if id(parameter) not in replaced:
                    replaced[id(parameter)] = _empty_like(parameter, device, dtype)
                module._parameters[name] = replaced[id(parameter)]
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)
    retie(stages, ties or {})


def _empty_like(parameter: nn.Parameter, device: torch.device | str, dtype: torch.dtype) -> nn.Parameter:
    local = torch.empty(local_part(parameter).shape, dtype=dtype, device=device)
    if isinstance(parameter, DTensor):
        shape = parameter.shape
        local = DTensor.from_local(
            local,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=shape,
            stride=contiguous_stride(shape),
        )
    return nn.Parameter(local, requires_grad=parameter.requires_grad)


@torch.no_grad()
def init_weights(
    stages: list[nn.Module],
    *,
    seed: int,
    std: float | Callable[[str], float] = 0.02,
    ties: Mapping[str, str] | None = None,
) -> None:
    """Fill every parameter in place: matrices normal, one-dimensional weights ones, biases zeros.

    Args:
        stages: this rank's part of the model, with parameters that have memory.
        seed: of the run.
        std: standard deviation of a matrix, or a function of its name.
        ties: later name -> first name; a tied parameter is drawn under its first name on every rank.
    """
    for stage in stages:
        for name, parameter in stage.named_parameters():
            name = (ties or {}).get(name, name)
            local = local_part(parameter)
            if parameter.dim() < 2:
                local.fill_(0.0 if name.rpartition(".")[2] == "bias" else 1.0)
            else:
                scale = std if isinstance(std, int | float) else std(name)
                _fill_normal(local, parameter.shape, slices_of(parameter), scale, seed, name)


def _fill_normal(local: Tensor, shape: torch.Size, held: tuple[slice, ...], std: float, seed: int, name: str) -> None:
    row_shape = shape[1:]
    block_rows = max(1, _BLOCK_ELEMENTS // max(1, math.prod(row_shape)))
    rows = held[0]
    for block in range(rows.start // block_rows, math.ceil(rows.stop / block_rows)):
        start = block * block_rows
        drawn = torch.randn(
            (min(block_rows, shape[0] - start), *row_shape),
            generator=_generator(seed, name, block),
            device="cpu",
        )
        first, last = max(rows.start, start), min(rows.stop, start + len(drawn))
        part = drawn[(slice(first - start, last - start), *held[1:])]
        local[first - rows.start : last - rows.start].copy_(part.mul(std))


def _generator(seed: int, name: str, block: int) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}/{block}".encode()).digest()
    return torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:8], "little", signed=True))
