"""What a recipe amounts to before anything is started: parameters, memory a rank, floating-point operations."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from meshtron.build import model_section
from meshtron.initialize import check_buffers
from meshtron.models import FAMILIES, model_spec
from meshtron.models.spec import flops_of, uneven_of
from meshtron.parallel.stages import split_stages
from meshtron.parallel.styles import sharded_dim
from meshtron.parallel.tensor import Plan, check_plan, matching_modules
from meshtron.recipe import Recipe

_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Figures of a resolved recipe. Memory is of the rank that needs most; activations come on top."""

    parameters: dict[str, int]
    """Parameters by part of the model; a part that shares another's (a tied head) has none of its own."""
    rank_parameters: int
    """Parameters of the fullest rank."""
    parameter_bytes: int
    """Its parameters in ``training.param_dtype``."""
    gradient_bytes: int
    """Its accumulated gradients in ``training.grad_accum_dtype``, and under ZeRO-1 the sums of its share; where a
    step is one backward pass on one dp rank just the gradients, as parameters are."""
    state_bytes: int
    """Its masters and Adam moments: 12 bytes a parameter for bf16 parameters with float32 moments, divided by dp
    under ZeRO-1. Parameters of the masters' type are their own masters."""
    flops_per_token: int
    """Forward and backward of one token; 0 where the model does not say."""

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model, shared ones once."""
        return sum(self.parameters.values())


@dataclass(frozen=True)
class _PipelineRank:
    """The two things that ``split_stages`` asks of a mesh, for a rank that does not exist."""

    rank: int
    ranks: int

    def size(self) -> int:
        return self.ranks

    def get_local_rank(self) -> int:
        return self.rank


def estimate(recipe: Recipe) -> Estimate:
    """Build the model of a resolved recipe on the meta device, check its plan, and count.

    Raises:
        MeshtronError: the model does not divide as the layout asks, or its family cannot be imported.
    """
    section, parallel, training = model_section(recipe), recipe.parallel, recipe.training
    spec = model_spec(recipe.model.family)
    plan = spec.plan(section, parallel.sequence_parallel)
    with torch.device("meta"):
        model = spec.build(section)
    check_buffers([model])
    check_plan(model, plan, parallel.tp, uneven=uneven_of(spec), rehearsal=recipe.model.family not in FAMILIES)

    over_tp = _shards(model, plan, parallel.tp)
    counts = []
    for rank in range(parallel.pp):
        stages = split_stages(
            model,
            _PipelineRank(rank, parallel.pp),  # type: ignore[arg-type]
            **spec.stages.parts,
            schedule=parallel.schedule,
            stages_per_rank=parallel.stages_per_rank,
        )
        held = {id(p): p for stage in stages for p in stage.parameters()}.values()
        counts.append(sum(-(-p.numel() // over_tp.get(id(p), 1)) for p in held))
    most = max(counts)

    own, wide = _BYTES[training.param_dtype], _BYTES[training.grad_accum_dtype]
    master = 0 if training.param_dtype == training.grad_accum_dtype else wide
    moment = 2 if recipe.optimizer.moment_dtype == "bfloat16" else wide
    shards = parallel.dp if parallel.zero else 1
    handed_over = parallel.dp == 1 and recipe.num_microbatches == 1
    return Estimate(
        parameters=dict(_parts(model)),
        rank_parameters=most,
        parameter_bytes=most * own,
        gradient_bytes=most * own if handed_over else most * wide + (most * wide // shards if shards > 1 else 0),
        state_bytes=most * (master + 2 * moment) // shards,
        flops_per_token=flops_of(spec, section, training.seq_len),
    )


def _parts(model: nn.Module) -> Iterator[tuple[str, int]]:
    seen: set[int] = set()
    for name, part in model.named_children():
        own = {id(p): p for p in part.parameters() if id(p) not in seen}
        seen |= own.keys()
        yield name, sum(p.numel() for p in own.values())


def _shards(model: nn.Module, plan: Plan, tp: int) -> dict[int, int]:
    """By parameter, into how many shards tp cuts it; those that are not cut are left out."""
    shards = {}
    for pattern, style in plan.items():
        for _, module in matching_modules(model, pattern):
            for name, parameter in module.named_parameters(recurse=False):
                if sharded_dim(style, module, name) is not None:
                    shards[id(parameter)] = tp
    return shards
