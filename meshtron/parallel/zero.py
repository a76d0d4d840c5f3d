"""ZeRO-1: parameters replicated over dp, optimizer state sharded over it (Rajbhandari et al., 2020).

Every parameter is cut by rows (dim 0 of its tensor parallel shard) into one piece a dp rank, as DTensor's
``Shard(0)`` would. A rank keeps the fp32 master and the optimizer state of its piece only.

    backward        gradients are added up and reduced over dp (gradients.py)
    step            the inner optimizer updates this rank's pieces; parameters are all-gathered over dp

With one dp rank the accumulator is the reduced gradient itself and nothing is communicated or copied; if besides a
step is a single backward pass, ``FusedAdamW`` is given the gradients as autograd made them and there is no
accumulator at all.

State is exposed as DTensors under parameter names (tp placement first, then ``Shard(0)`` over dp), so
torch.distributed.checkpoint loads it at any other layout without code of ours.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshtron.kernels.adamw import FusedAdamW
from meshtron.parallel.axis import check_axes, named_axes
from meshtron.parallel.buckets import Piece, cut_pieces, fill_buckets, write_parameters
from meshtron.parallel.clip import owned_norm
from meshtron.parallel.gradients import Gradients
from meshtron.parallel.names import named_parameters
from meshtron.parallel.stages import Stages, as_stages
from meshtron.parallel.state import StateLayout, check_elementwise, make_state
from meshtron.parallel.tied import retie

_BUCKET_BYTES = 64 << 20
_MASTER = "master."


class ZeroOptimizer:
    """Run an element-wise ``torch.optim`` class on fp32 shards of parameters that are replicated over dp.

    ZeRO, stage 1 (Rajbhandari et al., 2020). Gradients are sums over micro-batches and dp ranks: the loss is divided
    by what belongs to the global batch.

    Args:
        stages: this rank's modules (``split_stages``, a list, or one module), tensor parallelism already applied and
            parameters in their final memory.
        mesh: a mesh that has axis ``dp`` and, where used, ``tp`` and ``pp``, or other names given in ``axes``; it may
            have more axes.
        optimizer: an element-wise optimizer class; it is given fp32 tensors and ``defaults``. The optimizer that is
            made of it is ``inner``, for instance for torch's learning-rate schedulers.
        group_of: hyper-parameters of a parameter by global name and shape before sharding, to override
            ``defaults``; parameters with equal ones form a group.
        num_microbatches: backward passes in a step. Gradients are reduced as soon as that many have been; by default
            that is what ``pipeline_schedule`` was given for the same ``Stages``, and where that is not known either
            they are reduced when the step is taken.
        shard: False keeps the whole state on every dp rank (ZeRO 0) and all-reduces gradients; the numbers are
            the same.
        overlap: whether gradients are reduced while backward goes on; False waits for each bucket, for measurements.
        grad_dtype: of accumulators, masters and state.
        bucket_bytes: gradients of a bucket before it is closed.
        axes: names of the (pp, dp, tp) axes in ``mesh``; those the mesh lacks count as one rank.
        defaults: the optimizer's keyword arguments, for instance ``lr=3e-4``.

    Raises:
        LayoutError: an axis of ``mesh`` has another name than ``axes`` says; a parameter is a DTensor over something
            else than the tp axis (as ``fully_shard`` makes it: then use torch's optimizers and ``clip_grad_norm``); a
            tied parameter is held by more than two pipeline ranks.
        MeshtronError: a parameter is on the meta device, or is not contiguous; the optimizer is known not to be
            element-wise.
    """

    def __init__(
        self,
        stages: Stages | nn.Module | Iterable[nn.Module],
        mesh: DeviceMesh,
        *,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
        group_of: Callable[[str, torch.Size], dict[str, Any]] | None = None,
        num_microbatches: int | None = None,
        shard: bool = True,
        overlap: bool = True,
        grad_dtype: torch.dtype = torch.float32,
        bucket_bytes: int = _BUCKET_BYTES,
        axes: tuple[str, str, str] = ("pp", "dp", "tp"),
        **defaults: Any,
    ) -> None:
        self.mesh = mesh
        self.stages = as_stages(stages)
        self.grad_dtype = grad_dtype
        self._num_microbatches = num_microbatches
        self._pp, self._dp, self._tp = named_axes(mesh, axes, needed=axes[1:2])
        self.stages.check_pipeline(self._pp.name, self._pp.size)
        for name, parameter in named_parameters(self.stages):
            check_axes(name, parameter, [self._tp])
        self._shards = self._dp.size if shard else 1
        self._layout = StateLayout(mesh, self._dp, self._tp, self._shards)
        retie(self.stages, self.stages.ties)
        self._pieces = cut_pieces(
            self.stages, shards=self._shards, shard=self._dp.rank if self._shards > 1 else 0, dtype=grad_dtype
        )
        self.inner = optimizer(self._groups(group_of), **defaults)
        check_elementwise(self.inner)
        self._fused = self.inner if isinstance(self.inner, FusedAdamW) else None
        hands_over = self._fused is not None and self._dp.size == 1 and num_microbatches == 1
        if self._fused is not None:
            self._prepare(self._fused)
        self._buckets = fill_buckets(
            self._pieces,
            shards=self._shards,
            dtype=grad_dtype,
            bucket_bytes=bucket_bytes,
            accumulate=not hands_over,
        )
        self._gradients = Gradients(
            self._buckets,
            self._pp,
            self._dp,
            self._tp,
            shards=self._shards,
            ties=self.stages.ties,
            dtype=grad_dtype,
            num_microbatches=lambda: self.num_microbatches,
            overlap=overlap,
        )
        self.stages.after_weight_pass.append(self.collect)

    @property
    def num_microbatches(self) -> int | None:
        """Backward passes in a step, or None where nobody has said."""
        return self._num_microbatches or self.stages.num_microbatches

    def _prepare(self, inner: FusedAdamW) -> None:
        """Let gradients keep their own dtype, and parameters be written in the pass that updates their masters."""
        for piece in self._pieces:
            piece.master.grad_dtype = None
        if self._shards == 1:
            own = {piece.master: piece.local.view(piece.master.shape) for piece in self._pieces}
            inner.write_copies({master: view for master, view in own.items() if view.dtype != master.dtype})

    def _groups(self, group_of: Callable[[str, torch.Size], dict[str, Any]] | None) -> list[dict[str, Any]]:
        groups: dict[str, dict[str, Any]] = {}
        for piece in self._pieces:
            options = group_of(piece.name, piece.parameter.shape) if group_of else {}
            group = groups.setdefault(repr(sorted(options.items())), {**options, "params": [], "names": []})
            group["params"].append(piece.master)
            group["names"].append(piece.name)
        # A rank whose stage is frozen has no group, but takes part in what all ranks do.
        return list(groups.values()) or [{"params": [], "names": []}]

    # -- gradients ---------------------------------------------------------------------------------------------

    def collect(self, module: nn.Module) -> None:
        """Take the gradients that lie in ``.grad`` of ``module``'s parameters.

        For code that writes ``.grad`` itself, past autograd's hooks, as the weight pass of zero-bubble schedules.
        """
        self._gradients.collect(module)

    def gradient_sink(self, parameter: Tensor) -> Callable[[], AbstractContextManager[tuple[Tensor, bool]]] | None:
        """A way for code that computes ``parameter``'s gradient itself to add it where it is summed.

        The function returned opens a context with the accumulator, of the local shard's shape and in the gradient
        dtype, and whether it is to be overwritten instead of added to. It stands for one gradient of autograd's.
        None where the parameter is frozen, or the accumulator is not one block of memory in the parameter's order.
        """
        return self._gradients.sink(parameter)

    def reduce_gradients(self) -> None:
        """Finish the gradients of a step: sums over dp, over tp where partial, and over the copies of tied ones.

        Called by ``step`` and ``clip_grad_norm`` if it has not been. Afterwards each master's ``.grad`` is set.
        """
        self._gradients.reduce()

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float | None, norm_type: float = 2.0) -> Tensor:
        """Norm of the whole model's gradient, each element counted once; scale gradients down to ``max_norm``.

        Args:
            max_norm: None only measures.
            norm_type: 2.0, or ``inf`` for the largest absolute value; a MeshtronError for others.

        Returns:
            Scalar tensor with the norm before scaling, equal on all ranks of the mesh.
        """
        self.reduce_gradients()
        counted = [piece.gradient for piece in self._pieces if self._counts(piece) and piece.master.numel()]
        device = self._pieces[0].local.device if self._pieces else self.mesh.device_type
        norm = owned_norm(counted, [self._pp, self._dp, self._tp], norm_type, device)
        if max_norm is not None:
            # The same guard as torch.nn.utils.clip_grad_norm_, so that a reference run agrees to the last digit.
            scale = (max_norm / (norm + 1e-6)).clamp(max=1.0).to(self.grad_dtype)
            if self._fused is not None:
                self._fused.gradient_factor = scale
            elif self._pieces:
                torch._foreach_mul_([piece.gradient for piece in self._pieces], scale)
        return norm

    def _counts(self, piece: Piece) -> bool:
        """Whether this rank's rows of ``piece`` are the ones that a sum over all ranks takes."""
        if piece.is_copy:
            return False
        sharded_over_tp = isinstance(piece.parameter, DTensor) and piece.parameter.placements[0].is_shard()
        sharded_over_dp = self._shards > 1
        return (sharded_over_tp or self._tp.rank == 0) and (sharded_over_dp or self._dp.rank == 0)

    # -- step --------------------------------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's groups, to set learning rates; each also has the ``names`` of its parameters."""
        return self.inner.param_groups

    @torch.no_grad()
    def step(self, only_if: Tensor | None = None) -> None:
        """Update this rank's shards and bring every dp rank's parameters up to date.

        Args:
            only_if: boolean scalar, the same on every rank; where it is false the step is skipped. With
                ``FusedAdamW`` on a CUDA device nothing waits for it to be known.
        """
        if only_if is not None and self._fused is not None:
            self._fused.only_if = only_if
        elif only_if is not None and not only_if:
            self.skip_step()
            return
        self.reduce_gradients()
        self.inner.step()
        if self._fused is None or self._shards > 1:  # else parameters were written with their masters
            self.publish()
        self._gradients.begin_step()

    def skip_step(self) -> None:
        """Drop the gradients of this step and leave weights and state as they are."""
        self.reduce_gradients()
        if self._fused is not None:
            self._fused.gradient_factor = None
        self._gradients.begin_step()

    @torch.no_grad()
    def publish(self) -> None:
        """Write masters into parameters: a cast, and an all-gather over dp where state is sharded."""
        write_parameters(self._buckets, shards=self._shards, group=self._dp.group)

    # -- state -------------------------------------------------------------------------------------------------

    def masters(self) -> dict[str, Tensor]:
        """fp32 weights by parameter name: DTensors where sharded. They share memory with the optimizer.

        After writing into them call ``publish``.
        """
        return {piece.name: self._layout.whole(piece, piece.master) for piece in self._pieces}

    def gradients(self) -> dict[str, Tensor]:
        """Reduced gradients of this step by parameter name, laid out like ``masters``; gone after ``step``.

        After ``clip_grad_norm`` they are the clipped ones.
        """
        self.reduce_gradients()
        factor = self._fused.gradient_factor if self._fused is not None else None  # applied by its step only
        return {
            piece.name: self._layout.whole(piece, piece.gradient if factor is None else piece.gradient * factor)
            for piece in self._pieces
        }

    def moments(self) -> dict[str, Tensor]:
        """The inner optimizer's state as ``"<state>.<parameter name>"``, sharing memory with it.

        State of a parameter's shape is a DTensor where sharded; scalars (a step count) are plain tensors. State
        that the inner optimizer has not made yet is made, as zeros.
        """
        if self._fused is not None:
            self._fused.make_state()
        else:
            make_state(self.inner, [piece.master for piece in self._pieces])
        state = {}
        for piece in self._pieces:
            for key, value in self.inner.state[piece.master].items():
                if isinstance(value, Tensor):
                    alike = value.shape == piece.master.shape and value.dim() > 0
                    state[f"{key}.{piece.name}"] = self._layout.whole(piece, value) if alike else value
        return state

    def state_dict(self) -> dict[str, Tensor]:
        """All that a resume needs: ``moments``, and the weights of ``masters`` as ``"master.<parameter name>"``."""
        return {_MASTER + name: tensor for name, tensor in self.masters().items()} | self.moments()

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take up what ``state_dict`` gave at this layout, and write masters into parameters.

        ``meshtron.load`` fills the tensors of ``state_dict`` in place, at any layout, before it calls this.
        """
        for name, tensor in self.state_dict().items():
            if tensor is not state[name]:
                tensor.copy_(state[name])
        self.publish()
