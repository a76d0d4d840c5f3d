"""Optimizer state as global tensors: where this rank's rows of a parameter stand in the whole of it."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from meshtron.parallel.axis import Axis
from meshtron.parallel.buckets import Piece
from meshtron.parallel.placement import contiguous_stride


class StateLayout:
    """Turns tensors of this rank's rows into DTensors of the whole parameter.

    Args:
        mesh: the mesh that ``dp`` and ``tp`` are axes of.
        dp, tp: its axes.
        shards: dp ranks that state is cut over; 1 where each keeps all of it.
    """

    def __init__(self, mesh: DeviceMesh, dp: Axis, tp: Axis, shards: int) -> None:
        self._over_dp = shards > 1
        self._over_tp = tp.size > 1
        self._mesh: DeviceMesh | None = None
        if not self._over_dp:
            return
        if not self._over_tp:
            self._mesh = mesh[dp.name]
            return
        names = mesh.mesh_dim_names or ()
        if names.index(tp.name) < names.index(dp.name):
            self._mesh = mesh[tp.name, dp.name]
            return
        # Axes (tp, dp) over existing groups, so that ``Shard(0)`` twice cuts dp's rows out of tp's shard; a slice of
        # ``mesh`` itself keeps its order (dp, tp), which would cut the other way.
        self._mesh = DeviceMesh.from_group(
            [tp.group, dp.group],
            mesh.device_type,
            mesh=mesh[dp.name, tp.name].mesh.T.contiguous(),
            mesh_dim_names=(tp.name, dp.name),
        )

    def whole(self, piece: Piece, tensor: Tensor) -> Tensor:
        """``tensor``, which has the shape of the piece's master, as a part of a tensor of the parameter's shape."""
        parameter = piece.parameter
        sharded = isinstance(parameter, DTensor)
        mesh, placements = self._mesh, (Shard(0),) if self._over_dp else ()
        if not self._over_dp:
            if not sharded:
                return tensor
            mesh, placements = parameter.device_mesh, parameter.placements
        elif self._over_tp:
            first: Placement = parameter.placements[0] if sharded else Replicate()
            placements = (first, Shard(0))  # type: ignore[assignment]
        shape = parameter.shape or torch.Size([1])
        return DTensor.from_local(
            tensor, mesh, placements, run_check=False, shape=shape, stride=contiguous_stride(shape)
        )


@torch.no_grad()
def make_state(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> None:
    """Make an optimizer create the state it has not made yet, as zeros: a step with zero gradients is taken back.

    Args:
        optimizer: element-wise.
        parameters: all that it has.
    """
    if all(optimizer.state.get(parameter) for parameter in parameters):
        return
    groups = optimizer.param_groups
    saved = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    kept = [(parameter.detach().clone(), parameter.grad) for parameter in parameters]
    for group in groups:
        group["lr"] = 0.0
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for group, values in zip(groups, saved, strict=True):
        group.update(values)
    for parameter, (value, gradient) in zip(parameters, kept, strict=True):
        parameter.copy_(value)
        parameter.grad = gradient
        for state in optimizer.state[parameter].values():
            if isinstance(state, Tensor):
                state.zero_()
