"""What torch's tensor parallel styles do to shapes: which dim of a parameter they cut, what they expect and give."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

KNOWN = (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    PrepareModuleInputOutput,
)
"""Styles that are understood here; of any other nothing is assumed."""

Layouts = tuple[Placement | None, ...]
Change = tuple[Layouts, Layouts]
"""Layouts that tensors have, and those that they are brought to; None for what is no tensor or left alone."""


def sharded_dim(style: ParallelStyle, module: nn.Module, name: str) -> int | None:
    """The dim of parameter ``name`` of ``module`` that ``style`` cuts over tp, or None where it stays whole."""
    if name == "weight" and isinstance(style, ColwiseParallel | RowwiseParallel):
        # A Linear's weight is (out, in), an Embedding's (vocabulary, hidden), so colwise and rowwise swap dims.
        return int(isinstance(style, RowwiseParallel) != isinstance(module, nn.Embedding))
    return 0 if name == "bias" and isinstance(style, ColwiseParallel) else None


@dataclass(frozen=True, kw_only=True)
class Effect:
    """What a style does to what enters and leaves a module, as tensors on one rank."""

    inputs: Change = ((), ())
    """Of positional arguments."""
    keywords: Mapping[str, tuple[Placement | None, Placement | None]]
    """Of keyword arguments."""
    outputs: Change = ((), ())
    local_inputs: bool = True
    """Whether the module's own code sees plain tensors."""
    local_outputs: bool = True
    """Whether the code after the module sees plain tensors."""


def effect_of(style: ParallelStyle, module: nn.Module) -> Effect:
    """What a style in ``KNOWN`` does to the activations of ``module``."""
    parts: Any = style
    local = getattr(style, "use_local_output", True)
    if isinstance(style, ColwiseParallel):
        return Effect(
            inputs=(_tuple(parts.input_layouts), (Replicate(),)),
            keywords={},
            outputs=((Shard(-1),), _tuple(parts.output_layouts)),
            local_outputs=local,
        )
    if isinstance(style, RowwiseParallel):
        wanted: Placement = Replicate() if isinstance(module, nn.Embedding) else Shard(-1)
        return Effect(
            inputs=(_tuple(parts.input_layouts), (wanted,)),
            keywords={},
            outputs=((Replicate(),), _tuple(parts.output_layouts)),  # a sum by then: of whole shape
            local_outputs=local,
        )
    if isinstance(style, SequenceParallel):
        kept = _tuple(parts.sequence_sharding)
        return Effect(inputs=(kept, kept), keywords={}, outputs=(kept, kept), local_outputs=local)
    before = style.prepare_module_input if isinstance(style, PrepareModuleInputOutput) else style
    after = style.prepare_module_output if isinstance(style, PrepareModuleInputOutput) else style
    inputs: Change = ((), ())
    keywords, outputs, local_inputs, local = {}, inputs, True, True
    if isinstance(before, PrepareModuleInput):
        inputs = (_tuple(before.input_layouts), _tuple(before.desired_input_layouts))
        names = before.input_kwarg_layouts or {}
        keywords = {name: (names[name], before.desired_input_kwarg_layouts.get(name)) for name in names}
        local_inputs = before.use_local_output
    if isinstance(after, PrepareModuleOutput):
        outputs = (_tuple(after.output_layouts), _tuple(after.desired_output_layouts))
        local = after.use_local_output
    return Effect(inputs=inputs, keywords=keywords, outputs=outputs, local_inputs=local_inputs, local_outputs=local)


def _tuple(layouts: Any) -> Layouts:
    return layouts if isinstance(layouts, tuple) else () if layouts is None else (layouts,)
