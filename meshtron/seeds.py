"""Random streams of a run: what tp ranks replicate they draw alike, what dp ranks and stages hold they draw apart."""

import hashlib
import random

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh


def seed_ranks(mesh: DeviceMesh, seed: int, step: int = 0, *, axes: tuple[str, str] = ("pp", "dp")) -> None:
    """Seed torch's, Python's and NumPy's generators on this rank from (seed, step, pp rank, dp rank).

    So dropout masks are equal within a tp group, whose ranks replicate what lies between sharded layers, and differ
    over dp and over pipeline stages.

    Args:
        mesh: the whole mesh.
        seed: of the run.
        step: finished steps, so that a resume does not draw the same numbers again.
        axes: names of the axes along which streams differ; those the mesh lacks count as one rank.
    """
    names = mesh.mesh_dim_names or ()
    coordinates = [mesh.get_local_rank(axis) if axis in names else 0 for axis in axes]
    digest = hashlib.sha256("/".join(map(str, (seed, step, *coordinates))).encode()).digest()
    derived = int.from_bytes(digest[:8], "little") % 2**63
    torch.manual_seed(derived)
    random.seed(derived)
    np.random.seed(derived % 2**32)
