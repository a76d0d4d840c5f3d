"""Layout -> DeviceMesh: three named axes, and the rank order behind them.

Rank ``r`` of a world of ``pp * dp * tp`` sits at

    r = pp_rank * (dp * tp) + dp_rank * tp + tp_rank

so tp is innermost (its ranks are neighbours, inside a node, where the all-gathers of every layer are cheap), dp
next (one reduce-scatter and one all-gather a step) and pp outermost (point-to-point activations only, the
traffic that best survives a slow link between nodes).
"""

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshtron import world
from meshtron.errors import LayoutError

AXES = ("pp", "dp", "tp")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How many ranks each mesh axis has.

    Raises:
        LayoutError: a size is no whole number of at least 1.
    """

    pp: int = 1
    """Pipeline stages are spread over this many ranks."""
    dp: int = 1
    """Data-parallel replicas; ZeRO-1 shards the optimizer state over them."""
    tp: int = 1
    """Ranks that share every layer (and, with sequence parallelism, the sequence)."""

    def __post_init__(self) -> None:
        for axis in AXES:
            size = getattr(self, axis)
            if not isinstance(size, int) or size < 1:
                raise LayoutError(f"layout {axis} = {size!r}: expected a whole number of at least 1")

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.pp * self.dp * self.tp

    def __str__(self) -> str:
        return f"{self.pp}x{self.dp}x{self.tp}"

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """Read ``"2x1x4"`` (pp x dp x tp).

        Raises:
            LayoutError: ``text`` is not three whole numbers joined by ``x``.
        """
        parts = text.strip().split("x")
        if len(parts) != 3 or not all(part.isdecimal() for part in parts):
            raise LayoutError(f"layout {text!r}: expected pp x dp x tp as in 2x1x4")
        pp, dp, tp = map(int, parts)
        return cls(pp=pp, dp=dp, tp=tp)

    def check_world(self, world_size: int) -> None:
        """Raise LayoutError unless ``pp * dp * tp`` is the number of ranks there are."""
        if self.world_size != world_size:
            raise LayoutError(
                f"pp({self.pp}) * dp({self.dp}) * tp({self.tp}) = {self.world_size}, but the world has "
                f"{world_size} rank{'s' * (world_size != 1)}: start {self.world_size} ranks or change [parallel]"
            )


def build_mesh(layout: Layout, device_type: str | None = None) -> DeviceMesh:
    """Build the DeviceMesh with axes ``("pp", "dp", "tp")``, over the default process group.

    Where there is no process group yet it is made: of torchrun's ranks, or of this process alone.

    Args:
        layout: the size of each axis.
        device_type: ``"cpu"`` or ``"cuda"``; by default cuda where there is one.

    Raises:
        LayoutError: the layout does not use every rank of the world exactly once, or the device is not there.
    """
    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    if torch.distributed.is_initialized():
        layout.check_world(torch.distributed.get_world_size())
    else:
        layout.check_world(world.world_size())
        world.start_process_group(world.pick_device(device_type))
    return init_device_mesh(device_type, (layout.pp, layout.dp, layout.tp), mesh_dim_names=AXES)
