"""Tensor parallelism: check a plan of stock DTensor styles against a model, then apply it.

A plan maps module names to ``torch.distributed.tensor.parallel`` styles. In a name ``*`` stands for one path
segment, as in ``parallelize_module``, which this wraps: torch only warns about a key that matches nothing and
unties tied weights; here the first is an error and the second is undone.
"""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from meshtron.errors import PlanError
from meshtron.parallel.tied import find_ties, retie

Plan = Mapping[str, ParallelStyle]


def matches(pattern: str, name: str) -> bool:
    """Whether a plan key names this module: segments match one by one."""
    keys, parts = pattern.split("."), name.split(".")
    return len(keys) == len(parts) and all(fnmatchcase(part, key) for key, part in zip(keys, parts, strict=True))


def matching_modules(model: nn.Module, pattern: str) -> Iterator[tuple[str, nn.Module]]:
    """Modules of ``model`` that a plan key names; the empty key is the model itself."""
    for name, module in model.named_modules():
        if matches(pattern, name):
            yield name, module


def check_plan(model: nn.Module, plan: Plan, tp: int, *, uneven: tuple[str, ...] = ()) -> None:
    """Check a plan against a whole model before anything is split.

    Args:
        model: the model, on any device (meta will do).
        plan: module name pattern to style.
        tp: number of tensor parallel ranks.
        uneven: keys whose sharded dim need not be divisible by ``tp``: those whose sharded output is read by code
            that knows the real size (a vocabulary-parallel embedding and head).

    Raises:
        PlanError: a key matches no module, or a sharded dim is not a multiple of ``tp``.
    """
    for pattern, style in plan.items():
        modules = list(matching_modules(model, pattern))
        if not modules:
            raise PlanError(
                f"plan key {pattern!r} matches no module: the model has {_siblings(model, pattern)}; "
                "correct the key or remove it"
            )
        for name, module in modules:
            _check_divides(name, module, style, tp, must_divide=pattern not in uneven)


def _check_divides(name: str, module: nn.Module, style: ParallelStyle, tp: int, must_divide: bool) -> None:
    weight = getattr(module, "weight", None)
    if weight is None or not isinstance(style, ColwiseParallel | RowwiseParallel):
        return
    # A Linear's weight is (out, in), an Embedding's (vocabulary, hidden), so colwise and rowwise swap dims.
    dim = int(isinstance(style, RowwiseParallel) != isinstance(module, nn.Embedding))
    size = weight.shape[dim]
    if size < tp or (must_divide and size % tp):
        allowed = [n for n in range(1, size + 1) if size % n == 0 and n <= 64]
        raise PlanError(
            f"{name}: {type(style).__name__} splits dim {dim} of a weight of shape {tuple(weight.shape)}, and "
            f"{size} does not divide by tp = {tp}; tp can be {', '.join(map(str, allowed))}"
        )


def _siblings(model: nn.Module, pattern: str) -> str:
    """Names at the depth where ``pattern`` stops matching, for the error message."""
    parts = pattern.split(".")
    depth = 0
    while depth < len(parts) and any(matching_modules(model, ".".join(parts[: depth + 1]))):
        depth += 1
    parent = ".".join(parts[:depth])
    for name, module in model.named_modules():
        if matches(parent, name) if parent else name == "":
            children = [child for child, _ in module.named_children()]
            shown = ", ".join(children[:8]) + (", ..." if len(children) > 8 else "")
            return f"{shown or 'nothing'} under {name!r}" if name else shown
    return "no such parent"


def apply_tensor_parallel(stage: nn.Module, tp_mesh: DeviceMesh, plan: Plan) -> nn.Module:
    """Shard a model, or the part of it that a pipeline stage holds, over the ranks of ``tp_mesh``.

    Parameters of planned modules become DTensors on ``tp_mesh``; ties within ``stage`` are kept. With one rank
    nothing is changed. Keys for parts that this stage does not hold are passed over (``check_plan`` has seen the
    whole model).

    Args:
        stage: module to shard in place, preferably on the meta device.
        tp_mesh: one-dimensional mesh.
        plan: module name pattern to style.

    Returns:
        ``stage``.
    """
    if tp_mesh.size() == 1:
        return stage
    ties = find_ties(stage)
    held = {pattern: style for pattern, style in plan.items() if any(matching_modules(stage, pattern))}
    parallelize_module(stage, tp_mesh, held)
    retie([stage], ties)
    return stage
