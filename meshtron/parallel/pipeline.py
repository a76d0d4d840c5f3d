"""Run a model's pipeline stages: under torch's schedules forward and backward, or forward only."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    get_schedule_class,
)

from meshtron.errors import LayoutError
from meshtron.parallel.axis import check_one_axis, named_axes
from meshtron.parallel.boundaries import Boundary, find_boundaries, under_fully_shard
from meshtron.parallel.pipeline_stage import ScheduledStage
from meshtron.parallel.schedules import SCHEDULES, ZERO_BUBBLE, check_schedule, stage_indices
from meshtron.parallel.stages import Stages, as_stages

LossFunction = Callable[[Any, Any], Tensor]
"""``(last stage's output, target) -> scalar`` of one micro-batch."""


def pipeline_schedule(
    stages: Stages | nn.Module | Iterable[nn.Module],
    pp_mesh: DeviceMesh,
    schedule: str = "1F1B",
    *,
    num_microbatches: int,
    loss_fn: LossFunction,
    boundary: Boundary | None = None,
    split_backward: bool = True,
) -> "PipelineRunner":
    """A runner of this rank's stages under a pipeline schedule; with one stage in all, a loop over micro-batches.

    Gradients are those of the sum of all micro-batch losses: divide in ``loss_fn`` by what belongs to the global
    batch (its number of valid tokens, say), and neither micro-batches nor dp change them. Where two pipeline ranks
    hold copies of a tied parameter, each gets its part of the gradient; only ``ZeroOptimizer`` adds them up.

    Args:
        stages: from ``split_stages``, with tensor parallelism applied and weights in place. A plain list is this
            rank's share of ``pp * len(list)`` stages.
        pp_mesh: one-dimensional mesh of pipeline ranks.
        schedule: ``"AFAB"``, ``"1F1B"``, ``"Interleaved1F1B"``, ``"LoopedBFS"``, ``"InterleavedZeroBubble"``,
            ``"ZBVZeroBubble"`` or ``"DualPipeV"``.
        num_microbatches: parts into which the local batch is cut along dim 0.
        loss_fn: ``(output, target) -> scalar`` for one micro-batch.
        boundary: shapes at the borders of stages; by default they are found when the first batch comes, by running
            each stage once without computing anything.
        split_backward: whether zero-bubble schedules may compute gradients of weights in a pass of their own. False
            for stages whose layers are recomputed or compiled, where that pass would compute all over again, or are
            under ``fully_shard``.

    Raises:
        LayoutError: an unknown schedule, one that needs another number of micro-batches or other stages than there
            are, one that does not go with ``fully_shard``, or a mesh of several axes.
    """
    return PipelineRunner(
        stages,
        pp_mesh,
        schedule,
        num_microbatches=num_microbatches,
        loss_fn=loss_fn,
        boundary=boundary,
        split_backward=split_backward,
    )


class PipelineRunner:
    """Forward and backward of one global batch over this rank's stages; arguments as in ``pipeline_schedule``."""

    def __init__(
        self,
        stages: Stages | nn.Module | Iterable[nn.Module],
        pp_mesh: DeviceMesh,
        schedule: str,
        *,
        num_microbatches: int,
        loss_fn: LossFunction,
        boundary: Boundary | None = None,
        split_backward: bool = True,
    ) -> None:
        self.stages = as_stages(stages)
        self.num_microbatches = num_microbatches
        self.loss_fn = loss_fn
        self.split_backward = split_backward
        self.pp_mesh = pp_mesh
        self.schedule = schedule
        check_one_axis(pp_mesh, "pp")
        pp, rank = pp_mesh.size(), pp_mesh.get_local_rank()
        self.indices = stage_indices(schedule, pp, rank, len(self.stages))
        self.num_stages = pp * len(self.stages)
        self.is_first = 0 in self.indices
        self.is_last = self.num_stages - 1 in self.indices
        self.stages.num_microbatches = num_microbatches
        if num_microbatches < 1:
            raise LayoutError(f"num_microbatches = {num_microbatches}: expected at least 1")
        if self.num_stages > 1:
            check_schedule(schedule, pp, len(self.stages), num_microbatches)
        if split_backward and schedule in ZERO_BUBBLE and any(under_fully_shard(stage) for stage in self.stages):
            raise LayoutError(
                f"schedule {schedule} computes gradients of weights where fully_shard does not see them: set "
                "split_backward=False, or take another schedule or ZeroOptimizer"
            )
        if isinstance(stages, Stages) and self.indices != stages.indices:
            raise LayoutError(
                f"schedule {schedule} runs stages {self.indices} on this rank, which holds {stages.indices}: give "
                f"split_stages the same schedule (now {stages.schedule})"
            )
        # Like what enters each stage, and what leaves the last one, by shape of the first stage's input.
        self._boundaries: dict[Any, list[Tensor]] = {}
        if boundary is not None:
            between = [boundary.hidden] * (self.num_stages - 1)
            borders = [boundary.inputs, *between, boundary.output]
            self._boundaries[_key(boundary.inputs)] = [
                torch.empty(like.shape, dtype=like.dtype, device="meta") for like in borders
            ]
        self._schedule: Any = None
        self._shape: Any = None  # of the micro-batches that the schedule is built for

    def _borders(self, inputs: Tensor, kwargs: Mapping[str, Any]) -> list[Tensor]:
        """Like what crosses each border for a micro-batch like ``inputs``, found out where it is not known."""
        if _key(inputs) not in self._boundaries:
            self._boundaries[_key(inputs)] = find_boundaries(
                self.stages, self.indices, self.num_stages, self.pp_mesh, inputs, kwargs
            )
        return self._boundaries[_key(inputs)]

    def _build(self, borders: list[Tensor]) -> Any:
        device = torch.device(self.pp_mesh.device_type)
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        torch_stages = []
        for index, module in zip(self.indices, self.stages, strict=True):
            stage = ScheduledStage(
                module,
                index,
                self.num_stages,
                device,
                input_args=borders[0] if index == 0 else _requiring_grad(borders[index]),
                output_args=_requiring_grad(borders[index + 1]),
                group=self.pp_mesh.get_group(),
            )
            stage.after_weight_pass = self.stages.after_weight_pass
            stage.split_backward = self.split_backward
            torch_stages.append(stage)
        schedule_class = get_schedule_class(SCHEDULES[self.schedule])
        single = issubclass(schedule_class, PipelineScheduleSingle)
        return schedule_class(
            torch_stages[0] if single else torch_stages,
            n_microbatches=self.num_microbatches,
            loss_fn=lambda output, target: self.loss_fn(output, target),
            scale_grads=False,  # the loss is already divided by what belongs to the global batch
        )

    def step(self, inputs: Tensor, targets: Tensor, **kwargs: Tensor) -> Tensor:
        """Run forward and backward of the local batch; gradients are left to the parameters' hooks, or in ``.grad``.

        Args:
            inputs: (num_microbatches * micro-batch, ...), the same on every pipeline rank.
            targets: as many samples, for ``loss_fn``.
            kwargs: tensors of as many samples that every stage's forward is given.

        Returns:
            Scalar: the sum of micro-batch losses on ranks that hold the last stage, zero on others
            (``total_loss`` adds them up).

        Raises:
            LayoutError: the batch cannot be cut into that many equal micro-batches, its parts have different numbers
                of samples, or the shapes between stages cannot be found out.
        """
        for name, value in {"targets": targets, **kwargs}.items():
            if not isinstance(value, Tensor) or not value.dim() or len(value) != len(inputs):
                found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                raise LayoutError(
                    f"step: {name} is {found}, expected a tensor of {len(inputs)} samples, as each micro-batch is "
                    "given its own: what all samples share belongs into the model"
                )
        if len(inputs) % self.num_microbatches:
            raise LayoutError(
                f"a local batch of {len(inputs)} samples cannot be cut into {self.num_microbatches} equal "
                "micro-batches: change the batch or num_microbatches"
            )
        if self.num_stages == 1:
            return self._accumulate(inputs, targets, kwargs)
        microbatch = inputs.chunk(self.num_microbatches)[0]
        if self._shape != _key(microbatch):
            parts = {key: value.chunk(self.num_microbatches)[0] for key, value in kwargs.items()}
            self._schedule = self._build(self._borders(microbatch, parts))
            self._shape = _key(microbatch)
        losses: list[Tensor] = []
        self._schedule.step(
            *((inputs.contiguous(),) if self.is_first else ()),  # torch 2.11 compares strides with those it expects
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
    def forward(self, inputs: Tensor, **kwargs: Any) -> Tensor | None:
        """Forward only, one micro-batch: activations pass from stage to stage by send and receive.

        Args:
            inputs: the first stage's input, the same on every pipeline rank.
            kwargs: given to every stage's forward.

        Returns:
            The last stage's output on ranks that hold it, None on others.

        Raises:
            LayoutError: the shapes between stages cannot be found out.
        """
        borders = self._borders(inputs, kwargs) if self.num_stages > 1 else [inputs, inputs]
        return forward_stages(self.stages, self.pp_mesh, self.schedule, inputs, borders[1:-1], **kwargs)


def forward_stages(
    stages: Iterable[nn.Module],
    pp_mesh: DeviceMesh,
    schedule: str,
    inputs: Tensor,
    hidden: Tensor | list[Tensor],
    **kwargs: Any,
) -> Tensor | None:
    """Send one micro-batch through all stages; the last stage's output where it is held, None elsewhere.

    A rank returns as soon as its part is done, so micro-batches called one after another overlap over the ranks.

    Args:
        stages: this rank's stages.
        pp_mesh: one-dimensional mesh of pipeline ranks.
        schedule: the one by which ``split_stages`` dealt the stages.
        inputs: the first stage's input.
        hidden: like what crosses between stages, one for all borders or one for each; only shape and dtype are read.
        kwargs: given to every stage's forward.
    """
    held = list(stages)
    pp, group = pp_mesh.size(), pp_mesh.get_group()
    dealt = [stage_indices(schedule, pp, rank, len(held)) for rank in range(pp)]
    owner = {index: dist.get_global_rank(group, rank) for rank in range(pp) for index in dealt[rank]}
    output: Tensor | None = None
    for index, stage in zip(dealt[pp_mesh.get_local_rank()], held, strict=True):
        x = inputs if index == 0 else output
        if x is None:
            like = hidden if isinstance(hidden, Tensor) else hidden[index - 1]
            x = torch.empty(like.shape, dtype=like.dtype, device=inputs.device)
            dist.recv(x, owner[index - 1], group=group)
        output = stage(x, **kwargs)
        if index + 1 < len(owner) and owner[index + 1] != dist.get_rank():
            dist.send(output.contiguous(), owner[index + 1], group=group)
            output = None
    return output


def total_loss(loss: Tensor, mesh: DeviceMesh, *, axes: tuple[str, str] = ("pp", "dp")) -> Tensor:
    """Sum of what ``PipelineRunner.step`` returned on each rank, in float64, the same on all of them.

    Args:
        loss: scalar; this dp rank's share of the loss on the last stage, zero on others; equal over tp.
        mesh: the whole mesh.
        axes: names of its pipeline and data parallel axes; one that it lacks counts as one rank.

    Raises:
        LayoutError: the mesh has neither of the two.
    """
    total = loss.detach().double()
    for axis in named_axes(mesh, axes, needed=axes):
        if axis.size > 1:
            dist.all_reduce(total, group=axis.group)
    return total


def _key(inputs: Tensor) -> tuple[torch.Size, torch.dtype]:
    return inputs.shape, inputs.dtype


def _requiring_grad(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device="meta", requires_grad=like.dtype.is_floating_point)
