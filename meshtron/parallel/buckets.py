"""The units of ZeRO-1: a piece of a parameter that one dp rank updates, a bucket of pieces for one collective.

The accumulator of a bucket is laid out (dp, pieces of one rank), so that row ``r`` is what rank ``r`` receives:
adding a gradient is a strided add, and nothing is packed before the reduce-scatter.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from meshtron.errors import MeshtronError
from meshtron.parallel.collectives import all_gather
from meshtron.parallel.names import named_parameters
from meshtron.parallel.placement import local_part, shard_range
from meshtron.parallel.stages import Stages


@dataclass(eq=False)
class Piece:
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
class Bucket:
    """Pieces whose gradients are reduced, and whose parameters are gathered, in one collective."""

    pieces: list[Piece]
    elements: int
    accumulator: Tensor | None
    """(dp, elements): gradients of all rows, summed over micro-batches. None where the optimizer takes gradients as
    autograd made them."""
    reduced: Tensor | None
    """(elements,): gradients of this rank's rows, summed over dp."""
    pending: int | None = None
    """Gradients still to come in this step; None before the first of them."""
    work: dist.Work | None = None
    launched: bool = False


def cut_pieces(stages: Stages, *, shards: int, shard: int, dtype: torch.dtype) -> list[Piece]:
    """A piece for every trainable parameter, in module order.

    Args:
        stages: this rank's modules.
        shards: dp ranks that the rows of each parameter are cut over; 1 keeps them whole.
        shard: which of them this rank is.
        dtype: of masters.

    Raises:
        MeshtronError: a parameter has no memory yet, or is not contiguous.
    """
    held: dict[int, tuple[str, nn.Parameter]] = {}
    uses: dict[int, int] = {}
    for stage in stages:
        for name, parameter in named_parameters([stage]):
            if parameter.requires_grad:
                held.setdefault(id(parameter), (name, parameter))
                uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    pieces = []
    for key, (name, parameter) in held.items():
        if parameter.is_meta:
            raise MeshtronError(f"{name} is on the meta device: call init_weights before the optimizer is made")
        own = local_part(parameter).detach()
        if not own.is_contiguous():
            raise MeshtronError(
                f"{name} of shape {tuple(own.shape)} has strides {own.stride()}, expected contiguous memory "
                "(a module in channels_last is not): model.to(memory_format=torch.contiguous_format)"
            )
        own = own if own.dim() else own.view(1)  # a scalar is one row, so one dp rank keeps its state
        local = own.view(len(own), math.prod(own.shape[1:]))
        piece = Piece(
            name=stages.ties.get(name, name),
            parameter=parameter,
            local=local,
            rows_per_rank=-(-len(local) // shards),
            rows=shard_range(len(local), shards, shard),
            is_copy=name in stages.ties,
            backwards=uses[key],
        )
        own = own[piece.rows.start : piece.rows.stop]
        # With parameters in the gradient's dtype the parameter is its own master: `to` returns the same memory.
        piece.master = own.to(dtype)
        pieces.append(piece)
    return pieces


def fill_buckets(
    pieces: list[Piece], *, shards: int, dtype: torch.dtype, bucket_bytes: int, accumulate: bool
) -> list[Bucket]:
    """Buckets in reverse module order, which is about the order in which backward ends them.

    Args:
        pieces: in module order; their ``offset`` is set.
        shards: rows of an accumulator.
        dtype: of accumulators.
        bucket_bytes: gradients of a bucket before it is closed.
        accumulate: False where gradients are taken as autograd made them, so that no accumulator is needed.
    """
    groups: list[tuple[list[Piece], int]] = []
    current: list[Piece] = []
    elements = 0
    for piece in reversed(pieces):
        alike = not current or current[0].parameter.dtype == piece.parameter.dtype
        if current and (not alike or elements * dtype.itemsize * shards >= bucket_bytes):
            groups.append((current, elements))
            current, elements = [], 0
        piece.offset = elements
        elements += piece.elements
        current.append(piece)
    if current:
        groups.append((current, elements))
    return [_bucket(members, elements, shards, dtype, accumulate) for members, elements in groups]


def _bucket(pieces: list[Piece], elements: int, shards: int, dtype: torch.dtype, accumulate: bool) -> Bucket:
    if not accumulate:
        return Bucket(pieces, elements, None, None)
    accumulator = torch.zeros(shards, elements, dtype=dtype, device=pieces[0].local.device)
    reduced = accumulator[0] if shards == 1 else torch.zeros_like(accumulator[0])
    return Bucket(pieces, elements, accumulator, reduced)


def write_parameters(buckets: list[Bucket], *, shards: int, group: Any) -> None:
    """Write masters into parameters on every dp rank.

    Args:
        buckets: all of this rank's.
        shards: dp ranks that masters are cut over; 1 where each has all of them.
        group: of these ranks.
    """
    if shards == 1:
        pieces = [piece for bucket in buckets for piece in bucket.pieces]
        apart = [piece for piece in pieces if piece.master.data_ptr() != piece.local.data_ptr()]
        if apart:
            own = [piece.local.view(piece.master.shape) for piece in apart]
            torch._foreach_copy_(own, [piece.master for piece in apart])
        return
    gathers = []
    for bucket in buckets:
        local = bucket.pieces[0].local
        sent = local.new_zeros(bucket.elements)
        torch._foreach_copy_([piece.own(sent) for piece in bucket.pieces], [piece.master for piece in bucket.pieces])
        received = local.new_empty(shards, bucket.elements)
        work = all_gather(received.view(-1), sent, group=group, async_op=True)
        gathers.append((bucket, work, received, sent))
    for bucket, work, received, _ in gathers:
        work.wait()
        for piece in bucket.pieces:
            for view, span in piece.parts(received):
                piece.local[span].view(view.shape).copy_(view)
