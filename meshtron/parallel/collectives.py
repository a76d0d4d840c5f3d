"""Collectives that torch 2.13 renamed; there the older names go on with a warning."""

from torch import distributed as dist

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""``all_gather(out, part, group=..., async_op=...)``: the parts of all ranks one after the other, in rank order."""

reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""``reduce_scatter(part, whole, group=..., async_op=...)``: this rank's part of the sum over ranks."""
