"""Gradients of a step: added up over micro-batches as autograd makes them, then summed over dp, tp and tied copies.

backward        each gradient is added into an accumulator as soon as autograd has it, and dropped
last backward   a bucket whose gradients are complete is reduced over dp while backward goes on
reduce          what is left of that, partial sums over tp, and the two copies of a tied parameter
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from meshtron.errors import LayoutError
from meshtron.kernels.adamw import add_into
from meshtron.parallel.axis import Axis
from meshtron.parallel.buckets import Bucket, Piece
from meshtron.parallel.collectives import reduce_scatter
from meshtron.parallel.placement import local_part


class Gradients:
    """Hooks on parameters that bring each gradient to where it is summed, and the sums over ranks.

    Args:
        buckets: the parameters, in the order in which they are reduced.
        pp, dp, tp: the axes of the mesh.
        shards: dp ranks that a bucket's accumulator has rows for; 1 where each dp rank needs the whole sum.
        ties: later name -> first name of shared parameters of the whole model.
        dtype: of accumulators.
        num_microbatches: gives the number of backward passes in a step, or None where it is not known; buckets are
            then reduced when the step is over.
        overlap: whether backward goes on while a bucket is reduced.

    Raises:
        LayoutError: a tied parameter is held by more than two pipeline ranks.
    """

    def __init__(
        self,
        buckets: list[Bucket],
        pp: Axis,
        dp: Axis,
        tp: Axis,
        *,
        shards: int,
        ties: Mapping[str, str],
        dtype: torch.dtype,
        num_microbatches: Callable[[], int | None],
        overlap: bool = True,
    ) -> None:
        self.buckets = buckets
        self._pp, self._dp, self._tp = pp, dp, tp
        self._shards, self._dtype, self._overlap = shards, dtype, overlap
        self._num_microbatches = num_microbatches
        self._pieces = [piece for bucket in buckets for piece in bucket.pieces]
        self._home = {id(piece.parameter): (piece, bucket) for bucket in buckets for piece in bucket.pieces}
        self._peers = self._find_peers(ties)
        # Weak, as Python's collector cannot see the cycle parameter -> hook -> gradients -> parameter.
        accumulate = WeakMethod(self._accumulate)
        for piece in self._pieces:
            piece.parameter.register_post_accumulate_grad_hook(partial(_call_if_alive, accumulate))
        self.begin_step()

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

    def begin_step(self) -> None:
        """Forget the last step's gradients."""
        for bucket in self.buckets:
            bucket.work, bucket.launched, bucket.pending = None, False, None
            for piece in bucket.pieces:
                piece.seen = 0
                if bucket.accumulator is None:
                    piece.master.grad = None
        self._next_bucket = 0
        self._reduced = False

    # -- backward ----------------------------------------------------------------------------------------------

    def collect(self, module: nn.Module) -> None:
        """Take the gradients that lie in ``.grad`` of ``module``'s parameters."""
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

    def _check_open(self, piece: Piece, bucket: Bucket) -> None:
        if bucket.launched:
            raise RuntimeError(
                f"{piece.name} got a gradient after {self._num_microbatches()} micro-batches had been reduced: "
                "num_microbatches is too small, or step() was not called"
            )

    def _hand_over(self, piece: Piece, gradient: Tensor) -> None:
        """Make autograd's gradient the master's, in wider precision only where it is still to be summed."""
        if piece.partial or piece.backwards > 1 or piece.name in self._peers:
            gradient = gradient.to(self._dtype)
        piece.master.grad = gradient if piece.seen == 0 else piece.gradient.add_(gradient)

    def _count(self, piece: Piece, bucket: Bucket) -> None:
        """Note one gradient of ``piece``; start the reductions of buckets that have all of theirs."""
        piece.seen += 1
        microbatches = self._num_microbatches()
        if microbatches is None:
            return
        if bucket.pending is None:
            bucket.pending = microbatches * sum(piece.backwards for piece in bucket.pieces)
        bucket.pending -= 1
        while self._next_bucket < len(self.buckets) and self.buckets[self._next_bucket].pending == 0:
            self._launch(self.buckets[self._next_bucket])

    def sink(self, parameter: Tensor) -> Callable[[], AbstractContextManager[tuple[Tensor, bool]]] | None:
        """See ``ZeroOptimizer.gradient_sink``."""
        if id(parameter) not in self._home:  # frozen
            return None
        piece, bucket = self._home[id(parameter)]
        if bucket.accumulator is None:
            return partial(self._adding, piece, bucket, None)
        parts = piece.parts(bucket.accumulator)
        if len(parts) != 1 or not parts[0][0].is_contiguous():
            return None
        return partial(self._adding, piece, bucket, parts[0][0].view(local_part(parameter).shape))

    @contextmanager
    def _adding(self, piece: Piece, bucket: Bucket, accumulator: Tensor | None) -> Iterator[tuple[Tensor, bool]]:
        self._check_open(piece, bucket)
        if accumulator is None:
            accumulator = torch.empty_like(piece.master, dtype=self._dtype)
            piece.master.grad = accumulator
        yield accumulator, piece.seen == 0
        self._count(piece, bucket)

    def _local_gradient(self, piece: Piece, gradient: Tensor) -> Tensor:
        """The gradient of this rank's shard; partial sums over tp stay partial until the step's one all-reduce."""
        if not isinstance(gradient, DTensor):
            return gradient
        if gradient.placements[0].is_partial():
            piece.partial = True
        elif gradient.placements != piece.parameter.placements:
            # An embedding's gradient arrives replicated where the table is sharded.
            gradient = gradient.redistribute(placements=piece.parameter.placements)
        return gradient.to_local()

    # -- over ranks --------------------------------------------------------------------------------------------

    def _launch(self, bucket: Bucket) -> None:
        """Start a bucket's reduction; buckets go in order, so every dp rank issues the same collectives."""
        for piece in bucket.pieces:
            if piece.seen == 0:
                self._zero(piece, bucket)
        if bucket.accumulator is None or bucket.reduced is None:
            pass  # one dp rank, one backward pass: there is nothing to reduce
        elif self._shards > 1:
            bucket.work = reduce_scatter(
                bucket.reduced, bucket.accumulator.view(-1), group=self._dp.group, async_op=self._overlap
            )
        elif self._dp.size > 1:
            bucket.work = dist.all_reduce(bucket.accumulator, group=self._dp.group, async_op=self._overlap)
        bucket.launched = True
        self._next_bucket += 1

    def _zero(self, piece: Piece, bucket: Bucket) -> None:
        """The gradient of a parameter that no backward pass reached."""
        if bucket.accumulator is None:
            piece.master.grad = torch.zeros_like(piece.master)
            return
        for view, _ in piece.parts(bucket.accumulator):
            view.zero_()

    @torch.no_grad()
    def reduce(self) -> None:
        """Finish the gradients of a step; afterwards each master's ``.grad`` is set. A second call does nothing."""
        if self._reduced:
            return
        for piece in self._pieces:  # written past autograd's hooks by somebody who did not say so
            if piece.parameter.grad is not None:
                self._accumulate(piece.parameter)
        while self._next_bucket < len(self.buckets):
            self._launch(self.buckets[self._next_bucket])
        for bucket in self.buckets:
            if bucket.work is not None:
                bucket.work.wait()
            if bucket.reduced is not None:
                for piece in bucket.pieces:
                    piece.master.grad = piece.own(bucket.reduced)
        self._sum_partial_over_tp()
        by_name = {piece.name: piece for piece in self._pieces}
        for name in sorted(self._peers):  # an order that both ends know
            self._sum_over_copies(by_name[name].gradient, self._peers[name])
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


def _call_if_alive(method: WeakMethod[Any], parameter: Tensor) -> None:
    if (alive := method()) is not None:
        alive(parameter)
