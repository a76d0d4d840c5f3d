"""What a tensor of a rehearsal comes from: something whole on every tp rank, or one rank's share of something.

Where the two meet in one operation, each rank's gradient of what is whole is its part of a sum. torch's styles add
such parts up where a tensor enters or leaves a planned module; anywhere else nobody does, and gradients are wrong in
silence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from meshtron.errors import PlanError

_NOTE = "_meshtron_origin"
_SHAPE_OF_SECOND = ("expand_as", "view_as", "reshape_as", "type_as")


@dataclass(frozen=True)
class Origin:
    """Where a tensor, or the last parameter that went into it, comes from."""

    source: str
    """A module or parameter."""
    sharded: bool
    """Whether a rank has its share of it only."""


def note(tensor: Tensor, origin: Origin) -> Tensor:
    """Note the origin of a tensor that has a gradient."""
    if tensor.requires_grad:
        setattr(tensor, _NOTE, origin)
    return tensor


def follow(inputs: Sequence[Any], outputs: Any, where: str, operation: str) -> None:
    """Hand the origin of an operation's inputs on to its outputs.

    Args:
        inputs, outputs: of the operation, nested as they are.
        where: the module that runs it, for the message.
        operation: its name.

    Raises:
        PlanError: one input is whole, another one rank's share.
    """
    read = inputs[:1] if operation in _SHAPE_OF_SECOND else inputs
    origins = [getattr(leaf, _NOTE) for leaf in tree_leaves(read) if hasattr(leaf, _NOTE)]
    made = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not origins or not made:
        return
    whole = [origin for origin in origins if not origin.sharded]
    shares = [origin for origin in origins if origin.sharded]
    if whole and shares:
        raise PlanError(
            f"{where}: {operation} joins what comes from {whole[-1].source}, whole on every tp rank, with a rank's "
            f"share of what comes from {shares[-1].source}: each rank's gradient of the first would be a part of a "
            "sum that nobody adds up. Shard both (there must be as many key-value heads as tp ranks, or a multiple), "
            "plan a norm of a share as SequenceParallel() (with sequence_dim for a dim other than 1), or gather the "
            "second"
        )
    for leaf in made:
        note(leaf, origins[-1])
