"""Runs of small recipes with many options at once: through meshtron, and in plain torch on one process.

The plain run knows nothing of masks, micro-batches, stages or shards: it sends every document through the model
alone, sums the token losses of the whole batch, divides once, and updates with torch.optim.AdamW.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from meshtron.build import Job, build_job, norm_type_of
from meshtron.data import Batch
from meshtron.initialize import init_weights
from meshtron.models import model_spec
from meshtron.models.llama import Llama, init_std
from meshtron.optim import set_learning_rate
from meshtron.passes import forward_backward
from meshtron.recipe import Recipe
from tests.layouts import Curve

BATCH, SEQUENCE, STEPS, IGNORE = 8, 16, 2, -100


def recipe_of(options: Mapping[str, Any]) -> Recipe:
    """A recipe from ``"section.key"`` options; ``mesh`` is ``"2x1x2"`` or ``"2x1x2 AFAB"``."""
    layout, _, schedule = options["mesh"].partition(" ")
    pp, dp, tp = map(int, layout.split("x"))
    sections: dict[str, dict[str, Any]] = {
        "model": {
            "vocab_size": 96,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
        },
        "parallel": {"pp": pp, "dp": dp, "tp": tp} | ({"schedule": schedule} if schedule else {}),
        "training": {
            "steps": 10,
            "seq_len": SEQUENCE,
            "global_batch_size": BATCH,
            "micro_batch_size": 1,
            "param_dtype": "float64",
        },
        # With the usual 1e-8, Adam's division makes float32 rounding of gradients near zero as large as a step.
        "optimizer": {"lr": 1e-3, "eps": 1e-5},
        "data": {"train": [{"path": "unused"}]},
        "run": {"device": "cpu"},
    }
    for key, value in options.items():
        section, _, name = key.partition(".")
        if name:
            sections.setdefault(section, {})[name] = value
    return Recipe(**sections)


@dataclass(frozen=True, kw_only=True)
class Global:
    """A global batch, and where each row's documents begin."""

    tokens: torch.Tensor
    labels: torch.Tensor
    document_ids: torch.Tensor


def global_batch(labels: str, vocab_size: int, step: int) -> Global:
    """Random rows of 1 to 4 documents. ``labels``: ``all``, ``ragged`` (1 to 16 a row) or ``idle`` (none in half)."""
    generator = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(vocab_size, (BATCH, SEQUENCE + 1), generator=generator)
    tokens, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    if labels != "all":
        valid = torch.randint(1, SEQUENCE + 1, (BATCH, 1), generator=generator)
        targets[torch.arange(SEQUENCE) >= valid] = IGNORE
    if labels == "idle":
        targets[: BATCH // 2] = IGNORE
    begins = torch.rand(BATCH, SEQUENCE, generator=generator) < 0.15
    begins[:, 0] = False
    return Global(tokens=tokens, labels=targets, document_ids=begins.long().cumsum(dim=1))


def positions_of(document_ids: torch.Tensor) -> torch.Tensor:
    """Place of each token in its document, one token after the other."""
    positions = torch.zeros_like(document_ids)
    for row in range(document_ids.shape[0]):
        for place in range(1, document_ids.shape[1]):
            same = document_ids[row, place] == document_ids[row, place - 1]
            positions[row, place] = positions[row, place - 1] + 1 if same else 0
    return positions


def batch_of(job: Job, labels: str, step: int) -> Batch:
    """This rank's rows of a global batch."""
    recipe = job.recipe
    local = BATCH // recipe.parallel.dp
    rows = slice(job.mesh.get_local_rank("dp") * local, (job.mesh.get_local_rank("dp") + 1) * local)
    whole = global_batch(labels, recipe.model.vocab_size, step)
    documents = {}
    if recipe.data.document_mask:
        positions = positions_of(whole.document_ids)
        documents = {"document_ids": whole.document_ids[rows], "positions": positions[rows]}
    return Batch(tokens=whole.tokens[rows], labels=whole.labels[rows], **documents)


def sharded(options: Mapping[str, Any]) -> Curve:
    """The run through meshtron, on the ranks of the current process group."""
    recipe = recipe_of(options)
    recipe = recipe.resolve(torch.distributed.get_world_size())
    job = build_job(recipe, torch.device("cpu"))
    curve = Curve([], [], {})
    for step in range(STEPS):
        set_learning_rate(job.optimizer.param_groups, recipe.optimizer.lr)
        curve.losses.append(float(forward_backward(job, batch_of(job, options["labels"], step))))
        curve.norms.append(
            float(job.optimizer.clip_grad_norm(recipe.optimizer.grad_clip or None, norm_type_of(recipe)))
        )
        job.optimizer.step()
    for stage in job.model.stages:
        for name, parameter in stage.named_parameters(remove_duplicate=False):
            full = getattr(parameter, "full_tensor", lambda parameter=parameter: parameter)()
            curve.weights[name] = full.detach().clone()
    return curve


def plain(options: Mapping[str, Any]) -> Curve:
    """The same run in plain torch."""
    recipe = recipe_of(options)
    return plain_steps(
        recipe, [global_batch(options["labels"], recipe.model.vocab_size, step) for step in range(STEPS)]
    )


def plain_steps(recipe: Recipe, batches: Iterable[Global]) -> Curve:
    """A step for each global batch, in plain torch; one without labels changes nothing."""
    config = model_spec(recipe.model.family).config(recipe.model.model_dump())
    model = Llama(config).to(getattr(torch, recipe.training.param_dtype))
    init_weights([model], seed=recipe.run.seed, std=lambda name: init_std(config, name))
    optim = recipe.optimizer
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": optim.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps)
    curve = Curve([], [], {})
    for batch in batches:
        if not recipe.data.document_mask:
            batch.document_ids.zero_()
        if (batch.labels == IGNORE).all():
            curve.losses.append(0.0)
            curve.norms.append(0.0)
            continue
        total = torch.zeros((), dtype=torch.float64)
        for tokens, labels, ids in zip(batch.tokens, batch.labels, batch.document_ids, strict=True):
            for document in ids.unique():
                logits = model(tokens[ids == document][None])[0]
                losses = F.cross_entropy(logits, labels[ids == document], ignore_index=IGNORE, reduction="sum")
                total = total + losses
        loss = total / (batch.labels != IGNORE).sum()
        optimizer.zero_grad()
        loss.backward()
        limit = optim.grad_clip or float("inf")
        order = float("inf") if optim.grad_norm == "inf" else 2.0
        curve.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), limit, order).item())
        curve.losses.append(loss.item())
        optimizer.step()
    curve.weights = {name: p.detach().clone() for name, p in model.named_parameters(remove_duplicate=False)}
    return curve
