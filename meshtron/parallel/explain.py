"""Print what a tensor parallel plan does to every parameter and to the activations around every planned module."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TextIO

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from meshtron.mesh import Layout
from meshtron.parallel.axis import named_axes
from meshtron.parallel.names import named_parameters
from meshtron.parallel.placement import shard_range
from meshtron.parallel.stages import Stages, as_stages
from meshtron.parallel.styles import KNOWN, Change, effect_of, sharded_dim
from meshtron.parallel.tensor import Plan, matches, matching_modules


def explain(
    model: Stages | nn.Module | Iterable[nn.Module],
    mesh: DeviceMesh | Layout,
    plan: Plan,
    *,
    axes: tuple[str, str, str] = ("pp", "dp", "tp"),
    file: TextIO | None = None,
) -> None:
    """Print, for every parameter, its plan key, placements, and local shape and bytes on each rank.

    Then what stays whole on every tp rank, and for each plan key the layouts of activations going in and coming out.
    Nothing is changed, and no ranks are needed: a ``Layout`` will do in place of a mesh. Under torchrun the first
    rank prints.

    Args:
        model: the whole model before ``apply_tensor_parallel`` (on the meta device, say), or stages of it.
        mesh: the mesh, or the layout that it will have.
        plan: module name pattern to style.
        axes: names of the (pp, dp, tp) axes of ``mesh``; those it lacks count as one rank.
        file: where to print; by default to stdout.

    Raises:
        LayoutError: the mesh has none of these axes.
    """
    if torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
        return
    pp, dp, tp = _sizes(mesh, axes)
    stages = as_stages(model)
    print(f"pp {pp} x dp {dp} x tp {tp}; what is said of tp ranks holds at every pp and dp rank", file=file)
    print("\n".join(_parameter_lines(stages, plan, tp)), file=file)
    print("\n".join(_activation_lines(stages, plan, tp)), file=file)


def _sizes(mesh: DeviceMesh | Layout, axes: Sequence[str]) -> list[int]:
    if isinstance(mesh, Layout):
        return [mesh.pp, mesh.dp, mesh.tp]
    return [axis.size for axis in named_axes(mesh, axes, needed=axes)]


def _parameter_lines(stages: Stages, plan: Plan, tp: int) -> Iterator[str]:
    rows = [("parameter", "plan key", "placement over tp", "local shape", "bytes a rank")]
    whole: list[str] = []
    total, largest = 0, 0
    for name, parameter in named_parameters(stages):
        key, placement = _placement(stages, name, parameter, plan, tp)
        shapes = _local_shapes(parameter.shape, placement, tp)
        sizes = [torch.Size(shape).numel() * parameter.dtype.itemsize for shape in shapes]
        total, largest = total + parameter.numel() * parameter.dtype.itemsize, largest + max(sizes)
        if placement == Replicate():
            whole.append(name)
        rows.append(
            (
                name,
                key or "-",
                placement if isinstance(placement, str) else repr(placement),
                _each(shapes),
                _each(sizes),
            )
        )
    yield from _table(rows)
    for alias, first in stages.ties.items():
        yield f"{alias} is {first}"
    yield f"{total:,} bytes of parameters, {largest:,} on the fullest of {tp} tp ranks"
    yield f"whole on every tp rank: {', '.join(whole) or 'nothing'}"


def _placement(
    stages: Stages, name: str, parameter: nn.Parameter, plan: Plan, tp: int
) -> tuple[str, Placement | str]:
    """The plan key of a parameter's module, and its placement."""
    path, _, attribute = name.rpartition(".")
    keys = [key for key in plan if matches(key, path)]
    if isinstance(parameter, DTensor):
        return ", ".join(keys), parameter.placements[0]
    for key in keys:
        if not isinstance(plan[key], KNOWN):
            return key, f"as {type(plan[key]).__name__} says"
        module = next(found for stage in stages for found_name, found in matching_modules(stage, path))
        dim = sharded_dim(plan[key], module, attribute)
        if dim is not None and tp > 1:
            return key, Shard(dim)
    return ", ".join(keys), Replicate()


def _local_shapes(shape: torch.Size, placement: Placement | str, tp: int) -> list[tuple[int, ...]]:
    """The shape on each tp rank."""
    if not isinstance(placement, Shard):
        return [tuple(shape)] * tp
    dim = placement.dim
    return [
        (*shape[:dim], len(shard_range(shape[dim], tp, rank)), *shape[dim + 1 :])  # late ranks may have less
        for rank in range(tp)
    ]


def _each(values: Sequence[object]) -> str:
    """``[a, a, b]`` -> ``"a on ranks 0-1, b on rank 2"``; a single value where all are equal."""
    if all(value == values[0] for value in values):
        return f"{values[0]:,}" if isinstance(values[0], int) else str(values[0])
    runs: list[tuple[object, int, int]] = []
    for rank, value in enumerate(values):
        if runs and runs[-1][0] == value:
            runs[-1] = (value, runs[-1][1], rank)
        else:
            runs.append((value, rank, rank))
    return ", ".join(f"{value} on tp {a}-{b}" if a != b else f"{value} on tp {a}" for value, a, b in runs)


def _activation_lines(stages: Stages, plan: Plan, tp: int) -> Iterator[str]:
    rows = [("plan key", "modules", "style", "input", "output")]
    for key, style in plan.items():
        modules = [module for stage in stages for _, module in matching_modules(stage, key)]
        if modules and isinstance(style, KNOWN):
            rows.append((key, str(len(modules)), type(style).__name__, *_in_and_out(style, modules[0])))
        else:
            rows.append((key, str(len(modules)), type(style).__name__, "?", "?"))
    yield "" if tp > 1 else "\n(tp is 1: nothing of this is applied)"
    yield from _table(rows)


def _in_and_out(style: ParallelStyle, module: nn.Module) -> tuple[str, str]:
    effect = effect_of(style, module)
    named = [f"{name}: {_arrow(before, after)}" for name, (before, after) in effect.keywords.items()]
    entering = "; ".join(filter(None, [_change(effect.inputs), *named])) or "as it is"
    leaving = _change(effect.outputs) or "as it is"
    return entering, leaving + ("" if effect.local_outputs else ", DTensor")


def _change(change: Change) -> str:
    return ", ".join(_arrow(before, after) for before, after in zip(*change, strict=False))


def _arrow(before: Placement | None, after: Placement | None) -> str:
    if before is None or after is None:
        return "as it is"
    return repr(after) if before == after else f"{before!r} -> {after!r}"


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
