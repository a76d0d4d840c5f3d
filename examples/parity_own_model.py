"""Parity of a model of your own: a small Llama put together by hand, once as it should be and once with a mistake.

python examples/parity_own_model.py            every layout is equal
python examples/parity_own_model.py --wrong    one line of the plan is missing; the report names the parameter
"""

import sys

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from meshtron.initialize import init_weights, materialize
from meshtron.loss import IGNORE, CausalLMLoss
from meshtron.models.llama import STAGES, Llama, LlamaConfig, tensor_parallel_plan
from meshtron.parallel.pipeline import PipelineRunner, split_stages
from meshtron.parallel.tensor import apply_tensor_parallel, check_plan
from meshtron.parallel.zero import ZeroOptimizer
from meshtron.parity import Subject, compare_layouts, print_report
from meshtron.parity.subject import synthetic_batch

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


def subject(mesh: DeviceMesh, schedule: str, dtype: torch.dtype, *, forgotten: str = "") -> Subject:
    """This rank's part of the run; parity calls it in every rank of every layout."""
    dp = mesh["dp"].size()
    plan = tensor_parallel_plan(sequence_parallel=True)
    if forgotten and mesh["tp"].size() > 1:
        del plan[forgotten]  # the mistake
    with torch.device("meta"):
        model = Llama(CONFIG)
    check_plan(model, plan, mesh["tp"].size())
    names = [name for name, _ in model.named_parameters()]
    stages = split_stages(model, mesh["pp"], STAGES, schedule=schedule)
    for stage in stages:
        apply_tensor_parallel(stage, mesh["tp"], plan)
        stage.sequence_shards = mesh["tp"].size()
    materialize(stages, mesh.device_type, dtype)
    init_weights(stages, seed=0)
    optimizer = ZeroOptimizer(stages, mesh, lr=1e-3, num_microbatches=BATCH // dp, grad_dtype=dtype)
    loss_fn = CausalLMLoss(CONFIG.vocab_size, mesh["tp"])
    runner = PipelineRunner(
        stages,
        mesh["pp"],
        schedule,
        num_microbatches=BATCH // dp,
        loss_fn=loss_fn,
        after_weight_pass=optimizer.collect,
    )

    def step(number: int) -> Tensor:
        batch = synthetic_batch(CONFIG.vocab_size, BATCH, SEQUENCE, seed=number)
        loss_fn.denominator = (batch.labels != IGNORE).sum()
        mine = slice(mesh.get_local_rank("dp") * BATCH // dp, (mesh.get_local_rank("dp") + 1) * BATCH // dp)
        loss = runner.step(batch.tokens[mine], batch.labels[mine]).double() / mesh["tp"].size()
        torch.distributed.all_reduce(loss)
        return loss

    return Subject(stages=stages, optimizer=optimizer, forward_backward=step, names=names, plan=plan, max_norm=1.0)


def wrong_subject(mesh: DeviceMesh, schedule: str, dtype: torch.dtype) -> Subject:
    """The same, but nobody tells DTensor that a norm sees only a part of the sequence."""
    return subject(mesh, schedule, dtype, forgotten="layers.*.post_attention_layernorm")


if __name__ == "__main__":
    function = "wrong_subject" if "--wrong" in sys.argv else "subject"
    report = compare_layouts(f"parity_own_model:{function}", ["1x1x1", "1x1x2", "2x1x2"], device="cpu")
    print_report(report)
    sys.exit(not report.equal)
