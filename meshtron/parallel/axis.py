"""A mesh axis as one rank sees it."""

from dataclasses import dataclass
from typing import Any

from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Axis:
    """One mesh axis as this rank sees it; an axis the mesh lacks has one rank and no group."""

    name: str
    size: int
    rank: int
    group: Any

    @classmethod
    def of(cls, mesh: DeviceMesh, name: str) -> "Axis":
        if name not in (mesh.mesh_dim_names or ()):
            return cls(name, 1, 0, None)
        axis = mesh[name]
        return cls(name, axis.size(), axis.get_local_rank(), axis.get_group())
