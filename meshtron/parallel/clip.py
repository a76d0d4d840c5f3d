"""The norm of a gradient whose parts lie on many ranks, each element counted once."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from meshtron.errors import LayoutError, MeshtronError
from meshtron.kernels.adamw import sum_of_squares
from meshtron.parallel.axis import Axis, check_axes, named_axes
from meshtron.parallel.names import named_parameters
from meshtron.parallel.placement import local_part
from meshtron.parallel.stages import Stages, as_stages


def owned_norm(counted: list[Tensor], axes: Iterable[Axis], norm_type: float, device: torch.device | str) -> Tensor:
    """Norm of all ranks' tensors together, as a float64 scalar that is equal on all of them.

    Args:
        counted: this rank's tensors, none of which another rank counts too.
        axes: mesh axes over which ranks are added up.
        norm_type: 2.0, or ``inf`` for the largest absolute value.
        device: of the result where ``counted`` is empty.

    Raises:
        MeshtronError: another ``norm_type``.
    """
    if norm_type not in (2.0, float("inf")):
        raise MeshtronError(f"norm_type = {norm_type}: expected 2.0 or inf")
    infinite = norm_type == float("inf")
    total = torch.zeros((), dtype=torch.float64, device=device)
    if counted and not infinite:
        total = sum_of_squares(counted)
    elif counted:
        norms = torch.stack(torch._foreach_norm(counted, norm_type)).double()
        total = norms.max().nan_to_num(nan=float("inf"))  # a maximum over ranks may pass over a NaN, unlike a sum
    for axis in axes:
        if axis.size > 1:
            dist.all_reduce(total, op=dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=axis.group)
    return total if infinite else total.sqrt()


@torch.no_grad()
def clip_grad_norm(
    stages: Stages | nn.Module | Iterable[nn.Module],
    mesh: DeviceMesh,
    max_norm: float | None,
    *,
    norm_type: float = 2.0,
    pp_axis: str = "pp",
) -> Tensor:
    """Norm of the whole model's gradient in ``.grad``; scale gradients down to ``max_norm``.

    For training without ``ZeroOptimizer`` (which keeps gradients itself and has a method of this name): gradients
    are plain tensors and DTensors, on one mesh or on slices of it, as after ``apply_tensor_parallel`` and
    ``fully_shard``. torch's own clipping refuses such a mixture. Along axes that a gradient is not sharded over it
    must be equal already.

    Args:
        stages: this rank's modules.
        mesh: the mesh whose ranks hold the model, or copies of it.
        max_norm: None only measures.
        norm_type: 2.0, or ``inf`` for the largest absolute value.
        pp_axis: name of the axis along which ranks hold different stages.

    Returns:
        Scalar tensor with the norm before scaling, equal on all ranks of the mesh.

    Raises:
        LayoutError: parameters are to be trained and none has a gradient in ``.grad``; a gradient is a DTensor over
            other ranks than those of an axis of ``mesh`` of the same name; the mesh's axes have no names.
        MeshtronError: another ``norm_type``.
    """
    stages = as_stages(stages)
    names = mesh.mesh_dim_names or ()
    axes = named_axes(mesh, names, needed=names)
    stages.check_pipeline(pp_axis, Axis.of(mesh, pp_axis).size)
    trained = {id(p): (name, p) for name, p in named_parameters(stages) if p.requires_grad}.values()
    found = [(name, p) for name, p in trained if p.grad is not None]
    if trained and not found:  # a rank whose stage is frozen takes part in the sum
        raise LayoutError(
            "clip_grad_norm: no parameter has a gradient: call it after backward, and with ZeroOptimizer call "
            "optimizer.clip_grad_norm(max_norm)"
        )
    counted = []
    for name, parameter in found:
        gradient = parameter.grad = _summed(parameter.grad)  # type: ignore[arg-type]
        on = check_axes(f"the gradient of {name}", gradient, axes)
        # Not Replicate: FSDP's placement over dp of what tp shards is a kind of Shard that does not call itself one.
        sharded = {
            pp_axis,
            *(axis for axis, p in zip(on, _placements(gradient), strict=True) if not p.is_replicate()),
        }
        first = all(axis.rank == 0 for axis in axes if axis.name not in sharded)
        if name not in stages.ties and first and local_part(gradient).numel():
            counted.append(local_part(gradient))
    device = found[0][1].device if found else mesh.device_type
    norm = owned_norm(counted, axes, norm_type, device)
    if max_norm is not None:
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for _, parameter in found:
            local = local_part(parameter.grad)  # type: ignore[arg-type]
            local.mul_(scale.to(local.dtype))
    return norm


def _summed(gradient: Tensor) -> Tensor:
    """``gradient`` without partial sums."""
    if not isinstance(gradient, DTensor) or not any(p.is_partial() for p in gradient.placements):
        return gradient
    return gradient.redistribute(placements=[Replicate() if p.is_partial() else p for p in gradient.placements])


def _placements(gradient: Tensor) -> Sequence[Placement]:
    return gradient.placements if isinstance(gradient, DTensor) else ()
