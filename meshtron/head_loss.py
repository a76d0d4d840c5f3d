"""The language-model head and its cross-entropy as one function of hidden states.

Logits are made a chunk of tokens at a time and turned into their own gradient at once, so the whole
(tokens x vocabulary) matrix never exists: at 128 k entries and 16 k tokens it would be 4 GiB in bf16, and three
times that with its float32 softmax. Both gradients (of hidden states and of the head's weight) are computed
during the forward pass, as nothing of the logits is kept for a later one.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshtron.errors import LayoutError
from meshtron.kernels import reference
from meshtron.parallel.collectives import all_gather, reduce_scatter
from meshtron.parallel.placement import shard_range

_CHUNK_TOKENS = 4096
_TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

GradientSink = Callable[[], AbstractContextManager[tuple[Tensor, bool]]]
"""Opens the buffer that a weight's gradient is added to, and says whether it is to be overwritten first."""


class HeadLoss:
    """Sum of token losses over ``denominator``, for the hidden states that enter a model's head.

    Stands where ``CausalLMLoss`` stands, for a model whose forward stops before its head.

    Args:
        head: the head, whose weight may be a DTensor sharded over the vocabulary; without bias.
        tp_mesh: one-dimensional mesh over which the weight is sharded, or None.
        chunk_tokens: tokens whose logits exist at a time; None for about 1 GiB of bf16 logits at 128 k entries.
        weight_sink: where to add the weight's gradient instead of handing it to autograd.
    """

    def __init__(
        self,
        head: nn.Linear,
        tp_mesh: DeviceMesh | None = None,
        *,
        chunk_tokens: int | None = None,
        weight_sink: GradientSink | None = None,
    ) -> None:
        sharded = tp_mesh is not None and tp_mesh.size() > 1
        self.head = head
        self.group = tp_mesh.get_group() if tp_mesh is not None and sharded else None
        parts, index = (tp_mesh.size(), tp_mesh.get_local_rank()) if tp_mesh is not None else (1, 0)
        self.vocab_start = shard_range(head.weight.shape[0], parts, index).start
        self.chunk_tokens = chunk_tokens or _CHUNK_TOKENS
        self.weight_sink = weight_sink
        self.denominator = torch.tensor(1.0)

    def __call__(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Loss of one micro-batch.

        Args:
            hidden: (batch, sequence, hidden size), or this tp rank's part of the sequence.
            labels: (batch, whole sequence), negative where there is no loss.

        Returns:
            Scalar: sum of token losses / ``denominator``, the same on every rank of the tp mesh.

        Raises:
            LayoutError: hidden states are of neither length.
        """
        if isinstance(hidden, DTensor):
            hidden = hidden.to_local()
        weight = self.head.weight
        whole = hidden.shape[1] == labels.shape[1]
        parts = 1 if whole or self.group is None else self.group.size()
        if parts * hidden.shape[1] != labels.shape[1]:
            raise LayoutError(
                f"hidden states of shape {tuple(hidden.shape)} enter the head, expected {labels.shape[1]} tokens, "
                "or with a sharded head this tp rank's share of them: mend the plan's layouts before the head"
            )
        if self.group is not None:
            hidden = _GatherTokens.apply(hidden.flatten(0, 1), self.group, not whole)
            # Gathered rows come rank by rank; putting the labels in that order is cheaper than the hidden states.
            labels = labels.unflatten(1, (parts, -1)).transpose(0, 1)
        return linear_cross_entropy(
            hidden.reshape(-1, hidden.shape[-1]),
            weight.to_local() if isinstance(weight, DTensor) else weight,
            labels.reshape(-1),
            self.denominator,
            group=self.group,
            vocab_start=self.vocab_start,
            chunk_tokens=self.chunk_tokens,
            weight_sink=self.weight_sink,
        )


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    denominator: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    vocab_start: int = 0,
    chunk_tokens: int = _CHUNK_TOKENS,
    weight_sink: GradientSink | None = None,
) -> Tensor:
    """Sum of ``-log softmax(hidden @ weight.T)[label]`` over ``denominator``.

    Args:
        hidden: (tokens, hidden size), the same on every rank of ``group``; its gradient is this rank's part of a
            sum over ``group``.
        weight: (vocabulary, hidden size); with ``group`` this rank's rows.
        labels: (tokens,) ids of the whole vocabulary, negative where there is no loss.
        denominator: scalar tensor.
        group: ranks that hold the other rows.
        vocab_start: id of this rank's first row.
        chunk_tokens: tokens whose logits exist at a time.
        weight_sink: where to add the weight's gradient, usually a float32 accumulator. Autograd then sees none
            for ``weight``, and the result must be what backward starts from (a gradient other than 1 gives NaN).

    Returns:
        Scalar in float32 (float64 for float64 inputs).
    """
    if weight_sink is not None:
        weight = weight.detach()
    differentiate = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    chunks = _Chunks(
        scale=denominator.to(hidden.device, torch.promote_types(hidden.dtype, torch.float32)).reciprocal(),
        group=group,
        vocab_start=vocab_start,
        chunk_tokens=chunk_tokens,
        weight_sink=weight_sink,
        differentiate=differentiate,
    )
    return _LinearCrossEntropy.apply(hidden, weight, labels, chunks)


@dataclass(frozen=True, kw_only=True)
class _Chunks:
    """How ``_LinearCrossEntropy`` goes about it."""

    scale: Tensor
    """1 / denominator, in the precision of the softmax."""
    group: dist.ProcessGroup | None
    vocab_start: int
    chunk_tokens: int
    weight_sink: GradientSink | None
    differentiate: bool


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunks: _Chunks) -> Tensor:
        ctx.ops, ctx.scaled, ctx.weight_dtype = _softmax_ops(hidden), False, weight.dtype
        wide = chunks.scale.dtype
        statistics = torch.empty(3, len(hidden), dtype=wide, device=hidden.device)
        if chunks.differentiate:
            grad_hidden = torch.empty_like(hidden)
            own = torch.empty(weight.shape, dtype=wide, device=weight.device) if chunks.weight_sink is None else None
            sink: Any = chunks.weight_sink() if chunks.weight_sink is not None else nullcontext((own, True))
            buffer = hidden.new_empty(min(chunks.chunk_tokens, len(hidden)), len(weight))  # one for all chunks
            with sink as (grad_weight, overwrite):
                for start in range(0, len(hidden), chunks.chunk_tokens):
                    part = slice(start, start + chunks.chunk_tokens)
                    rows = hidden[part]
                    gradient = torch.mm(rows, weight.t(), out=buffer[: len(rows)])
                    statistics[:, part] = _softmax(ctx.ops, gradient, labels[part], chunks)
                    torch.mm(gradient, weight, out=grad_hidden[part])
                    _add_product(grad_weight, gradient.t(), rows, overwrite and start == 0)
            ctx.has_sink = own is None
            # Neither inputs nor outputs, and scaled in place: autograd's guard of saved tensors is not for them.
            ctx.gradients = grad_hidden, own
        else:
            for start in range(0, len(hidden), chunks.chunk_tokens):
                part = slice(start, start + chunks.chunk_tokens)
                statistics[:, part] = _softmax(ctx.ops, hidden[part] @ weight.t(), labels[part], chunks)
        maximum, total, target = statistics
        return ((maximum + total.log() - target) * (labels >= 0)).sum() * chunks.scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.gradients
        if ctx.has_sink:
            # What was added to somebody else's sum cannot be scaled any more.
            grad = torch.where(grad == 1, grad, torch.nan)
        if not ctx.scaled:  # a zero-bubble schedule comes here twice, for its input pass and its weight pass
            ctx.ops.scale_unless_one(grad_hidden, grad)
            if grad_weight is not None:
                ctx.ops.scale_unless_one(grad_weight, grad)
            ctx.scaled = True
        weight_part = None if grad_weight is None else grad_weight.to(ctx.weight_dtype)
        return grad_hidden, weight_part, None, None


def _softmax_ops(hidden: Tensor) -> Any:
    if not hidden.is_cuda or hidden.dtype not in _TRITON_DTYPES:
        return reference
    from meshtron.kernels import cross_entropy

    return cross_entropy


def _softmax(ops: Any, logits: Tensor, labels: Tensor, chunks: _Chunks) -> Tensor:
    """Statistics of a chunk's rows, (3, rows); to differentiate, its logits are overwritten with their gradient."""
    statistics = torch.empty(3, len(logits), dtype=chunks.scale.dtype, device=logits.device)
    if chunks.group is None and chunks.differentiate:
        ops.cross_entropy_in_place(logits, labels, statistics, chunks.scale)
        return statistics
    ops.row_statistics(logits, labels, statistics, chunks.vocab_start)
    if chunks.group is not None:
        # Sums are brought to the common maximum, then added up (Shoeybi et al., 2019): two numbers a token.
        ours = statistics[0].clone()
        dist.all_reduce(statistics[0], op=dist.ReduceOp.MAX, group=chunks.group)
        statistics[1] *= (ours - statistics[0]).exp_()
        dist.all_reduce(statistics[1:], group=chunks.group)
    if chunks.differentiate:
        ops.logits_to_gradient(logits, labels, statistics, chunks.scale, chunks.vocab_start)
    return statistics


def _add_product(total: Tensor, a: Tensor, b: Tensor, overwrite: bool) -> None:
    """``total += a @ b`` with the product in ``total``'s precision, in one pass where the device can."""
    beta = 0 if overwrite else 1
    if total.dtype == a.dtype:
        total.addmm_(a, b, beta=beta)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, beta=beta, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype), beta=beta)


class _GatherTokens(torch.autograd.Function):
    """All tokens of a tp group in, the sum of every rank's gradient of this rank's tokens out."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: dist.ProcessGroup, sharded: bool) -> Tensor:
        ctx.group, ctx.sharded = group, sharded
        if not sharded:
            return hidden.view_as(hidden)
        gathered = hidden.new_empty(group.size() * len(hidden), hidden.shape[1])
        all_gather(gathered, hidden.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if not ctx.sharded:
            total = grad.clone()
            dist.all_reduce(total, group=ctx.group)
            return total, None, None
        part = grad.new_empty(len(grad) // ctx.group.size(), grad.shape[1])
        reduce_scatter(part, grad.contiguous(), group=ctx.group)
        return part, None, None
