"""What crosses from one pipeline stage to the next: found by running each stage on tensors without values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from meshtron.errors import LayoutError


@dataclass(frozen=True, kw_only=True)
class Boundary:
    """What crosses the borders of stages for one micro-batch; only shape and dtype are read, meta tensors will do."""

    inputs: Tensor
    """Like the first stage's input."""
    hidden: Tensor
    """Like a hidden state between stages, on this rank (1/tp of the sequence under sequence parallelism)."""
    output: Tensor
    """Like the last stage's output, on this rank."""


def find_boundaries(
    stages: Sequence[nn.Module],
    indices: Sequence[int],
    num_stages: int,
    pp_mesh: DeviceMesh,
    inputs: Tensor,
    kwargs: Mapping[str, Any],
) -> list[Tensor]:
    """Like the input of every stage of the model and the output of the last; every pipeline rank makes the call.

    Stage after stage is run by the rank that holds it, with shapes and types only: nothing is computed, no random
    number is drawn. What a stage gives is told to all pipeline ranks.

    Args:
        stages: this rank's stages.
        indices: their numbers along the model.
        num_stages: stages of the whole model.
        pp_mesh: one-dimensional mesh of pipeline ranks.
        inputs: a micro-batch for the first stage; only shape, dtype and device are read.
        kwargs: what every stage's forward is given besides.

    Returns:
        ``num_stages + 1`` tensors on the meta device, as this rank (its tp coordinate) sees them.

    Raises:
        LayoutError: a stage cannot be run without values, or its output is no single tensor.
    """
    group = pp_mesh.get_group()
    mine = dict(zip(indices, stages, strict=True))
    owners: list[list[int]] = [[] for _ in range(pp_mesh.size())]
    dist.all_gather_object(owners, list(indices), group=group)
    borders = [torch.empty(inputs.shape, dtype=inputs.dtype, device="meta")]
    for index in range(num_stages):
        owner = next(rank for rank, held in enumerate(owners) if index in held)
        found: list[Any] = [None]
        if index in mine:
            try:
                found = [_output_of(mine[index], borders[-1], inputs.device, kwargs)]
            except Exception as error:  # told to all, so that no rank waits for shapes that never come
                found = [f"{type(error).__name__}: {error}"]
        dist.broadcast_object_list(found, group=group, group_src=owner)
        if isinstance(found[0], str):
            raise LayoutError(
                f"the output of pipeline stage {index} of {num_stages} cannot be found out for an input of shape "
                f"{tuple(borders[-1].shape)} without running it: {found[0]}. Mend the stage's forward, or give the "
                "shapes (boundary=Boundary(inputs=..., hidden=..., output=...))"
            )
        borders.append(torch.empty(found[0][0], dtype=found[0][1], device="meta"))
    return borders


def under_fully_shard(stage: nn.Module) -> bool:
    """Whether ``fully_shard`` was applied to the stage or a part of it."""
    return any(isinstance(module, FSDPModule) for module in stage.modules())


def _output_of(
    stage: nn.Module, like: Tensor, device: torch.device, kwargs: Mapping[str, Any]
) -> tuple[torch.Size, torch.dtype]:
    if under_fully_shard(stage):
        raise TypeError("fully_shard would gather weights without values, and keep them")
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, torch.no_grad(), torch.compiler.set_stance("force_eager"):
        given = {
            key: mode.from_tensor(value) if isinstance(value, Tensor) else value for key, value in kwargs.items()
        }
        output = stage(torch.empty(like.shape, dtype=like.dtype, device=device), **given)
        if isinstance(output, tuple | list) and len(output) == 1:
            output = output[0]
        if isinstance(output, DTensor):
            output = output.to_local()
        if not isinstance(output, Tensor):
            raise TypeError(f"forward returns {type(output).__name__}, expected a tensor")
        return output.shape, output.dtype
