"""Llama and its relatives as a recipe sees them."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from meshtron.models import mup
from meshtron.models.attention import attention_backend
from meshtron.models.llama import (
    STAGES,
    Llama,
    LlamaConfig,
    config_of,
    flops_per_token,
    init_std,
    tensor_parallel_plan,
)


def width_factor(model: Mapping[str, Any]) -> float:
    """How many times wider than ``mup_base_width`` a recipe's [model] section is; 1 without muP."""
    base = model.get("mup_base_width") or 0
    return model["hidden_size"] / base if base else 1.0


class LlamaSpec:
    """Llama and its relatives as a recipe sees them (``ModelSpec``).

    Args:
        options: fields of ``LlamaConfig`` that every model of the family has.
    """

    stages = STAGES
    # Embedding and head: DTensor and the loss know the vocabulary's real size, so shards may be uneven.
    uneven: tuple[str, ...] = ("embed_tokens", "lm_head")

    def __init__(self, **options: Any) -> None:
        self.options = options

    def config(self, model: Mapping[str, Any]) -> LlamaConfig:
        """``config_of`` the section with the family's options."""
        return config_of({**model, **self.options})

    def build(self, model: Mapping[str, Any]) -> nn.Module:
        """A Llama of the section's sizes."""
        return Llama(self.config(model), attention_backend(model.get("attention", "auto")))

    def plan(self, model: Mapping[str, Any], sequence_parallel: bool) -> dict[str, ParallelStyle]:
        """``tensor_parallel_plan``."""
        return tensor_parallel_plan(sequence_parallel, qk_norm=self.config(model).qk_norm)

    def init_std(self, model: Mapping[str, Any]) -> Callable[[str], float]:
        """``init_std`` by parameter name, times muP's factor where ``mup_base_width`` is set."""
        config, m = self.config(model), width_factor(model)
        return lambda name: init_std(config, name) * mup.init_factor(name, m)

    def lr_scale(self, model: Mapping[str, Any]) -> Callable[[str], float]:
        """muP's factor on the learning rate by parameter name; 1 where ``mup_base_width`` is 0."""
        return partial(mup.lr_factor, m=width_factor(model))

    def flops_per_token(self, model: Mapping[str, Any], sequence: int) -> int:
        """``flops_per_token``."""
        return flops_per_token(self.config(model), sequence)
