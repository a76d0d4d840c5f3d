"""The softmax kernels of ``cross_entropy`` in plain torch: what a CPU runs, and what a test compares with."""

from torch import Tensor


def row_statistics(logits: Tensor, labels: Tensor, statistics: Tensor, first_column: int) -> None:
    """Write each row's maximum, sum of exponentials above it, and label's logit (see ``cross_entropy``)."""
    wide = logits.to(statistics.dtype)
    columns = labels - first_column
    mine = (labels >= 0) & (columns >= 0) & (columns < logits.shape[1])
    picked = wide.gather(1, columns.clamp(0, logits.shape[1] - 1)[:, None]).squeeze(1)
    maximum = wide.amax(dim=1)
    statistics[0] = maximum
    statistics[1] = (wide - maximum[:, None]).exp_().sum(dim=1)
    statistics[2] = picked * mine


def logits_to_gradient(logits: Tensor, labels: Tensor, statistics: Tensor, scale: Tensor, first_column: int) -> None:
    """Overwrite logits with ``(softmax - one_hot) * scale``; ``statistics`` are those of the whole vocabulary."""
    columns = labels - first_column
    mine = (labels >= 0) & (columns >= 0) & (columns < logits.shape[1])
    probabilities = (logits.to(statistics.dtype) - (statistics[0] + statistics[1].log())[:, None]).exp_()
    columns = columns.clamp(0, logits.shape[1] - 1)[:, None]
    probabilities.scatter_add_(1, columns, -mine.to(probabilities.dtype)[:, None])
    logits.copy_(probabilities.mul_(((labels >= 0) * scale)[:, None]))


def cross_entropy_in_place(logits: Tensor, labels: Tensor, statistics: Tensor, scale: Tensor) -> None:
    """Do both of the above, for logits that hold the whole vocabulary."""
    row_statistics(logits, labels, statistics, 0)
    logits_to_gradient(logits, labels, statistics, scale, 0)


def scale_unless_one(values: Tensor, factor: Tensor) -> None:
    """Multiply ``values`` in place by a scalar tensor."""
    values.mul_(factor)
