"""What the multi-rank tests share: a small Llama, its plain single-process training run, and the sharded one."""

from dataclasses import dataclass, field

import torch
from torch.nn import functional as F

from meshtron.initialize import init_weights
from meshtron.loss import IGNORE, CausalLMLoss
from meshtron.mesh import Layout, build_mesh
from meshtron.models.llama import STAGES, Llama, LlamaConfig, init_std, tensor_parallel_plan
from meshtron.parallel.pipeline import pipeline_schedule
from meshtron.parallel.schedules import V_SHAPED
from meshtron.parallel.stages import Stages, split_stages
from meshtron.parallel.tensor import apply_tensor_parallel
from meshtron.parallel.zero import ZeroOptimizer

LR, WEIGHT_DECAY, MAX_NORM, SEED = 1e-3, 0.1, 0.5, 3


def small_config(**changes) -> LlamaConfig:
    sizes = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
    }
    return LlamaConfig(**(sizes | changes))


@dataclass(frozen=True, kw_only=True)
class Case:
    """One sharded training run to be compared with the plain one."""

    layout: Layout
    config: LlamaConfig = field(default_factory=small_config)
    schedule: str = "1F1B"
    stages_per_rank: int = 1
    micro_batch: int = 1
    batch: int = 16
    sequence: int = 16
    zero: int = 1
    sequence_parallel: bool = True
    dtype: torch.dtype = torch.float64
    steps: int = 5
    masked: bool = False


def global_batch(case: Case, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    ids = torch.randint(0, case.config.vocab_size, (case.batch, case.sequence + 1), generator=generator)
    tokens, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    if case.masked:
        keep = torch.randint(0, case.sequence, (case.batch, 1), generator=generator)
        labels[torch.arange(case.sequence) > keep] = IGNORE
    return tokens, labels


@dataclass
class Curve:
    """Loss and gradient norm of each step, and the weights after the last."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]


def plain_run(case: Case) -> Curve:
    """The reference: one process, torch.optim.AdamW, torch's clipping, the whole batch at once."""
    torch.manual_seed(0)
    model = Llama(case.config).to(case.dtype)
    init_weights([model], seed=SEED, std=lambda name: init_std(case.config, name))
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}],
        lr=LR,
        betas=(0.9, 0.95),
    )
    curve = Curve([], [], {})
    for step in range(case.steps):
        tokens, labels = global_batch(case, step)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
        optimizer.zero_grad()
        loss.backward()
        curve.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        curve.losses.append(loss.item())
        optimizer.step()
    curve.weights = {name: p.detach().clone() for name, p in model.named_parameters(remove_duplicate=False)}
    return curve


def sharded_stages(case: Case, mesh) -> Stages:
    """This rank's stages with their initial weights."""
    with torch.device("meta"):
        model = Llama(case.config)
    stages = split_stages(
        model, mesh["pp"], **STAGES.parts, schedule=case.schedule, stages_per_rank=case.stages_per_rank
    )
    for stage in stages:
        apply_tensor_parallel(
            stage, mesh["tp"], tensor_parallel_plan(case.sequence_parallel, qk_norm=case.config.qk_norm)
        )
        stage.sequence_shards = case.layout.tp if case.sequence_parallel else 1
    init_weights(stages, seed=SEED, std=lambda name: init_std(case.config, name), dtype=case.dtype)
    return stages


def sharded_optimizer(case: Case, parts=None) -> ZeroOptimizer:
    mesh = build_mesh(case.layout, "cpu") if parts is None else parts[0]
    stages = sharded_stages(case, mesh) if parts is None else parts[1]
    return ZeroOptimizer(
        stages,
        mesh,
        group_of=lambda name, shape: {"weight_decay": WEIGHT_DECAY if len(shape) >= 2 else 0.0},
        num_microbatches=case.batch // case.layout.dp // case.micro_batch,
        shard=case.zero == 1,
        grad_dtype=torch.promote_types(case.dtype, torch.float32),
        bucket_bytes=20_000,
        lr=LR,
        betas=(0.9, 0.95),
    )


def sharded_run(case: Case) -> Curve:
    """The same run through meshtron's parallel helpers, on the ranks of the current process group."""
    mesh = build_mesh(case.layout, "cpu")
    stages = sharded_stages(case, mesh)
    optimizer = sharded_optimizer(case, (mesh, stages))
    loss_fn = CausalLMLoss(case.config.vocab_size, mesh["tp"])
    runner = pipeline_schedule(
        stages,
        mesh["pp"],
        case.schedule,
        num_microbatches=optimizer.num_microbatches,
        loss_fn=loss_fn,
    )
    curve = Curve([], [], {})
    rank, local_batch = mesh.get_local_rank("dp"), case.batch // case.layout.dp
    for step in range(case.steps):
        tokens, labels = global_batch(case, step)
        loss_fn.denominator = (labels != IGNORE).sum()
        mine = slice(rank * local_batch, (rank + 1) * local_batch)
        loss = runner.step(tokens[mine], labels[mine]).double()
        torch.distributed.all_reduce(loss)
        curve.losses.append(loss.item() / case.layout.tp)
        curve.norms.append(optimizer.clip_grad_norm(MAX_NORM).item())
        optimizer.step()
    for stage in stages:
        for name, parameter in stage.named_parameters(remove_duplicate=False):
            full = getattr(parameter, "full_tensor", lambda parameter=parameter: parameter)()
            curve.weights[name] = full.detach().clone()
    return curve


def stages_for(schedule: str) -> int:
    return 2 if schedule in V_SHAPED or "Interleaved" in schedule or schedule == "LoopedBFS" else 1
