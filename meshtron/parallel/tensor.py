"""Tensor parallelism: check a plan of stock DTensor styles against a model, then apply it.

A plan maps module names to ``torch.distributed.tensor.parallel`` styles. In a name ``*`` stands for one path
segment, as in ``parallelize_module``, which this wraps: torch only warns about a key that matches nothing and
unties tied weights; here the first is an error and the second is undone.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from meshtron.errors import PlanError
from meshtron.parallel.axis import check_one_axis
from meshtron.parallel.names import global_name, unwrapped
from meshtron.parallel.placement import shard_range
from meshtron.parallel.rehearsal import example_ids, rehearse
from meshtron.parallel.stages import PassThrough, Stages, as_stages
from meshtron.parallel.styles import sharded_dim
from meshtron.parallel.tied import find_ties, retie

Plan = Mapping[str, ParallelStyle]


def matches(pattern: str, name: str) -> bool:
    """Whether a plan key names this module: segments match one by one."""
    keys, parts = pattern.split("."), name.split(".")
    return len(keys) == len(parts) and all(fnmatchcase(part, key) for key, part in zip(keys, parts, strict=True))


def matching_modules(model: nn.Module, pattern: str) -> Iterator[tuple[str, nn.Module]]:
    """Modules of ``model`` that a plan key names, inside torch's wrappers; the empty key is the model itself."""
    for name, module in model.named_modules():
        if matches(pattern, global_name(name)) and unwrapped(module) is module:
            yield name, module


def check_plan(
    model: nn.Module, plan: Plan, tp: int, *, uneven: Sequence[str] = (), example: Any = None, rehearsal: bool = True
) -> None:
    """Check a plan against a whole model before anything is split.

    Besides names and sizes, the forward pass is rehearsed on the meta device at the shapes of one rank, with
    ``example`` or, for a model that begins with an embedding, with token ids.

    Args:
        model: the model, on any device (meta will do); it is not changed.
        plan: module name pattern to style.
        tp: number of tensor parallel ranks.
        uneven: keys whose sharded dim need not be divisible by ``tp``: those whose sharded output is read by code
            that knows the real size (a vocabulary-parallel embedding and head).
        example: input of the model, a tensor or a tuple of arguments, of which only shapes and types are read (their
            sequence should be a multiple of ``tp``); without one, a model that is not rehearsed with token ids is not
            rehearsed at all, and neither is one with styles that are not torch's own.
        rehearsal: False looks at names and sizes only (two forward passes on the meta device take a second or two for
            a model of a hundred layers).

    Raises:
        PlanError: a value is no style; a key matches no module, or one of a kind that its style does not take; a
            sharded dim is not a multiple of ``tp``, or a rank would get nothing of it; a column parallel module has
            no row parallel one after it or the other way round; a forward pass does not fit one rank's shapes, or
            joins what is whole on every rank with a rank's share.
    """
    styles: dict[str, ParallelStyle] = {}
    for pattern, style in plan.items():
        if not isinstance(style, ParallelStyle):
            raise PlanError(f"plan key {pattern!r}: expected a style such as ColwiseParallel(), found {style!r}")
        modules = list(matching_modules(model, pattern))
        if not modules:
            raise PlanError(
                f"plan key {pattern!r} matches no module: the model has {_siblings(model, pattern)}; "
                "correct the key or remove it"
            )
        for name, module in modules:
            _check_kind(name, module, style)
            _check_divides(name, module, style, tp, must_divide=pattern not in uneven)
            styles[name] = style
    _check_pairs(model, styles)
    if tp > 1 and rehearsal:
        examples = example_ids(model, tp) if example is None else [example]
        any(rehearse(model, styles, tp, given, must_run=example is not None) for given in examples)


def _check_kind(name: str, module: nn.Module, style: ParallelStyle) -> None:
    """torch's own column and row parallel styles know two kinds of module, and say so only when ranks are there."""
    if type(style) in (ColwiseParallel, RowwiseParallel) and not isinstance(module, nn.Linear | nn.Embedding):
        raise PlanError(
            f"{name}: {type(style).__name__} shards nn.Linear and nn.Embedding, found {type(module).__name__}: write "
            "it as an nn.Linear (a convolution of width 1 is one), plan the layers inside it, or remove the key"
        )


def _check_divides(name: str, module: nn.Module, style: ParallelStyle, tp: int, must_divide: bool) -> None:
    weight = getattr(module, "weight", None)
    dim = None if weight is None else sharded_dim(style, module, "weight")
    if weight is None or dim is None:
        return
    size = weight.shape[dim]

    def fits(ranks: int) -> bool:
        return size % ranks == 0 if must_divide else bool(shard_range(size, ranks, ranks - 1))

    if not fits(tp):
        allowed = [n for n in range(1, min(size, 64) + 1) if fits(n)]
        raise PlanError(
            f"{name}: {type(style).__name__} splits dim {dim} of a weight of shape {tuple(weight.shape)}, and "
            f"{size} {'does not divide by' if must_divide else 'leaves nothing for the last rank of'} tp = {tp}; "
            f"tp can be {', '.join(map(str, allowed))}"
        )


def _check_pairs(model: nn.Module, styles: Mapping[str, ParallelStyle]) -> None:
    """A column parallel linear layer leaves its output in parts, which a row parallel one takes and adds up."""
    linear = {name: style for name, style in styles.items() if isinstance(model.get_submodule(name), nn.Linear)}
    leaves_parts = {name for name, style in linear.items() if _leaves_parts(style)}
    takes_parts = {name for name, style in linear.items() if _takes_parts(style)}
    weighted = [name for name, module in model.named_modules() if any(True for _ in module.parameters(recurse=False))]
    for name in linear:
        if name in leaves_parts and name != weighted[-1]:  # parts of the last output are the loss's business
            around = _around(name, weighted, leaves_parts)
            if not any(_inside(other, around) for other in takes_parts):
                readers = [other for other in weighted if _inside(other, around) and other not in leaves_parts]
                raise PlanError(
                    f"{name}: ColwiseParallel leaves its output in parts, and no RowwiseParallel in "
                    f"{around or 'the model'} takes them: add one for the module that reads them"
                    f"{' (' + ', '.join(readers[:4]) + '?)' if readers else ''}, or set output_layouts=Replicate()"
                )
        if name in takes_parts:
            around = _around(name, weighted, takes_parts)
            if not any(_inside(other, around) for other in leaves_parts):
                makers = [other for other in weighted if _inside(other, around) and other != name]
                raise PlanError(
                    f"{name}: RowwiseParallel takes its input in parts, and no ColwiseParallel in "
                    f"{around or 'the model'} leaves any: add one for the module that makes its input"
                    f"{' (' + ', '.join(makers[:4]) + '?)' if makers else ''}, or set input_layouts=Replicate()"
                )


def _leaves_parts(style: ParallelStyle) -> bool:
    return isinstance(style, ColwiseParallel) and any(layout == Shard(-1) for layout in style.output_layouts)


def _takes_parts(style: ParallelStyle) -> bool:
    return isinstance(style, RowwiseParallel) and any(layout == Shard(-1) for layout in style.input_layouts)


def _around(name: str, weighted: Sequence[str], alike: Set[str]) -> str:
    """The innermost module around ``name`` that has parameters of its own beyond those of modules ``alike``."""
    around = name
    while around:
        around = around.rpartition(".")[0]
        if any(_inside(other, around) and other not in alike for other in weighted):
            break
    return around


def _inside(name: str, around: str) -> bool:
    return not around or name.startswith(around + ".")


def _siblings(model: nn.Module, pattern: str) -> str:
    """Names at the depth where ``pattern`` stops matching, for the error message."""
    parts = pattern.split(".")
    depth = 0
    while depth < len(parts) and any(matching_modules(model, ".".join(parts[: depth + 1]))):
        depth += 1
    parent = ".".join(parts[:depth])
    for name, module in matching_modules(model, parent):
        children = [child for child, _ in module.named_children()]
        shown = ", ".join(children[:8]) + (", ..." if len(children) > 8 else "")
        return f"{shown or 'nothing'} under {global_name(name)!r}" if name else shown
    return "no such parent"


def apply_tensor_parallel(stages: Stages | nn.Module | Iterable[nn.Module], tp_mesh: DeviceMesh, plan: Plan) -> None:
    """Shard a model, or pipeline stages of it, over the ranks of ``tp_mesh``, in place.

    Parameters of planned modules become DTensors on ``tp_mesh``; ties are kept. With one rank nothing is changed.
    Keys for parts that are not here are passed over (``check_plan`` has seen the whole model).

    Args:
        stages: a model, a stage, or all of this rank's stages, preferably on the meta device.
        tp_mesh: one-dimensional mesh.
        plan: module name pattern to style.

    Raises:
        LayoutError: a mesh of several axes.
    """
    check_one_axis(tp_mesh, "tp")
    if tp_mesh.size() == 1:
        return
    stages = as_stages(stages)
    done: set[nn.Module] = set()  # stages of one rank may share a module
    for stage in stages:
        ties = find_ties(stage)
        held = {
            name: (module, style)
            for pattern, style in plan.items()
            for name, module in matching_modules(stage, pattern)
            if module not in done and not isinstance(module, PassThrough)
        }
        parallelize_module(stage, tp_mesh, {name: style for name, (_, style) in held.items()})
        done.update(module for module, _ in held.values())
        retie([stage], ties)
    retie(stages, stages.ties)
