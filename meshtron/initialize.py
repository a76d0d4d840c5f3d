"""Initial weights that are the same at every layout: a function of (seed, parameter name) alone.

A parameter is drawn in blocks of whole rows, each block by a generator seeded with a hash of (seed, name, block),
on the CPU and in float32 whatever the device and the parameter's dtype. A rank draws only the blocks that its
shard touches, so no rank ever holds a whole large parameter.
"""

import hashlib
import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshtron.errors import MeshtronError
from meshtron.parallel.names import global_name, named_parameters
from meshtron.parallel.placement import contiguous_stride, local_part, slices_of
from meshtron.parallel.stages import Stages, as_stages
from meshtron.parallel.tied import retie

_BLOCK_ELEMENTS = 1 << 20  # 4 MiB of float32 at a time


def materialize(
    stages: Stages | nn.Module | Iterable[nn.Module],
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Give meta parameters memory on ``device`` in ``dtype``; DTensors keep mesh and placements, ties are kept.

    Args:
        stages: modules whose parameters are replaced. Values are undefined until ``init_weights`` or a load.
        device: where the memory is taken; by default the device type of the mesh that the stages or their
            parameters are on, and "cpu" where there is none.
        dtype: of floating-point parameters; by default each parameter's own.

    Raises:
        MeshtronError: a buffer is on the meta device: its values were computed when the model was built, and nobody
            knows them now.
    """
    stages = as_stages(stages)
    check_buffers(stages)
    device = device or _device_of(stages)
    replaced: dict[int, nn.Parameter] = {}
    for stage in stages:
        for module in stage.modules():
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                if id(parameter) not in replaced:
                    replaced[id(parameter)] = _empty_like(parameter, device, dtype or parameter.dtype)
                module._parameters[name] = replaced[id(parameter)]
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)
    retie(stages, stages.ties)


def check_buffers(parts: Iterable[nn.Module]) -> None:
    """Raise MeshtronError for a buffer on the meta device: its values were computed when the model was built."""
    for part in parts:
        for path, buffer in part.named_buffers():
            if buffer.is_meta:
                owner, _, name = path.rpartition(".")
                raise MeshtronError(
                    f"buffer {global_name(path)!r} of {type(part.get_submodule(owner)).__name__} is on the meta "
                    f"device, so its values are lost: give that module its {name} anew after it is built, outside "
                    'torch.device("meta"), or under torch.device("cpu") in it'
                )


def _device_of(stages: Stages) -> str:
    placed = (p.device_mesh.device_type for _, p in named_parameters(stages) if isinstance(p, DTensor))
    device = stages.device_type or next(placed, "cpu")
    return f"cuda:{torch.cuda.current_device()}" if device == "cuda" else device


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
    stages: Stages | nn.Module | Iterable[nn.Module],
    *,
    seed: int = 0,
    std: float | Callable[[str], float] = 0.02,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Fill every parameter in place: matrices normal, one-dimensional weights ones, biases zeros.

    Parameters on the meta device are given memory first (``materialize``). A tied parameter is drawn under its first
    name wherever it is.

    Args:
        stages: this rank's part of the model: from ``split_stages``, a list of modules, or one module.
        seed: of the run.
        std: standard deviation of a matrix, or a function of its name.
        device: for meta parameters; by default that of the mesh.
        dtype: for meta parameters; by default each parameter's own.

    Raises:
        MeshtronError: a buffer is on the meta device.
    """
    stages = as_stages(stages)
    if any(parameter.is_meta for _, parameter in named_parameters(stages)):
        materialize(stages, device, dtype)
    for name, parameter in named_parameters(stages):
        name = stages.ties.get(name, name)
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
            dtype=torch.float32,  # whatever the default is: another type is another stream of numbers
        )
        first, last = max(rows.start, start), min(rows.stop, start + len(drawn))
        part = drawn[(slice(first - start, last - start), *held[1:])]
        local[first - rows.start : last - rows.start].copy_(part.mul(std))


def _generator(seed: int, name: str, block: int) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}/{block}".encode()).digest()
    return torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:8], "little", signed=True))
