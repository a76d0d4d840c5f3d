"""What the parallel helpers and the training loop need to know of a model, as data and a few functions."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle


@dataclass(frozen=True, kw_only=True)
class StageLayout:
    """Which parts of a model go where when it is split into pipeline stages: what ``split_stages`` is told.

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

    @property
    def parts(self) -> dict[str, Any]:
        """The keyword arguments of ``split_stages``."""
        return {"layers": self.layers, "first": self.first, "last": self.last}


@runtime_checkable
class ModelSpec(Protocol):
    """A model family: what ``[model] family = "my_package.my_module:MySpec"`` in a recipe stands for.

    The class is called without arguments. ``model`` in the arguments below is the recipe's [model] section as a plain
    mapping: the keys that meshtron knows with their defaults, and any others just as they are in the recipe.

    A family may also have any of these; without them, what is in brackets holds:

    - ``uneven``: plan keys whose sharded dim need not be a multiple of tp, see ``check_plan`` [none]
    - ``init_std(model)``: standard deviation of initial matrices, or a function of the parameter's name
      [``model["init_std"]``]
    - ``loss(model, tp_mesh)``: a function ``(output of the last stage, labels) -> scalar`` with an attribute
      ``denominator``, which the loop sets to the number of valid labels of the global batch (a scalar tensor) before
      each step, and by which it divides [``CausalLMLoss`` on ``model["vocab_size"]``]
    - ``flops_per_token(model, sequence)``: floating-point operations of one token's forward and backward pass, for
      ``mfu`` in the log [unknown]
    - ``lr_scale(model)``: a factor on the learning rate by parameter name [1]
    """

    stages: StageLayout
    """How the model is cut into pipeline stages."""

    def build(self, model: Mapping[str, Any]) -> nn.Module:
        """The whole model; called under ``torch.device("meta")``, so make buffers under ``torch.device("cpu")``."""
        ...

    def plan(self, model: Mapping[str, Any], sequence_parallel: bool) -> Mapping[str, ParallelStyle]:
        """Tensor-parallel styles by module name; ``{}`` where the model is never split over tp.

        ``sequence_parallel`` is the recipe's wish; a plan may do without.
        """
        ...


def uneven_of(spec: ModelSpec) -> tuple[str, ...]:
    """The family's ``uneven``, or its default."""
    return tuple(getattr(spec, "uneven", ()))


def init_std_of(spec: ModelSpec, model: Mapping[str, Any]) -> float | Callable[[str], float]:
    """The family's ``init_std``, or its default."""
    own = getattr(spec, "init_std", None)
    return own(model) if own else model["init_std"]


def flops_of(spec: ModelSpec, model: Mapping[str, Any], sequence: int) -> int:
    """The family's ``flops_per_token``; 0 where unknown."""
    own = getattr(spec, "flops_per_token", None)
    return own(model, sequence) if own else 0


def lr_scale_of(spec: ModelSpec, model: Mapping[str, Any]) -> Callable[[str], float]:
    """The family's ``lr_scale``, or its default."""
    own = getattr(spec, "lr_scale", None)
    return own(model) if own else lambda name: 1.0
