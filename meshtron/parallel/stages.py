"""Cut a model into pipeline stages, and remember of the whole what a part of it no longer shows.

Stages are numbered along the model; each pipeline rank holds one or several. Layers keep their global index, so
parameter names are the same at every split.
"""

import copy
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MethodType

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshtron.errors import LayoutError
from meshtron.parallel.axis import check_one_axis
from meshtron.parallel.names import named_parameters, unwrapped
from meshtron.parallel.schedules import check_stages, default_stages, stage_indices
from meshtron.parallel.tied import find_ties


class Stages(list[nn.Module]):
    """This rank's stages in model order: a list of modules that knows the whole model they come from.

    ``split_stages`` makes it, and the other helpers read it: which parameters are tied, how many stages there are.
    A plain list of modules, or one module, serves them as well; it is then the whole model as far as they know.

    Args:
        modules: the stages.
        ties: later name -> first name of parameters that the whole model shares.
        shapes: global shape of every parameter of the whole model, by first name.
        indices: number of each stage along the model.
        num_stages: stages of the whole model, over all ranks.
        schedule: the schedule by which stages were dealt to ranks.
        device_type: where the mesh is: ``"cpu"`` or ``"cuda"``; None where nothing is known of a mesh.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        *,
        ties: Mapping[str, str],
        shapes: Mapping[str, torch.Size],
        indices: Sequence[int],
        num_stages: int,
        schedule: str = "1F1B",
        device_type: str | None = None,
    ) -> None:
        super().__init__(modules)
        self.ties, self.shapes = dict(ties), dict(shapes)
        self.indices, self.num_stages, self.schedule = list(indices), num_stages, schedule
        self.device_type = device_type
        self.num_microbatches: int | None = None
        """Backward passes of a step, once ``pipeline_schedule`` knows."""
        self.after_weight_pass: list[Callable[[nn.Module], None]] = []
        """Called with a stage after each weight pass of a zero-bubble schedule (``ZeroOptimizer.collect``)."""

    def check_pipeline(self, axis: str, size: int) -> None:
        """Raise LayoutError where there are more stages than the ranks of a mesh's pipeline axis hold."""
        if self.num_stages > len(self) * size:
            raise LayoutError(
                f"{self.num_stages} stages, {len(self)} on this rank, but mesh axis {axis!r} has {size} "
                f"rank{'s' * (size != 1)}: say how the mesh calls its pipeline axis"
            )


def as_stages(parts: nn.Module | Iterable[nn.Module]) -> Stages:
    """``parts`` as ``Stages``: a module or a plain list of modules stands for the whole model."""
    if isinstance(parts, Stages):
        return parts
    modules = [parts] if isinstance(parts, nn.Module) else list(parts)
    ties = find_ties(*modules)
    shapes = {ties.get(name, name): parameter.shape for name, parameter in named_parameters(modules)}
    return Stages(modules, ties=ties, shapes=shapes, indices=range(len(modules)), num_stages=len(modules))


class PassThrough(nn.Module):
    """Stands where a pipeline stage lacks a part of the model: hands on the hidden states it is given."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, hidden: Tensor, *args: object, **kwargs: object) -> Tensor:
        """``hidden`` as it is; whatever else the part would have been given is passed over.

        Raises:
            LayoutError: ``hidden`` is no hidden state but token ids or positions.
        """
        if not hidden.is_floating_point():
            raise LayoutError(
                f"{self.name} is on another pipeline stage, and its input here, {hidden.dtype}, is no hidden state: "
                "put everything that reads ids or positions before the layers into one module, and name that in first"
            )
        return hidden


def split_layers(costs: Sequence[float], num_stages: int, *, first: float = 0.0, last: float = 0.0) -> list[range]:
    """Divide layers over stages so that the dearest stage is as cheap as possible; every stage gets one at least.

    Args:
        costs: cost of each layer, in any unit.
        num_stages: stages to fill, at most ``len(costs)``.
        first, last: extra cost of the first stage (embedding) and the last (head), in the same unit.

    Raises:
        LayoutError: there are fewer layers than stages.
    """
    num_layers = len(costs)
    if num_layers < num_stages:
        raise LayoutError(
            f"{num_layers} layers cannot fill {num_stages} pipeline stages: lower pp or stages_per_rank"
        )
    # best[n]: (dearest stage, start of each stage) for the first n layers in the stages so far.
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for stage in range(num_stages):
        extra = first * (stage == 0) + last * (stage == num_stages - 1)
        room_after = num_stages - stage - 1
        extended: dict[int, tuple[float, tuple[int, ...]]] = {}
        for start, (dearest, starts) in best.items():
            cost = extra
            for end in range(start + 1, num_layers - room_after + 1):
                cost += costs[end - 1]
                candidate = (max(dearest, cost), (*starts, start))
                # Among equals the earliest cut: later stages hold fewer micro-batches' activations in 1F1B.
                if end not in extended or candidate[0] < extended[end][0]:
                    extended[end] = candidate
        best = extended
    starts = (*best[num_layers][1], num_layers)
    return [range(begin, end) for begin, end in itertools.pairwise(starts)]


def split_stages(
    model: nn.Module,
    pp_mesh: DeviceMesh,
    *,
    layers: str,
    first: Sequence[str] = (),
    last: Sequence[str] = (),
    schedule: str = "1F1B",
    stages_per_rank: int | None = None,
    layer_ranges: Sequence[range] | None = None,
) -> Stages:
    """The stages of ``model`` that this rank holds, in model order.

    A stage is a shallow copy of the model without the layers of other stages (children of the layer container keep
    their keys) and with a ``PassThrough`` in place of parts that only other stages have. With one stage in all it is
    the model itself. Names are attribute paths from the model (``"layers"``, ``"transformer.h"``).

    Args:
        model: the whole model; on the meta device nothing of it is allocated.
        pp_mesh: one-dimensional mesh of pipeline ranks.
        layers: a ModuleList or ModuleDict whose children are divided over the stages in order.
        first: parts that only the first stage has.
        last: parts that only the last stage has.
        schedule: decides which stages a rank holds (``SCHEDULES``).
        stages_per_rank: stages on each rank; by default 1 for AFAB and 1F1B and 2 for other schedules.
        layer_ranges: layers of each stage in model order, at least one a stage and each in one stage, to overrule the
            split by parameter count.

    Raises:
        LayoutError: a mesh of several axes, an unknown schedule, stages that it does not run, too few layers, ranges
            that are not those layers, a part that the model does not have, one with parameters that is placed
            nowhere, or a model that was compiled or wrapped as a whole.
    """
    check_one_axis(pp_mesh, "pp")
    per_rank = default_stages(schedule) if stages_per_rank is None else stages_per_rank
    check_stages(schedule, per_rank)
    num_stages = pp_mesh.size() * per_rank
    indices = stage_indices(schedule, pp_mesh.size(), pp_mesh.get_local_rank(), per_rank)
    if unwrapped(model) is not model:
        raise LayoutError(f"a {type(model).__name__} cannot be split: split the model first, then wrap its stages")
    _check_placed(model, layers, (*first, *last))
    costs = [_cost(layer) for layer in _children(model, layers).values()]
    if layer_ranges is not None:
        _check_ranges(layer_ranges, len(costs), num_stages)
    if num_stages == 1:
        modules = [model]
    else:
        ranges = layer_ranges or split_layers(
            costs,
            num_stages,
            first=sum(_cost(model.get_submodule(name)) for name in first),
            last=sum(_cost(model.get_submodule(name)) for name in last),
        )
        modules = []
        for index in indices:
            absent = (() if index == 0 else tuple(first)) + (() if index == num_stages - 1 else tuple(last))
            modules.append(_take(model, layers, ranges[index], absent))
    return Stages(
        modules,
        ties=find_ties(model),
        shapes={name: parameter.shape for name, parameter in named_parameters([model])},
        indices=indices,
        num_stages=num_stages,
        schedule=schedule,
        device_type=getattr(pp_mesh, "device_type", None),
    )


def _children(model: nn.Module, layers: str) -> dict[str, nn.Module]:
    """The layers by key, one that stands in several places each time."""
    return {key: child for key, child in model.get_submodule(layers)._modules.items() if child is not None}


def _check_ranges(ranges: Sequence[range], num_layers: int, num_stages: int) -> None:
    listed = [layer for held in ranges for layer in held]
    if len(ranges) != num_stages or not all(ranges) or listed != list(range(num_layers)):
        raise LayoutError(
            f"layer_ranges = {list(ranges)}: expected one range for each of {num_stages} stages, none empty, that "
            f"follow one another from layer 0 to layer {num_layers - 1}"
        )


def _cost(module: nn.Module) -> float:
    """Parameters as a measure of a part's work; an embedding's look-up and gradient move bytes only: a tenth."""
    tables = {id(p) for m in module.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    return sum(p.numel() * (0.1 if id(p) in tables else 1.0) for p in module.parameters())


def _check_placed(model: nn.Module, layers: str, ends: Sequence[str]) -> None:
    for part in (layers, *ends):
        try:
            model.get_submodule(part)
        except AttributeError:
            names = ", ".join(name for name, _ in model.named_children())
            raise LayoutError(f"the model has no part {part!r}: expected an attribute path; it has {names}") from None
    for name, _ in model.named_parameters():
        if not any(name == part or name.startswith(part + ".") for part in (layers, *ends)):
            raise LayoutError(
                f"parameter {name!r} belongs to no pipeline stage: name its module in first, last or layers "
                f"(now {', '.join((layers, *ends))})"
            )


def _take(model: nn.Module, layers: str, held: range, absent: Sequence[str]) -> nn.Module:
    stage = _shallow_copy(model)
    for name in absent:
        parent, _, attribute = name.rpartition(".")
        _copied(stage, parent)._modules[attribute] = PassThrough(name)
    kept = {key: child for i, (key, child) in enumerate(_children(model, layers).items()) if i in held}
    _copied(stage, layers)._modules = kept  # type: ignore[assignment]
    return stage


def _copied(stage: nn.Module, path: str) -> nn.Module:
    """The module at ``path``, copied with all above it, so that the original model keeps its parts."""
    for name in path.split(".") if path else ():
        child = stage._modules[name]
        assert child is not None
        copied = _shallow_copy(child)
        stage._modules[name] = copied
        stage = copied
    return stage


def _shallow_copy(module: nn.Module) -> nn.Module:
    """A module with the same parameters and children, whose own tables (children, hooks) can be changed alone.

    Raises:
        LayoutError: the module is compiled; its copy would run the original's code, layers of other stages included.
    """
    if module._compiled_call_impl is not None:
        raise LayoutError(f"{type(module).__name__} is compiled as a whole: split the model first, then compile")
    twin = copy.copy(module)
    for key, value in module.__dict__.items():
        if isinstance(value, dict):
            twin.__dict__[key] = copy.copy(value)
        elif isinstance(value, MethodType) and value.__self__ is module:  # a forward that somebody has put there
            twin.__dict__[key] = MethodType(value.__func__, twin)
    return twin
