"""Optimizer state as global tensors: where this rank's rows of a parameter stand in the whole of it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from meshtron.errors import MeshtronError
from meshtron.parallel.axis import Axis
from meshtron.parallel.buckets import Piece
from meshtron.parallel.placement import contiguous_stride, local_part


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


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Raise MeshtronError for one of torch's optimizers that is not element-wise."""
    name = type(optimizer).__name__
    if name in ("Adafactor", "LBFGS", "Muon", "SparseAdam"):
        raise MeshtronError(
            f"{name} looks at whole matrices, but each dp rank would give it some rows: use an element-wise "
            "optimizer, or fully_shard in place of ZeroOptimizer"
        )


@torch.no_grad()
def make_state(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> None:
    """Make an optimizer create the state it has not made yet, as zeros: a step with zero gradients is taken back.

    Some optimizers' state does not begin at zero (NAdam's); what nothing has been loaded into by the next step is
    dropped then, so that the optimizer makes it itself.

    Args:
        optimizer: element-wise.
        parameters: all that it has.
    """
    fresh = [parameter for parameter in parameters if not optimizer.state.get(parameter)]
    if not fresh:
        return
    groups = optimizer.param_groups
    saved = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    gradients = [(parameter, parameter.grad) for parameter in parameters]
    values = [parameter.detach().clone() for parameter in fresh]
    for group in groups:
        group["lr"] = 0.0
    for parameter, _ in gradients:
        parameter.grad = None
    for parameter in fresh:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for group, options in zip(groups, saved, strict=True):
        group.update(options)
    for parameter, gradient in gradients:
        parameter.grad = gradient
    for parameter, value in zip(fresh, values, strict=True):
        parameter.copy_(value)
        for state in _tensors(optimizer, parameter):
            state.zero_()

    def forget_untouched(*_: Any) -> None:
        hook.remove()
        for parameter in fresh:
            if not any(local_part(state).any() for state in _tensors(optimizer, parameter)):
                optimizer.state.pop(parameter, None)

    hook = optimizer.register_step_pre_hook(forget_untouched)


def _tensors(optimizer: torch.optim.Optimizer, parameter: Tensor) -> list[Tensor]:
    return [state for state in optimizer.state[parameter].values() if isinstance(state, Tensor)]
