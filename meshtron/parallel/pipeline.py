"""Pipeline parallelism: cut a model into stages, run them under torch's schedules, or forward only.

Stages are numbered along the model; each pipeline rank holds one or several. Interleaved schedules deal them out
round and round (rank, rank + pp, ...), V-shaped ones there and back (rank, 2 * pp - 1 - rank). Layers keep their
global index, so parameter names are the same at every split.
"""

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    get_schedule_class,
)

from meshtron.errors import LayoutError
from meshtron.models.spec import StageLayout

# The recipe's name of each schedule -> torch's.
SCHEDULES = {
    "AFAB": "GPipe",
    "1F1B": "1F1B",
    "Interleaved1F1B": "Interleaved1F1B",
    "LoopedBFS": "LoopedBFS",
    "InterleavedZeroBubble": "InterleavedZeroBubble",
    "ZBVZeroBubble": "ZBVZeroBubble",
    "DualPipeV": "DualPipeV",
}
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")


def stage_indices(schedule: str, pp: int, rank: int, stages_per_rank: int) -> list[int]:
    """Numbers of the stages that pipeline rank ``rank`` of ``pp`` holds, in model order."""
    if schedule in V_SHAPED:
        return [rank, 2 * pp - 1 - rank]
    return [rank + turn * pp for turn in range(stages_per_rank)]


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
    layout: StageLayout,
    *,
    schedule: str = "1F1B",
    stages_per_rank: int = 1,
    layer_ranges: Sequence[range] | None = None,
) -> list[nn.Module]:
    """The stages of ``model`` that this rank holds, in model order.

    A stage is a shallow copy of the model without the layers of other stages (children of the layer container keep
    their keys) and with ``None`` in place of parts only other stages have. With one stage in all, ``[model]``.

    Args:
        model: the whole model; on the meta device nothing of it is allocated.
        pp_mesh: one-dimensional mesh of pipeline ranks.
        layout: which parts go first and last, and where the layers are.
        schedule: decides which stages a rank holds (``SCHEDULES``).
        stages_per_rank: stages on each rank; V-shaped schedules always have 2.
        layer_ranges: layers of each stage, to overrule the split by parameter count.

    Raises:
        LayoutError: too few layers, or a part with parameters that the layout places nowhere.
    """
    num_stages = pp_mesh.size() * (2 if schedule in V_SHAPED else stages_per_rank)
    if num_stages == 1:
        return [model]
    _check_placed(model, layout)
    ranges = layer_ranges or split_layers(
        [_cost(layer) for layer in model.get_submodule(layout.layers).children()],
        num_stages,
        first=sum(_cost(part) for part in _parts(model, layout.first)),
        last=sum(_cost(part) for part in _parts(model, layout.last)),
    )
    indices = stage_indices(schedule, pp_mesh.size(), pp_mesh.get_local_rank(), stages_per_rank)
    return [_take(model, layout, ranges[index], index == 0, index == num_stages - 1) for index in indices]


def _cost(module: nn.Module) -> float:
    """Parameters as a measure of a part's work; an embedding's look-up and gradient move bytes only: a tenth."""
    tables = {id(p) for m in module.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    return sum(p.numel() * (0.1 if id(p) in tables and len(tables) else 1.0) for p in module.parameters())


def _parts(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    return [model.get_submodule(name) for name in names]


def _check_placed(model: nn.Module, layout: StageLayout) -> None:
    placed = (layout.layers, *layout.first, *layout.last)
    for name, _ in model.named_parameters():
        if not any(name == part or name.startswith(part + ".") for part in placed):
            raise LayoutError(
                f"parameter {name!r} belongs to no pipeline stage: name its module in the stage layout's first, "
                f"last or layers (now {', '.join(placed)})"
            )


def _take(model: nn.Module, layout: StageLayout, layers: range, is_first: bool, is_last: bool) -> nn.Module:
    stage = _shallow_copy(model)
    absent = (() if is_first else layout.first) + (() if is_last else layout.last)
    for name in absent:
        parent, attribute = _copied_parent(stage, name)
        parent._modules[attribute] = None
    parent, attribute = _copied_parent(stage, layout.layers)
    container = parent._modules[attribute]
    assert container is not None
    kept = _shallow_copy(container)
    kept._modules = {key: child for i, (key, child) in enumerate(container._modules.items()) if i in layers}
    parent._modules[attribute] = kept
    return stage


def _copied_parent(stage: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module above ``name``, copied on the way down so that the original model keeps its parts."""
    *path, attribute = name.split(".")
    parent = stage
    for part in path:
        child = parent._modules[part]
        assert child is not None
        parent._modules[part] = _shallow_copy(child)
        parent = parent._modules[part]  # type: ignore[assignment]
    return parent, attribute


def _shallow_copy(module: nn.Module) -> nn.Module:
    """A module with the same parameters and children, whose own tables (children, hooks) can be changed alone."""
    twin = copy.copy(module)
    twin.__dict__ = {key: copy.copy(v) if isinstance(v, dict) else v for key, v in module.__dict__.items()}
    return twin


class _Stage(PipelineStage):
    """torch's stage, with the two gaps closed that meshtron meets.

    The weight pass of zero-bubble schedules writes ``.grad`` without firing autograd's hooks, so it is reported;
    and torch 2.11 opens a connection from a rank to itself for V-shaped schedules, which gloo refuses.
    """

    after_weight_pass: Callable[[nn.Module], None] | None = None

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        super().backward_weight_one_chunk(*args, **kwargs)
        if self.after_weight_pass is not None:
            self.after_weight_pass(self.submod)

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        me = dist.get_rank(self.group)
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != me]


@dataclass(frozen=True, kw_only=True)
class Boundary:
    """What crosses from one stage to the next for one micro-batch."""

    inputs: Tensor
    """Like the first stage's input; only shape and dtype are read, so a meta tensor will do."""
    hidden: Tensor
    """Like a hidden state between stages, on this rank (1/tp of the sequence under sequence parallelism)."""


class PipelineRunner:
    """Forward and backward of one global batch over this rank's stages.

    Args:
        stages: from ``split_stages``, with tensor parallelism applied and weights in place.
        pp_mesh: one-dimensional mesh of pipeline ranks.
        schedule: a key of ``SCHEDULES``.
        num_microbatches: parts into which the local batch is cut along dim 0.
        loss_fn: ``(output, target) -> scalar`` for one micro-batch; gradients are those of the sum.
        boundary: shapes between stages; without it torch finds them out with a first extra pass.
        output: like the last stage's output; needed with ``boundary``.
        after_weight_pass: called with a stage after each weight pass of a zero-bubble schedule
            (``ZeroOptimizer.collect``).

    Raises:
        LayoutError: the schedule needs more micro-batches or another number of stages.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        pp_mesh: DeviceMesh,
        schedule: str,
        *,
        num_microbatches: int,
        loss_fn: Callable[[Tensor, Tensor], Tensor],
        boundary: Boundary | None = None,
        output: Tensor | None = None,
        after_weight_pass: Callable[[nn.Module], None] | None = None,
    ) -> None:
        self.stages = list(stages)
        self.num_microbatches = num_microbatches
        self.loss_fn = loss_fn
        self.pp_mesh = pp_mesh
        self.schedule = schedule
        pp, rank = pp_mesh.size(), pp_mesh.get_local_rank()
        self.indices = stage_indices(schedule, pp, rank, len(self.stages))
        self.num_stages = pp * len(self.stages)
        self.boundary = boundary
        self.is_first = 0 in self.indices
        self.is_last = self.num_stages - 1 in self.indices
        self.after_weight_pass = after_weight_pass
        self._schedule = None
        if self.num_stages > 1:
            check_schedule(schedule, pp, len(self.stages), num_microbatches)
            self._schedule = self._build(boundary, output)

    def reshape(self, boundary: Boundary, output: Tensor) -> None:
        """Take micro-batches of another shape from the next step on; every pipeline rank makes the call.

        Args:
            boundary, output: as when the runner was made.
        """
        self.boundary = boundary
        if self._schedule is not None:
            self._schedule = self._build(boundary, output)

    def _build(self, boundary: Boundary | None, output: Tensor | None) -> Any:
        device = torch.device(self.pp_mesh.device_type)
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        torch_stages = []
        for index, module in zip(self.indices, self.stages, strict=True):
            shapes: dict[str, Any] = {}
            if boundary is not None and output is not None:
                first, last = index == 0, index == self.num_stages - 1
                shapes = {
                    "input_args": boundary.inputs if first else _requiring_grad(boundary.hidden),
                    "output_args": _requiring_grad(output if last else boundary.hidden),
                }
            stage = _Stage(module, index, self.num_stages, device, group=self.pp_mesh.get_group(), **shapes)
            stage.after_weight_pass = self.after_weight_pass
            torch_stages.append(stage)
        schedule_class = get_schedule_class(SCHEDULES[self.schedule])
        single = issubclass(schedule_class, PipelineScheduleSingle)
        return schedule_class(
            torch_stages[0] if single else torch_stages,
            n_microbatches=self.num_microbatches,
            loss_fn=self.loss_fn,
            scale_grads=False,  # the loss is already divided by the global number of tokens
        )

    def step(self, inputs: Tensor, targets: Tensor, **kwargs: Tensor) -> Tensor:
        """Run forward and backward of the local batch; gradients are left to the parameters' hooks.

        Args:
            inputs: (num_microbatches * micro-batch, ...), the same on every pipeline rank.
            targets: likewise, for ``loss_fn``.
            kwargs: per-sample tensors that every stage's forward is given.

        Returns:
            Scalar: the sum of micro-batch losses on ranks that hold the last stage, zero on others.
        """
        if self._schedule is None:
            return self._accumulate(inputs, targets, kwargs)
        losses: list[Tensor] = []
        self._schedule.step(
            *((inputs,) if self.is_first else ()),
            target=targets if self.is_last else None,
            losses=losses if self.is_last else None,
            return_outputs=False,
            **kwargs,
        )
        return (
            torch.stack([loss.detach() for loss in losses]).sum()
            if losses
            else inputs.new_zeros((), dtype=torch.float32)
        )

    def _accumulate(self, inputs: Tensor, targets: Tensor, kwargs: dict[str, Tensor]) -> Tensor:
        """One stage in all: a plain loop over micro-batches."""
        model = self.stages[0]
        chunks = {key: value.chunk(self.num_microbatches) for key, value in kwargs.items()}
        losses = []
        for index, (part, target) in enumerate(
            zip(inputs.chunk(self.num_microbatches), targets.chunk(self.num_microbatches), strict=True)
        ):
            loss = self.loss_fn(model(part, **{key: value[index] for key, value in chunks.items()}), target)
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    @torch.no_grad()
    def forward(self, inputs: Tensor, hidden: Tensor | None = None, **kwargs: Any) -> Tensor | None:
        """Forward only, one micro-batch: activations pass from stage to stage by send and receive.

        Args:
            inputs: the first stage's input, the same on every pipeline rank.
            hidden: like what crosses between stages for these inputs; by default ``boundary.hidden``.
            kwargs: given to every stage's forward.

        Returns:
            The last stage's output on ranks that hold it, None on others.
        """
        hidden = hidden if hidden is not None or self.boundary is None else self.boundary.hidden
        return forward_stages(self.stages, self.pp_mesh, self.schedule, inputs, hidden, **kwargs)


def forward_stages(
    stages: Sequence[nn.Module],
    pp_mesh: DeviceMesh,
    schedule: str,
    inputs: Tensor,
    hidden: Tensor | None,
    **kwargs: Any,
) -> Tensor | None:
    """Send one micro-batch through all stages; the last stage's output where it is held, None elsewhere.

    A rank returns as soon as its part is done, so micro-batches called one after another overlap over the ranks.

    Args:
        stages: this rank's stages.
        pp_mesh: one-dimensional mesh of pipeline ranks.
        schedule: the one by which ``split_stages`` dealt the stages.
        inputs: the first stage's input.
        hidden: like what crosses between stages; only shape and dtype are read.
        kwargs: given to every stage's forward.
    """
    pp, group = pp_mesh.size(), pp_mesh.get_group()
    dealt = [stage_indices(schedule, pp, rank, len(stages)) for rank in range(pp)]
    owner = {index: dist.get_global_rank(group, rank) for rank in range(pp) for index in dealt[rank]}
    output: Tensor | None = None
    for index, stage in zip(dealt[pp_mesh.get_local_rank()], stages, strict=True):
        x = inputs if index == 0 else output
        if x is None:
            assert hidden is not None
            x = torch.empty(hidden.shape, dtype=hidden.dtype, device=inputs.device)
            dist.recv(x, owner[index - 1], group=group)
        output = stage(x, **kwargs)
        if index + 1 < len(owner) and owner[index + 1] != dist.get_rank():
            dist.send(output.contiguous(), owner[index + 1], group=group)
            output = None
    return output


def check_schedule(schedule: str, pp: int, stages_per_rank: int, num_microbatches: int) -> None:
    """Refuse what a schedule cannot run.

    Raises:
        LayoutError: unknown schedule, wrong number of stages a rank, or too few micro-batches.
    """
    if schedule not in SCHEDULES:
        raise LayoutError(f"schedule {schedule!r}: expected one of {', '.join(SCHEDULES)}")
    single = schedule in ("AFAB", "1F1B")
    if single and stages_per_rank != 1:
        raise LayoutError(f"schedule {schedule} runs one stage a rank, found stages_per_rank = {stages_per_rank}")
    if not single and stages_per_rank < 2:
        raise LayoutError(f"schedule {schedule} needs at least 2 stages a rank, found {stages_per_rank}")
    if schedule in V_SHAPED and stages_per_rank != 2:
        raise LayoutError(f"schedule {schedule} runs 2 stages a rank, found {stages_per_rank}")
    needed = {"1F1B": pp, "DualPipeV": 2 * pp}.get(schedule, 1)
    if num_microbatches < needed:
        raise LayoutError(
            f"schedule {schedule} with pp = {pp} needs at least {needed} micro-batches a step, found "
            f"{num_microbatches}: raise global_batch_size or lower micro_batch_size"
        )


def _requiring_grad(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device="meta", requires_grad=like.dtype.is_floating_point)
