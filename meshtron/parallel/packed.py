"""Linear layers whose output is several matrices side by side, such as a fused query-key-value."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from meshtron.errors import PlanError
from meshtron.parallel.tensor import matching_modules


class PackedLinear(nn.ModuleList):
    """Linear layers with one input, whose outputs are joined along the last dim."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., in features) -> (..., sum of out features), on tp ranks each part's share side by side."""
        return torch.cat([part(x) for part in self], dim=-1)


def unpack_linear(model: nn.Module, pattern: str, parts: int | Sequence[int] = 3) -> None:
    """Replace fused ``nn.Linear`` layers by a ``PackedLinear`` of their parts, in place, values included.

    Column parallelism gives each rank consecutive rows of a weight. Of a fused query-key-value that would be, for
    two ranks, all queries and half of the keys; of its parts it is half of each, which is what the code that takes
    the output apart again expects, if it does so in proportion (``chunk(3, dim=-1)``, heads as ``-1``). Names become
    ``<name>.0.weight``, ``<name>.1.weight`` ..., at every layout; plan ``"<pattern>.*": ColwiseParallel()``.

    Args:
        model: whole model, on any device.
        pattern: names the modules to replace, as a plan key does.
        parts: number of equal parts, or the rows of each, in order.

    Raises:
        PlanError: the pattern names no ``nn.Linear`` inside the model, or the parts do not make up its rows.
    """
    modules = dict(matching_modules(model, pattern))
    if not modules:
        raise PlanError(f"unpack_linear: {pattern!r} matches no module of {type(model).__name__}")
    for name, module in modules.items():
        if not name:
            raise PlanError("unpack_linear: the model itself cannot be replaced: put it into another module")
        if not isinstance(module, nn.Linear):
            raise PlanError(f"unpack_linear: {name} is a {type(module).__name__}, expected nn.Linear")
        rows = module.out_features
        sizes = [rows // parts] * parts if isinstance(parts, int) else list(parts)
        if sum(sizes) != rows:
            raise PlanError(f"unpack_linear: {name} has {rows} rows, which parts = {parts} do not make up")
        parent = model.get_submodule(name.rpartition(".")[0])
        setattr(parent, name.rpartition(".")[2], _unpacked(module, sizes))


def _unpacked(module: nn.Linear, sizes: list[int]) -> PackedLinear:
    weight, bias = module.weight.detach(), None if module.bias is None else module.bias.detach()
    weights = weight.split(sizes)
    biases = [None] * len(sizes) if bias is None else bias.split(sizes)
    packed = PackedLinear()
    for part_weight, part_bias in zip(weights, biases, strict=True):
        part = nn.Linear(module.in_features, len(part_weight), bias=bias is not None, device="meta")
        part.weight = nn.Parameter(part_weight.clone(), requires_grad=module.weight.requires_grad)
        if part_bias is not None:
            part.bias = nn.Parameter(part_bias.clone(), requires_grad=module.bias.requires_grad)
        packed.append(part)
    return packed.train(module.training)
