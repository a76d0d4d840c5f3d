"""Recipe -> Job: everything a run needs, built in the order the data flows."""

import functools
import inspect
import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshtron.errors import RecipeError
from meshtron.head_loss import HeadLoss
from meshtron.hf.weights import load_folder
from meshtron.initialize import init_weights, materialize
from meshtron.kernels.adamw import FusedAdamW
from meshtron.layers import convert_to_float8, prepare_layers
from meshtron.loss import CausalLMLoss
from meshtron.mesh import Layout, build_mesh
from meshtron.models import FAMILIES, ModelSpec, model_spec
from meshtron.models.spec import init_std_of, lr_scale_of, uneven_of
from meshtron.optim import GroupRule, LearningRate, RateStage, check_rules, describe_groups, parameter_options
from meshtron.parallel.pipeline import PipelineRunner, pipeline_schedule
from meshtron.parallel.schedules import ZERO_BUBBLE
from meshtron.parallel.stages import Stages, split_stages
from meshtron.parallel.tensor import apply_tensor_parallel, check_plan
from meshtron.parallel.zero import ZeroOptimizer
from meshtron.recipe import Recipe

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Model:
    """This rank's part of a model, sharded and in its final memory."""

    spec: ModelSpec
    stages: Stages

    @property
    def ties(self) -> dict[str, str]:
        """Later name -> first name of shared parameters."""
        return self.stages.ties

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Global shape of every parameter of the whole model, by name."""
        return self.stages.shapes


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a training run is made of."""

    recipe: Recipe
    mesh: DeviceMesh
    device: torch.device
    model: Model
    loss_fn: Any
    """``(output, labels) -> scalar``; its ``denominator`` is set before each step (``ModelSpec``)."""
    optimizer: ZeroOptimizer
    learning_rate: LearningRate
    runner: PipelineRunner


def build_job(recipe: Recipe, device: torch.device) -> Job:
    """Build a run on this rank; the process group exists and the recipe is resolved for its size.

    Raises:
        MeshtronError: the recipe does not fit the model or the world.
    """
    training = recipe.training
    torch.use_deterministic_algorithms(recipe.run.deterministic)
    if recipe.model.attention == "flex" and device.type == "cpu":
        raise RecipeError(
            'model.attention: "flex" cannot train on a CPU, where FlexAttention has no backward pass: use "auto"'
        )
    mesh = build_mesh(layout_of(recipe), "cuda" if device.type == "cuda" else "cpu")
    model = build_model(recipe, mesh, device)
    for stage in model.stages:
        prepare_layers(
            stage.get_submodule(model.spec.stages.layers).children(),
            training.activation_checkpointing,
            num_recomputed=training.activation_checkpointing_layers or None,
            compiled=training.compile,
            tensor_parallel=recipe.parallel.tp > 1,
        )
    optimizer = build_optimizer(recipe, mesh, model, device)
    if recipe.model.from_hf:
        # Into the masters, so that float32 files lose nothing to param_dtype and each dp rank reads its own part.
        load_folder(Path(recipe.model.from_hf), optimizer.masters(), model.shapes, model.ties)
        optimizer.publish()
    loss_fn = build_loss(recipe, mesh, model, optimizer)
    return Job(
        recipe=recipe,
        mesh=mesh,
        device=device,
        model=model,
        loss_fn=loss_fn,
        optimizer=optimizer,
        learning_rate=learning_rate_of(recipe),
        runner=build_runner(recipe, mesh, model, loss_fn),
    )


def build_model(recipe: Recipe, mesh: DeviceMesh, device: torch.device) -> Model:
    """This rank's stages with initial weights; without any where ``build_job`` loads them (``model.from_hf``)."""
    model = place_model(recipe, mesh, device)
    if recipe.model.from_hf:
        return model
    std = init_std_of(model.spec, model_section(recipe))
    init_weights(model.stages, seed=recipe.run.seed, std=std)
    return model


def place_model(recipe: Recipe, mesh: DeviceMesh, device: torch.device) -> Model:
    """This rank's stages without values: meta model -> checked plan -> stages -> tensor parallel shards -> memory."""
    section, parallel = model_section(recipe), recipe.parallel
    spec = model_spec(recipe.model.family)
    plan = spec.plan(section, parallel.sequence_parallel)
    with torch.device("meta"):
        whole = spec.build(section)
    check_plan(whole, plan, parallel.tp, uneven=uneven_of(spec), rehearsal=recipe.model.family not in FAMILIES)
    check_head(whole, spec)
    if recipe.data.document_mask:
        check_takes_documents(whole)
    stages = split_stages(
        whole,
        mesh["pp"],
        **spec.stages.parts,
        schedule=parallel.schedule,
        stages_per_rank=parallel.stages_per_rank,
    )
    for stage in stages:
        if recipe.training.float8 != "off":
            convert_to_float8(stage.get_submodule(spec.stages.layers), recipe.training.float8)
    apply_tensor_parallel(stages, mesh["tp"], plan)
    for stage in stages:
        stage.sequence_shards = sequence_shards(recipe)  # type: ignore[assignment]
    materialize(stages, device, dtype_of(recipe.training.param_dtype))
    return Model(spec=spec, stages=stages)


def check_head(model: nn.Module, spec: ModelSpec) -> None:
    """Raise RecipeError for a ``StageLayout.head`` that the loss cannot apply itself."""
    name = spec.stages.head
    if not name:
        return
    head = dict(model.named_modules()).get(name)
    if not isinstance(head, nn.Linear) or head.bias is not None or not hasattr(model, "head_in_loss"):
        raise RecipeError(
            f"StageLayout.head = {name!r}: expected a bias-free nn.Linear, and an attribute head_in_loss of "
            f"{type(model).__name__} that makes its forward stop before it; else leave head empty"
        )


def check_takes_documents(model: nn.Module) -> None:
    """Raise RecipeError for a model that cannot keep documents apart."""
    if "document_ids" not in inspect.signature(model.forward).parameters:
        raise RecipeError(
            f"data.document_mask: the forward of {type(model).__name__} takes no document_ids (batch, sequence): "
            "add it, or set data.document_mask = false"
        )


def build_optimizer(recipe: Recipe, mesh: DeviceMesh, model: Model, device: torch.device) -> ZeroOptimizer:
    """AdamW over this rank's stages, with the hyper-parameters that [optimizer] gives each parameter."""
    optim = recipe.optimizer
    rules = [GroupRule(**group.model_dump()) for group in optim.groups]
    check_rules(rules, model.shapes)
    options = parameter_options(rules, lr_scale_of(model.spec, model_section(recipe)))
    for line in describe_groups(options, model.shapes, optim.weight_decay):
        log.info("optimizer group: %s", line)
    return ZeroOptimizer(
        model.stages,
        mesh,
        optimizer=functools.partial(
            FusedAdamW,
            fused=device.type == "cpu",
            moment_dtype=torch.bfloat16 if optim.moment_dtype == "bfloat16" else None,
        ),
        group_of=options,
        num_microbatches=recipe.num_microbatches,
        shard=recipe.parallel.zero == 1,
        overlap=recipe.parallel.overlap,
        grad_dtype=dtype_of(recipe.training.grad_accum_dtype),
        lr=optim.lr,
        betas=optim.betas,
        eps=optim.eps,
        weight_decay=optim.weight_decay,
    )


def build_loss(recipe: Recipe, mesh: DeviceMesh, model: Model, optimizer: ZeroOptimizer) -> Any:
    """The loss of the last stage: the family's own, or with the model's head folded in where the model offers it."""
    own = getattr(model.spec, "loss", None)
    if own is not None:
        return own(model_section(recipe), mesh["tp"])
    last = model.stages[-1]
    name = model.spec.stages.head
    head = dict(last.named_modules()).get(name)
    if not isinstance(head, nn.Linear):  # there is none, or it is on another pipeline rank
        return CausalLMLoss(recipe.model.vocab_size, mesh["tp"])
    last.head_in_loss = True  # type: ignore[assignment]
    # A tied head's gradient comes from the embedding too, through autograd, so it goes there as a whole.
    tied = f"{name}.weight" in {*model.ties, *model.ties.values()}
    training = recipe.training
    tokens = training.micro_batch_size * training.seq_len
    return HeadLoss(
        head,
        mesh["tp"] if isinstance(head.weight, DTensor) else None,
        chunk_tokens=-(-tokens // training.loss_chunks) if training.loss_chunks else None,
        weight_sink=None if tied else optimizer.gradient_sink(head.weight),
    )


def build_runner(recipe: Recipe, mesh: DeviceMesh, model: Model, loss_fn: Any) -> PipelineRunner:
    """The runner of this rank's stages."""
    training = recipe.training
    whole_backward = training.compile or training.activation_checkpointing != "none"
    if whole_backward and recipe.parallel.pp > 1 and recipe.parallel.schedule in ZERO_BUBBLE:
        log.info(
            "%s: weight gradients come with those of inputs, as layers are %s",
            recipe.parallel.schedule,
            "compiled" if training.compile else "recomputed",
        )
    return pipeline_schedule(
        model.stages,
        mesh["pp"],
        recipe.parallel.schedule,
        num_microbatches=recipe.num_microbatches,
        loss_fn=loss_fn,
        split_backward=not whole_backward,
    )


def learning_rate_of(recipe: Recipe) -> LearningRate:
    """The learning rate of every step of a recipe."""
    return LearningRate(
        peak=recipe.optimizer.lr,
        total_steps=recipe.training.steps,
        kind=recipe.lr_schedule.kind,
        warmup_steps=recipe.lr_schedule.warmup_steps,
        decay_steps=recipe.lr_schedule.decay_steps,
        min_lr_ratio=recipe.lr_schedule.min_lr_ratio,
        stages=rate_stages(recipe),
    )


def rate_stages(recipe: Recipe) -> tuple[RateStage, ...]:
    """What the recipe's data stages do to the learning rate."""
    stages = recipe.data_stages
    stops = [*(stage.start_step for stage in stages[1:]), recipe.training.steps]
    return tuple(
        RateStage(
            start=stage.start_step,
            stop=stop,
            scale=stage.lr_scale,
            decay=None if stage.lr_decay == "none" else stage.lr_decay,
        )
        for stage, stop in zip(stages, stops, strict=True)
        if stage.lr_scale != 1 or stage.lr_decay != "none"
    )


def layout_of(recipe: Recipe) -> Layout:
    """The layout of a resolved recipe."""
    return Layout(pp=recipe.parallel.pp, dp=recipe.parallel.dp, tp=recipe.parallel.tp)


def model_section(recipe: Recipe) -> Mapping[str, Any]:
    """The recipe's [model] section as plain values, for a ModelSpec."""
    return json.loads(recipe.model.model_dump_json())


def norm_type_of(recipe: Recipe) -> float:
    """Order of the gradient norm."""
    return math.inf if recipe.optimizer.grad_norm == "inf" else 2.0


def dtype_of(name: str) -> torch.dtype:
    """``"bfloat16"`` -> ``torch.bfloat16``."""
    return getattr(torch, name)


def sequence_shards(recipe: Recipe) -> int:
    """Ranks that share a sequence between sharded regions."""
    return recipe.parallel.tp if recipe.parallel.sequence_parallel else 1
