"""Parity of a model of your own: a small Llama put together by hand, once as it should be and once with a mistake.

python examples/parity_own_model.py            every layout is equal
python examples/parity_own_model.py --wrong    one line of the plan is missing; the report names the parameter
"""

import sys

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import meshtron
from meshtron.comparison.subject import synthetic_batch
from meshtron.loss import IGNORE
from meshtron.models.llama import STAGES, Llama, LlamaConfig, tensor_parallel_plan

CONFIG = LlamaConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=8,
)
BATCH, SEQUENCE = 8, 16


def subject(mesh: DeviceMesh, schedule: str, dtype: torch.dtype, *, forgotten: str = "") -> meshtron.Subject:
    """This rank's part of the run; parity calls it in every rank of every layout."""
    dp, tp = mesh["dp"].size(), mesh["tp"].size()
    plan = tensor_parallel_plan(sequence_parallel=True)
    if forgotten and tp > 1:
        del plan[forgotten]  # the mistake
    with torch.device("meta"):
        model = Llama(CONFIG)
    if not forgotten:  # it would find the mistake before anything runs
        meshtron.check_plan(model, plan, tp)
    stages = meshtron.split_stages(model, mesh["pp"], **STAGES.parts, schedule=schedule)
    for stage in stages:
        meshtron.apply_tensor_parallel(stage, mesh["tp"], plan)
        stage.sequence_shards = tp
    meshtron.init_weights(stages, seed=0, dtype=dtype)
    optimizer = meshtron.ZeroOptimizer(stages, mesh, lr=1e-3, grad_dtype=dtype)
    loss_fn = meshtron.CausalLMLoss(CONFIG.vocab_size, mesh["tp"])
    runner = meshtron.pipeline_schedule(stages, mesh["pp"], schedule, num_microbatches=BATCH // dp, loss_fn=loss_fn)

    def step(number: int) -> Tensor:
        batch = synthetic_batch(CONFIG.vocab_size, BATCH, SEQUENCE, seed=number)
        loss_fn.denominator = (batch.labels != IGNORE).sum()
        mine = slice(mesh.get_local_rank("dp") * BATCH // dp, (mesh.get_local_rank("dp") + 1) * BATCH // dp)
        return runner.step(batch.tokens[mine], batch.labels[mine])

    return meshtron.Subject(stages=stages, optimizer=optimizer, forward_backward=step, plan=plan, max_norm=1.0)


def wrong_subject(mesh: DeviceMesh, schedule: str, dtype: torch.dtype) -> meshtron.Subject:
    """The same, but nobody tells DTensor that a norm sees only a part of the sequence."""
    return subject(mesh, schedule, dtype, forgotten="layers.*.post_attention_layernorm")


if __name__ == "__main__":
    function = wrong_subject if "--wrong" in sys.argv else subject
    report = meshtron.parity(function, ["1x1x1", "1x1x2", "2x1x2"], device="cpu")
    meshtron.print_report(report)
    sys.exit(not report.equal)
