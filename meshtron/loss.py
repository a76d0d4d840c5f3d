"""Token-sum cross-entropy in float32, over a whole vocabulary or one sharded over tensor parallel ranks.

The loss of a step is the sum of token losses divided by the number of valid tokens of the *global* batch, so
neither it nor its gradients depend on how the batch is divided into ranks and micro-batches.
"""

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from meshtron.errors import LayoutError
from meshtron.parallel.axis import check_one_axis
from meshtron.parallel.placement import shard_range

IGNORE = -100
"""Label of a position that has no loss; every other negative number says the same."""


class CausalLMLoss:
    """Sum of token losses over ``denominator``, for logits that may be sharded over the vocabulary.

    ``denominator`` is an attribute: meshtron's loop sets it to the global batch's number of valid tokens before each
    step, so that the loss is the mean over them.

    Args:
        vocab_size: size of the whole vocabulary.
        tp_mesh: one-dimensional mesh over which the last dim of the logits is sharded, or None. Logits that are whole
            all the same are taken as they are.
        denominator: number by which sums are divided, or a scalar tensor.

    Raises:
        LayoutError: ``tp_mesh`` has several axes.
    """

    def __init__(
        self, vocab_size: int, tp_mesh: DeviceMesh | None = None, *, denominator: float | Tensor = 1.0
    ) -> None:
        if tp_mesh is not None:
            check_one_axis(tp_mesh, "tp")
        sharded = tp_mesh is not None and tp_mesh.size() > 1
        self.vocab_size = vocab_size
        self.group = tp_mesh.get_group() if tp_mesh is not None and sharded else None
        parts, index = (tp_mesh.size(), tp_mesh.get_local_rank()) if tp_mesh is not None else (1, 0)
        columns = shard_range(vocab_size, parts, index)
        self.vocab_start, self._num_columns = columns.start, len(columns)
        self.denominator = torch.as_tensor(denominator)

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Loss of one micro-batch.

        Args:
            logits: (batch, sequence, vocabulary or this rank's shard of it), a DTensor or what is local of it.
            labels: (batch, sequence), negative where there is no loss.

        Returns:
            Scalar: sum of token losses / ``denominator``, the same on every rank of the tp mesh.

        Raises:
            LayoutError: the last dim of the logits is neither the vocabulary nor this rank's shard of it.
        """
        if isinstance(logits, DTensor):
            logits = logits.to_local()
        if logits.shape[-1] == self.vocab_size:  # whole on every tp rank
            return cross_entropy_sum(logits, labels) / self.denominator
        if logits.shape[-1] != self._num_columns:
            raise LayoutError(
                f"logits of shape {tuple(logits.shape)}: expected {self.vocab_size} columns, or this tp rank's "
                f"{self._num_columns}; mend the vocabulary size given to the loss, or the output_layouts of the head"
            )
        total = cross_entropy_sum(logits, labels, group=self.group, vocab_start=self.vocab_start)
        return total / self.denominator


def cross_entropy_sum(
    logits: Tensor, labels: Tensor, *, group: dist.ProcessGroup | None = None, vocab_start: int = 0
) -> Tensor:
    """Sum of ``-log softmax(logits)[label]`` over positions whose label is not negative.

    Args:
        logits: (..., vocabulary); with ``group`` this rank's contiguous shard of the last dim.
        labels: (...) ids of the whole vocabulary.
        group: ranks that hold the other shards.
        vocab_start: id of the first column of this rank's shard.

    Returns:
        Scalar in float32 (float64 for float64 logits).
    """
    rows, targets = logits.flatten(0, -2), labels.flatten()
    if group is None:
        wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
        targets = targets.masked_fill(targets < 0, IGNORE)
        return F.cross_entropy(wide, targets, reduction="sum", ignore_index=IGNORE)
    return _ShardedCrossEntropy.apply(rows, targets, group, vocab_start)


class _ShardedCrossEntropy(torch.autograd.Function):
    """Cross-entropy over a sharded vocabulary with two all-reduces of one number a token (Shoeybi et al., 2019)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, group: dist.ProcessGroup, vocab_start: int) -> Tensor:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        columns = labels - vocab_start
        valid = labels >= 0
        mine = valid & (columns >= 0) & (columns < logits.shape[-1])
        columns = columns.clamp(0, logits.shape[-1] - 1)

        largest = wide.amax(dim=-1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        shifted = wide - largest[:, None]
        target = shifted.gather(-1, columns[:, None]).squeeze(-1) * mine
        sums = torch.stack([shifted.exp_().sum(dim=-1), target])
        dist.all_reduce(sums, group=group)
        log_sum = sums[0].log()
        ctx.save_for_backward(logits, largest + log_sum, columns, mine, valid)
        return ((log_sum - sums[1]) * valid).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        logits, log_partition, columns, mine, valid = ctx.saved_tensors
        wide = logits.to(log_partition.dtype)
        probabilities = (wide - log_partition[:, None]).exp_()
        probabilities.scatter_add_(-1, columns[:, None], -mine.to(wide.dtype)[:, None])
        probabilities *= (valid * grad)[:, None]
        return probabilities.to(logits.dtype), None, None, None
