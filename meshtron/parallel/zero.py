"""ZeRO-1: parameters replicated over dp, optimizer state sharded over it (Rajbhandari et al., 2020).

Every parameter is cut by rows (dim 0 of its tensor parallel shard) into one piece a dp rank, as DTensor's
``Shard(0)`` would. A rank keeps the fp32 master and the optimizer state of its piece only.

    backward        each gradient is added into an fp32 accumulator as soon as autograd has it, and dropped
    last backward   a bucket whose gradients are complete is reduce-scattered over dp while backward goes on
    step            the inner optimizer updates this rank's pieces; parameters are all-gathered over dp

The accumulator of a bucket is laid out (dp, pieces of one rank), so that row ``r`` is what rank ``r`` receives:
adding a gradient is a strided add, and nothing is packed before the reduce-scatter. With one dp rank the
accumulator is the reduced gradient itself and nothing is communicated or copied; if besides a step is a single
backward pass, ``FusedAdamW`` is given the gradients as autograd made them and there is no accumulator at all.

State is exposed as DTensors under parameter names (tp placement first, then ``Shard(0)`` over dp), so
torch.distributed.checkpoint loads it at any other layout without code of ours.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from meshtron.errors import LayoutError
from meshtron.hostcopy import HostCopy
from meshtron.kernels.adamw import FusedAdamW, add_into, sum_of_squares
from meshtron.parallel.placement import contiguous_stride, local_part, shard_range

_BUCKET_BYTES = 64 << 20

# torch 2.13 renamed both; the older names go on there with a warning.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(eq=False)
class _Piece:
    """One parameter, and the rows of its local tensor whose optimizer state this rank keeps."""

    name: str
    """Global name; a tied copy goes by its first name."""
    parameter: Any
    """The parameter, a DTensor where it is sharded over tp."""
    local: Tensor
    """This rank's tensor parallel shard as (rows, row elements), sharing the parameter's memory."""
    rows_per_rank: int
    rows: range
    is_copy: bool
    """Whether another pipeline stage holds the same parameter under its first name."""
    backwards: int
    """Gradients that one micro-batch brings: 2 where two stages of this rank share the parameter."""
    master: Tensor = field(init=False)
    """The rows this rank updates, in the gradient dtype; the optimizer's parameter."""
    offset: int = 0
    """Where the piece starts in a row of its bucket."""
    seen: int = 0
    partial: bool = False
    """Whether gradients arrive as partial sums over tp (weights of sequence parallel norms)."""

    @property
    def gradient(self) -> Tensor:
        """The reduced gradient of this rank's rows; there once a step's gradients are reduced."""
        assert self.master.grad is not None
        return self.master.grad

    @property
    def row_elements(self) -> int:
        return self.local.shape[1]

    @property
    def elements(self) -> int:
        """Size in a bucket row, padding of a short last piece included."""
        return self.rows_per_rank * self.row_elements

    def parts(self, bucket_rows: Tensor) -> list[tuple[Tensor, slice]]:
        """Views of a (ranks, elements) buffer and the rows of ``local`` that each stands for."""
        whole, rest = divmod(len(self.local), self.rows_per_rank) if self.rows_per_rank else (0, 0)
        parts = []
        if whole:
            view = bucket_rows[:whole, self.offset : self.offset + self.elements]
            parts.append((view, slice(0, whole * self.rows_per_rank)))
        if rest:
            view = bucket_rows[whole : whole + 1, self.offset : self.offset + rest * self.row_elements]
            parts.append((view, slice(whole * self.rows_per_rank, len(self.local))))
        return parts

    def own(self, bucket_row: Tensor) -> Tensor:
        """The rows this rank keeps, out of one row of the bucket, in the master's shape."""
        size = len(self.rows) * self.row_elements
        return bucket_row[self.offset : self.offset + size].view(self.master.shape)


@dataclass(eq=False)
class _Bucket:
    """Pieces whose gradients are reduced, and whose parameters are gathered, in one collective."""

    pieces: list[_Piece]
    elements: int
    accumulator: Tensor | None
    """(dp, elements): gradients of all rows, summed over micro-batches. None where the optimizer takes gradients as
    autograd made them."""
    reduced: Tensor | None
    """(elements,): gradients of this rank's rows, summed over dp."""
    pending: int = 0
    """Gradients still to come in this step."""
    work: dist.Work | None = None
    launched: bool = False


class ZeroOptimizer:
    """Run an element-wise ``torch.optim`` class on fp32 shards of parameters that are replicated over dp.

    Args:
        stages: this rank's modules, tensor parallelism already applied and parameters in their final memory.
        mesh: a mesh that has axis ``dp_axis`` and, where used, ``tp_axis`` and ``pp_axis``; more axes may be there.
        optimizer: an element-wise optimizer class; it is given fp32 tensors and ``defaults``.
        group_of: hyper-parameters of a parameter by global name and shape before sharding, to override
            ``defaults``; parameters with equal ones form a group.
        num_microbatches: backward passes in a step. Buckets are reduced as soon as that many have been.
        shard: False keeps the whole state on every dp rank (ZeRO 0) and all-reduces gradients; the numbers are
            the same.
        grad_dtype: of accumulators, masters and state.
        ties: later name -> first name of shared parameters (``find_ties`` of the whole model).
        bucket_bytes: gradients of a bucket before it is closed.
        axes: names of the (pp, dp, tp) axes in ``mesh``; those the mesh lacks count as one rank.
        defaults: the optimizer's keyword arguments, for instance ``lr=3e-4``.

    Raises:
        LayoutError: a tied parameter is held by more than two pipeline ranks.
    """

    def __init__(
        self,
        stages: Iterable[nn.Module],
        mesh: DeviceMesh,
        *,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
        group_of: Callable[[str, torch.Size], dict[str, Any]] | None = None,
        num_microbatches: int = 1,
        shard: bool = True,
        grad_dtype: torch.dtype = torch.float32,
        ties: Mapping[str, str] | None = None,
        bucket_bytes: int = _BUCKET_BYTES,
        axes: tuple[str, str, str] = ("pp", "dp", "tp"),
        **defaults: Any,
    ) -> None:
        self.mesh = mesh
        self.num_microbatches = num_microbatches
        self.grad_dtype = grad_dtype
        self._pp, self._dp, self._tp = (_Axis.of(mesh, name) for name in axes)
        self._shards = self._dp.size if shard else 1
        self._state_mesh = self._shard_mesh()
        self._pieces = self._cut(list(stages), ties or {})
        self._peers = self._find_peers(ties or {})
        self.inner = optimizer(self._groups(group_of), **defaults)
        self._fused = self.inner if isinstance(self.inner, FusedAdamW) else None
        self._on_cuda = any(piece.master.is_cuda and piece.master.dtype == torch.float32 for piece in self._pieces)
        self._undecided: HostCopy | None = None
        self._hands_over = self._fused is not None and self._dp.size == 1 and num_microbatches == 1
        if self._fused is not None:
            self._prepare(self._fused)
        self._buckets = self._fill_buckets(bucket_bytes)
        self._home = {id(piece.parameter): (piece, bucket) for bucket in self._buckets for piece in bucket.pieces}
        self._next_bucket = 0
        self._reduced = False
        # Weak, as Python's collector cannot see the cycle parameter -> hook -> optimizer -> parameter.
        accumulate = WeakMethod(self._accumulate)
        for piece in self._pieces:
            piece.parameter.register_post_accumulate_grad_hook(partial(_call_if_alive, accumulate))
        self._begin_step()

    # -- construction ------------------------------------------------------------------------------------------

    def _cut(self, stages: list[nn.Module], ties: Mapping[str, str]) -> list[_Piece]:
        """A piece for every trainable parameter, in module order."""
        held: dict[int, tuple[str, nn.Parameter]] = {}
        uses: dict[int, int] = {}
        for stage in stages:
            for name, parameter in stage.named_parameters():
                if parameter.requires_grad:
                    held.setdefault(id(parameter), (name, parameter))
                    uses[id(parameter)] = uses.get(id(parameter), 0) + 1
        pieces = []
        for key, (name, parameter) in held.items():
            own = local_part(parameter).detach()
            own = own if own.dim() else own.view(1)  # a scalar is one row, so one dp rank keeps its state
            local = own.view(len(own), math.prod(own.shape[1:]))
            piece = _Piece(
                name=ties.get(name, name),
                parameter=parameter,
                local=local,
                rows_per_rank=-(-len(local) // self._shards),
                rows=shard_range(len(local), self._shards, self._dp.rank if self._shards > 1 else 0),
                is_copy=name in ties,
                backwards=uses[key],
            )
            own = own[piece.rows.start : piece.rows.stop]
            # With parameters in the gradient's dtype the parameter is its own master: `to` returns the same memory.
            piece.master = own.to(self.grad_dtype)
            pieces.append(piece)
        return pieces

    def _fill_buckets(self, bucket_bytes: int) -> list[_Bucket]:
        """Buckets in reverse module order, which is about the order in which backward ends them."""
        buckets: list[_Bucket] = []
        pieces: list[_Piece] = []
        elements = 0
        size = self.grad_dtype.itemsize * self._shards
        for piece in reversed(self._pieces):
            alike = not pieces or pieces[0].parameter.dtype == piece.parameter.dtype
            if pieces and (not alike or elements * size >= bucket_bytes):
                buckets.append(self._bucket(pieces, elements))
                pieces, elements = [], 0
            piece.offset = elements
            elements += piece.elements
            pieces.append(piece)
        if pieces:
            buckets.append(self._bucket(pieces, elements))
        return buckets

    def _bucket(self, pieces: list[_Piece], elements: int) -> _Bucket:
        if self._hands_over:
            return _Bucket(pieces, elements, None, None)
        device = pieces[0].local.device
        accumulator = torch.zeros(self._shards, elements, dtype=self.grad_dtype, device=device)
        reduced = accumulator[0] if self._shards == 1 else torch.zeros_like(accumulator[0])
        return _Bucket(pieces, elements, accumulator, reduced)

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
        return list(groups.values())

    def _shard_mesh(self) -> DeviceMesh | None:
        """The mesh of sharded state: axes (tp, dp) over existing groups, so that ``Shard(0)`` twice cuts dp's rows
        out of tp's shard; a slice of ``mesh`` itself keeps its order (dp, tp), which would cut the other way."""
        if self._shards == 1:
            return None
        dp_name = self._dp.name
        if self._tp.size == 1:
            return self.mesh[dp_name]
        grid = self.mesh[dp_name, self._tp.name].mesh.T.contiguous()
        return DeviceMesh.from_group(
            [self._tp.group, self._dp.group],
            self.mesh.device_type,
            mesh=grid,
            mesh_dim_names=(self._tp.name, dp_name),
        )

    def _find_peers(self, ties: Mapping[str, str]) -> dict[str, int]:
        """For each tied parameter whose other copy is on another pipeline rank, that rank."""
        if self._pp.size == 1 or not ties:
            return {}
        tied = set(ties.values())
        held: list[list[str]] = [[] for _ in range(self._pp.size)]
        mine = [piece.name for piece in self._pieces if piece.name in tied]
        dist.all_gather_object(held, mine, group=self._pp.group)
        peers = {}
        for name in mine:
            others = [rank for rank, names in enumerate(held) if name in names and rank != self._pp.rank]
            if len(others) > 1:
                raise LayoutError(f"tied parameter {name!r} is on {len(others) + 1} pipeline ranks; 2 is the most")
            if others:
                peers[name] = dist.get_global_rank(self._pp.group, others[0])
        return peers

    # -- gradients ---------------------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        for bucket in self._buckets:
            bucket.work, bucket.launched = None, False
            bucket.pending = sum(piece.backwards for piece in bucket.pieces) * self.num_microbatches
            for piece in bucket.pieces:
                piece.seen = 0
                if bucket.accumulator is None:
                    piece.master.grad = None
        self._next_bucket = 0
        self._reduced = False

    def collect(self, module: nn.Module) -> None:
        """Take the gradients that lie in ``.grad`` of ``module``'s parameters.

        For code that writes ``.grad`` itself, past autograd's hooks, as the weight pass of zero-bubble schedules.
        """
        for parameter in module.parameters():
            if parameter.grad is not None and id(parameter) in self._home:
                self._accumulate(parameter)

    @torch.no_grad()
    def _accumulate(self, parameter: Tensor) -> None:
        piece, bucket = self._home[id(parameter)]
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return
        self._check_open(piece, bucket)
        rows = self._local_gradient(piece, gradient).reshape(piece.local.shape)
        if bucket.accumulator is None:
            self._hand_over(piece, rows.view(piece.master.shape))
        else:
            for view, span in piece.parts(bucket.accumulator):
                added = rows[span].view(view.shape)
                # The first gradient of a step overwrites what the last step left.
                view.copy_(added) if piece.seen == 0 else add_into(view, added)
        self._count(piece, bucket)

    def _check_open(self, piece: _Piece, bucket: _Bucket) -> None:
        if bucket.launched:
            raise RuntimeError(
                f"{piece.name} got a gradient after {self.num_microbatches} micro-batches had been reduced: "
                "num_microbatches is too small, or step() was not called"
            )

    def _hand_over(self, piece: _Piece, gradient: Tensor) -> None:
        """Make autograd's gradient the master's, in wider precision only where it is still to be summed."""
        if piece.partial or piece.backwards > 1 or piece.name in self._peers:
            gradient = gradient.to(self.grad_dtype)
        piece.master.grad = gradient if piece.seen == 0 else piece.gradient.add_(gradient)

    def _count(self, piece: _Piece, bucket: _Bucket) -> None:
        """Note one gradient of ``piece``; start the reductions of buckets that have all of theirs."""
        piece.seen += 1
        bucket.pending -= 1
        while self._next_bucket < len(self._buckets) and self._buckets[self._next_bucket].pending == 0:
            self._launch(self._buckets[self._next_bucket])

    def gradient_sink(self, parameter: Tensor) -> Callable[[], AbstractContextManager[tuple[Tensor, bool]]] | None:
        """A way for code that computes ``parameter``'s gradient itself to add it where it is summed.

        The function returned opens a context with the accumulator, of the local shard's shape and in the gradient
        dtype, and whether it is to be overwritten instead of added to. It stands for one gradient of autograd's.
        None where the accumulator is not one block of memory in the parameter's order.
        """
        piece, bucket = self._home[id(parameter)]
        if bucket.accumulator is None:
            return partial(self._adding, piece, bucket, None)
        parts = piece.parts(bucket.accumulator)
        if len(parts) != 1 or not parts[0][0].is_contiguous():
            return None
        return partial(self._adding, piece, bucket, parts[0][0].view(local_part(parameter).shape))

    @contextmanager
    def _adding(self, piece: _Piece, bucket: _Bucket, accumulator: Tensor | None) -> Iterator[tuple[Tensor, bool]]:
        self._check_open(piece, bucket)
        if accumulator is None:
            accumulator = torch.empty_like(piece.master, dtype=self.grad_dtype)
            piece.master.grad = accumulator
        yield accumulator, piece.seen == 0
        self._count(piece, bucket)

    def _local_gradient(self, piece: _Piece, gradient: Tensor) -> Tensor:
        """The gradient of this rank's shard; partial sums over tp stay partial until the step's one all-reduce."""
        if not isinstance(gradient, DTensor):
            return gradient
        if gradient.placements[0].is_partial():
            piece.partial = True
        elif gradient.placements != piece.parameter.placements:
            # An embedding's gradient arrives replicated where the table is sharded.
            gradient = gradient.redistribute(placements=piece.parameter.placements)
        return gradient.to_local()

    def _launch(self, bucket: _Bucket) -> None:
        """Start a bucket's reduction; buckets go in order, so every dp rank issues the same collectives."""
        for piece in bucket.pieces:
            if piece.seen == 0:
                self._zero(piece, bucket)
        if bucket.accumulator is None or bucket.reduced is None:
            pass  # one dp rank, one backward pass: there is nothing to reduce
        elif self._shards > 1:
            bucket.work = _reduce_scatter(
                bucket.reduced, bucket.accumulator.view(-1), group=self._dp.group, async_op=True
            )
        elif self._dp.size > 1:
            bucket.work = dist.all_reduce(bucket.accumulator, group=self._dp.group, async_op=True)
        bucket.launched = True
        self._next_bucket += 1

    def _zero(self, piece: _Piece, bucket: _Bucket) -> None:
        """The gradient of a parameter that no backward pass reached."""
        if bucket.accumulator is None:
            piece.master.grad = torch.zeros_like(piece.master)
            return
        for view, _ in piece.parts(bucket.accumulator):
            view.zero_()

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Finish the gradients of a step: sums over dp, over tp where partial, and over the copies of tied ones.

        Called by ``step`` and ``clip_grad_norm`` if it has not been. Afterwards each master's ``.grad`` is set.
        """
        if self._reduced:
            return
        while self._next_bucket < len(self._buckets):
            self._launch(self._buckets[self._next_bucket])
        for bucket in self._buckets:
            if bucket.work is not None:
                bucket.work.wait()
            if bucket.reduced is not None:
                for piece in bucket.pieces:
                    piece.master.grad = piece.own(bucket.reduced)
        self._sum_partial_over_tp()
        for piece in self._pieces:
            if piece.name in self._peers:
                self._sum_over_copies(piece.gradient, self._peers[piece.name])
        self._reduced = True

    def _sum_partial_over_tp(self) -> None:
        """One all-reduce for all gradients that are partial sums over tp (small: weights of norms)."""
        gradients = [piece.gradient for piece in self._pieces if piece.partial and piece.master.numel()]
        if not gradients or self._tp.size == 1:
            return
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=self._tp.group)
        sizes = [gradient.numel() for gradient in gradients]
        torch._foreach_copy_(gradients, [f.view_as(g) for f, g in zip(flat.split(sizes), gradients, strict=True)])

    def _sum_over_copies(self, gradient: Tensor, peer: int) -> None:
        """Exchange with the pipeline rank that holds the other copy; a + b = b + a, so the copies stay equal."""
        if not gradient.numel():
            return
        other = torch.empty_like(gradient)
        ours = gradient.contiguous()
        for request in dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, ours, peer, group=self._pp.group),
                dist.P2POp(dist.irecv, other, peer, group=self._pp.group),
            ]
        ):
            request.wait()
        gradient.add_(other)

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float | None, norm_type: float = 2.0) -> Tensor:
        """Norm of the whole model's gradient, each element counted once; scale gradients down to ``max_norm``.

        Args:
            max_norm: None only measures.
            norm_type: 2.0, or ``inf`` for the largest absolute value.

        Returns:
            Scalar tensor with the norm before scaling, equal on all ranks of the mesh.
        """
        self.reduce_gradients()
        counted = [piece.gradient for piece in self._pieces if self._counts(piece) and piece.master.numel()]
        device = self._pieces[0].local.device if self._pieces else self.mesh.device_type
        infinite = norm_type == float("inf")
        total = torch.zeros((), dtype=torch.float64, device=device)
        if counted and not infinite:
            total = sum_of_squares(counted)
        elif counted:
            norms = torch.stack(torch._foreach_norm(counted, norm_type)).double()
            total = norms.max()
        for axis in (self._pp, self._dp, self._tp):
            if axis.size > 1:
                dist.all_reduce(total, op=dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=axis.group)
        norm = total if infinite else total.sqrt()
        if max_norm is not None:
            # The same guard as torch.nn.utils.clip_grad_norm_, so that a reference run agrees to the last digit.
            scale = (max_norm / (norm + 1e-6)).clamp(max=1.0).to(self.grad_dtype)
            if self._fused is not None:
                self._fused.gradient_factor = scale
            else:
                torch._foreach_mul_([piece.gradient for piece in self._pieces], scale)
        return norm

    def _counts(self, piece: _Piece) -> bool:
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
        self._settle()
        if only_if is not None and self._fused is not None and self._on_cuda:
            self._fused.only_if, self._undecided = only_if, HostCopy(only_if)
        elif only_if is not None and not only_if:
            return self.skip_step()
        self.reduce_gradients()
        self.inner.step()
        if self._fused is None or self._shards > 1:  # else parameters were written with their masters
            self.publish()
        self._begin_step()
        return None

    def _settle(self) -> None:
        """Take back the count of the last step if the device found that it was to be skipped."""
        undecided, self._undecided = self._undecided, None
        if undecided is not None and not undecided.item() and self._fused is not None:
            self._fused.uncount_step()

    def skip_step(self) -> None:
        """Drop the gradients of this step and leave weights and state as they are."""
        self.reduce_gradients()
        if self._fused is not None:
            self._fused.gradient_factor = None
        self._begin_step()

    @torch.no_grad()
    def publish(self) -> None:
        """Write masters into parameters: a cast, and an all-gather over dp where state is sharded."""
        if self._shards == 1:
            own = [piece.local.view(piece.master.shape) for piece in self._pieces]
            if own and own[0].data_ptr() != self._pieces[0].master.data_ptr():
                torch._foreach_copy_(own, [piece.master for piece in self._pieces])
            return
        gathers = []
        for bucket in self._buckets:
            local = bucket.pieces[0].local
            sent = local.new_zeros(bucket.elements)
            torch._foreach_copy_(
                [piece.own(sent) for piece in bucket.pieces], [piece.master for piece in bucket.pieces]
            )
            received = local.new_empty(self._shards, bucket.elements)
            work = _all_gather(received.view(-1), sent, group=self._dp.group, async_op=True)
            gathers.append((bucket, work, received, sent))
        for bucket, work, received, _ in gathers:
            work.wait()
            for piece in bucket.pieces:
                for view, span in piece.parts(received):
                    piece.local[span].view(view.shape).copy_(view)

    # -- state -------------------------------------------------------------------------------------------------

    def masters(self) -> dict[str, Tensor]:
        """fp32 weights by parameter name: DTensors where sharded. They share memory with the optimizer.

        After writing into them call ``publish``.
        """
        return {piece.name: self._as_global(piece, piece.master) for piece in self._pieces}

    def gradients(self) -> dict[str, Tensor]:
        """Reduced gradients of this step by parameter name, laid out like ``masters``; gone after ``step``."""
        self.reduce_gradients()
        return {piece.name: self._as_global(piece, piece.gradient) for piece in self._pieces}

    def state_dict(self) -> dict[str, Tensor]:
        """Optimizer state as ``"<state>.<parameter name>"``, sharing memory with the optimizer.

        State of a parameter's shape is a DTensor where sharded; scalars (a step count) are plain tensors. State
        that the inner optimizer has not made yet is made, as zeros.
        """
        self._make_state()
        self._settle()
        state = {}
        for piece in self._pieces:
            for key, value in self.inner.state[piece.master].items():
                if isinstance(value, Tensor):
                    alike = value.shape == piece.master.shape and value.dim() > 0
                    state[f"{key}.{piece.name}"] = self._as_global(piece, value) if alike else value
        return state

    def _make_state(self) -> None:
        """Make the inner optimizer create its state: a step with zero gradients that moves nothing."""
        if self._fused is not None:
            self._fused.make_state()
            return
        if self._pieces and all(self.inner.state.get(piece.master) for piece in self._pieces):
            return
        saved = [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]
        kept = [piece.master.detach().clone() for piece in self._pieces]
        for group in self.param_groups:
            group["lr"] = 0.0
        for piece in self._pieces:
            piece.master.grad = torch.zeros_like(piece.master)
        self.inner.step()
        for group, values in zip(self.param_groups, saved, strict=True):
            group.update(values)
        for piece, master in zip(self._pieces, kept, strict=True):
            piece.master.copy_(master)
            for value in self.inner.state[piece.master].values():
                if isinstance(value, Tensor):
                    value.zero_()

    def _as_global(self, piece: _Piece, tensor: Tensor) -> Tensor:
        parameter = piece.parameter
        over_tp = isinstance(parameter, DTensor)
        if self._shards == 1:
            if not over_tp:
                return tensor
            mesh, placements = parameter.device_mesh, parameter.placements
        elif self._tp.size == 1:
            assert self._state_mesh is not None
            mesh, placements = self._state_mesh, (Shard(0),)
        else:
            assert self._state_mesh is not None
            mesh, placements = (
                self._state_mesh,
                (parameter.placements[0] if over_tp else Replicate(), Shard(0)),
            )
        shape = parameter.shape or torch.Size([1])
        return DTensor.from_local(
            tensor, mesh, placements, run_check=False, shape=shape, stride=contiguous_stride(shape)
        )


def _call_if_alive(method: WeakMethod[Any], parameter: Tensor) -> None:
    if (alive := method()) is not None:
        alive(parameter)


@dataclass(frozen=True)
class _Axis:
    """One mesh axis as this rank sees it; an axis the mesh lacks has one rank and no group."""

    name: str
    size: int
    rank: int
    group: Any

    @classmethod
    def of(cls, mesh: DeviceMesh, name: str) -> "_Axis":
        if name not in (mesh.mesh_dim_names or ()):
            return cls(name, 1, 0, None)
        axis = mesh[name]
        return cls(name, axis.size(), axis.get_local_rank(), axis.get_group())
