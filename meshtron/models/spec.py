"""What the parallel helpers and the training loop need to know of a model, as data and a few functions."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle


@dataclass(frozen=True, kw_only=True)
class StageLayout:
    """Which parts of a model go where when it is split into pipeline stages.

    Names are attribute paths from the model (``"layers"``, ``"transformer.h"``). Every parameter belongs to one of
    them.
    """

    layers: str
    """A ModuleList or ModuleDict whose children are divided over the stages in order."""
    first: tuple[str, ...] = ()
    """Parts that only the first stage has."""
    last: tuple[str, ...] = ()
    """Parts that only the last stage has."""
    head: str = ""
    """A bias-free ``nn.Linear`` from hidden states to logits that the loss may apply itself; the model then has an
    attribute ``head_in_loss`` that makes its forward pass stop before it. Empty for none."""


class ModelSpec(Protocol):
    """A model family: what ``[model] family = "..."`` in a recipe stands for.

    ``model`` in the arguments is the recipe's [model] section as a plain mapping. A family may also have
    ``lr_scale(model)``, which gives a factor on the learning rate by parameter name (muP).
    """

    stages: StageLayout
    """How the model is cut into pipeline stages."""
    uneven: tuple[str, ...]
    """Plan keys whose sharded dim need not be a multiple of tp (see ``check_plan``)."""

    def build(self, model: Mapping[str, Any]) -> nn.Module:
        """The whole model; called under ``torch.device("meta")``."""
        ...

    def plan(self, model: Mapping[str, Any], sequence_parallel: bool) -> Mapping[str, ParallelStyle]:
        """Tensor-parallel styles by module name."""
        ...

    def init_std(self, model: Mapping[str, Any]) -> float | Callable[[str], float]:
        """Standard deviation of initial matrices, or a function of the parameter's name."""
        ...

    def flops_per_token(self, model: Mapping[str, Any], sequence: int) -> int:
        """Floating-point operations of one token's forward and backward pass; 0 where unknown."""
        ...
