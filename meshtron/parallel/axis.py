"""A mesh axis as one rank sees it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshtron.errors import LayoutError


@dataclass(frozen=True)
class Axis:
    """One mesh axis as this rank sees it; an axis the mesh lacks has one rank and no group."""

    name: str
    size: int
    rank: int
    group: Any
    ranks: tuple[int, ...]
    """Global ranks along the axis, this one among them."""

    @classmethod
    def of(cls, mesh: DeviceMesh, name: str) -> "Axis":
        """The axis of ``mesh`` with this name."""
        if name not in (mesh.mesh_dim_names or ()):
            return cls(name, 1, 0, None, (dist.get_rank(),))
        axis = mesh[name]
        return cls(name, axis.size(), axis.get_local_rank(), axis.get_group(), tuple(axis.mesh.tolist()))


def named_axes(mesh: DeviceMesh, names: Sequence[str], needed: Sequence[str]) -> list[Axis]:
    """The axes of ``mesh`` with these names; those that it lacks count as one rank.

    Args:
        mesh: any mesh.
        names: wanted axes.
        needed: of ``names``; at least one of them must be there where the mesh has an axis of another name and more
            than one rank. Else that axis is probably the one that was meant, and ranks along it would be left out.

    Raises:
        LayoutError: none of ``needed`` is there, or axes have no names.
    """
    present = mesh.mesh_dim_names
    if present is None and mesh.size() > 1:
        raise LayoutError("the axes of the mesh have no names: give them some (mesh_dim_names=...)")
    others = [axis for axis in present or () if axis not in names and mesh[axis].size() > 1]
    if others and not any(name in (present or ()) for name in needed):
        raise LayoutError(
            f"the mesh has axes {', '.join(present or ())}, expected one of the name "
            f"{' or '.join(map(repr, needed))}: say in axes=... how the mesh calls it"
        )
    return [Axis.of(mesh, name) for name in names]


def check_one_axis(mesh: DeviceMesh, axis: str) -> None:
    """Raise LayoutError for a mesh of several axes where one, such as ``axis``, is meant."""
    if getattr(mesh, "ndim", 1) != 1:
        raise LayoutError(
            f"a mesh with axes {', '.join(mesh.mesh_dim_names or ['without names'])}: expected one of them, as in "
            f'mesh["{axis}"]'
        )


def check_axes(what: str, tensor: Tensor, axes: Sequence[Axis]) -> list[str]:
    """Names of the mesh axes that a DTensor is on; none for a plain tensor.

    Args:
        what: the tensor's name, for the message.
        tensor: any.
        axes: those that it may be on.

    Raises:
        LayoutError: it is on an axis of another name, or of other ranks.
    """
    if not isinstance(tensor, DTensor):
        return []
    mesh = tensor.device_mesh
    allowed = {axis.name: axis.ranks for axis in axes}
    names = mesh.mesh_dim_names or ()
    if not names or any(allowed.get(name) != tuple(mesh[name].mesh.tolist()) for name in names):
        raise LayoutError(
            f"{what} is a DTensor over {', '.join(names) or 'axes without names'}, expected only "
            f"{', '.join(allowed)}, of the mesh that is given here: shard it over slices of that mesh, and say how "
            "it calls its axes"
        )
    return list(names)
