"""Train GPT-2 on the bytes of a file: torchrun --nproc-per-node 8 examples/gpt2/train.py 2x2x2 README.md"""

import sys

import numpy as np
import torch
from model import GPT2, Config
from torch.distributed.tensor import Replicate, Shard, parallel

import meshtron as mt

WHOLE = parallel.PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
PLAN = {
    "embed": parallel.PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1)),
    "embed.tokens": parallel.RowwiseParallel(input_layouts=Replicate()),
    "blocks.*.attn": WHOLE,
    "blocks.*.attn.qkv.*": parallel.ColwiseParallel(),
    "blocks.*.attn.out": parallel.RowwiseParallel(output_layouts=Shard(1)),
    "blocks.*.mlp": WHOLE,
    "blocks.*.mlp.up": parallel.ColwiseParallel(),
    "blocks.*.mlp.down": parallel.RowwiseParallel(output_layouts=Shard(1)),
    "blocks.*.*_norm": parallel.SequenceParallel(),
    "norm": parallel.SequenceParallel(use_local_output=True),
    "head": parallel.ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1)),
}
STAGES = {"layers": "blocks", "first": ["embed"], "last": ["norm", "head"]}


def build(config, mesh, tokens, num_microbatches, schedule="1F1B", dtype=torch.float32, lr=1e-3):
    with torch.device("meta"):
        model = GPT2(config)
    mt.unpack_linear(model, "blocks.*.attn.qkv", parts=3)
    mt.check_plan(model, PLAN, mesh["tp"].size(), uneven=("embed.tokens", "head"))
    stages = mt.split_stages(model, mesh["pp"], **STAGES, schedule=schedule)
    mt.apply_tensor_parallel(stages, mesh["tp"], PLAN)
    mt.init_weights(stages, seed=0, std=model.init_std, dtype=dtype)
    optimizer = mt.ZeroOptimizer(stages, mesh, lr=lr, grad_dtype=dtype)
    loss_fn = mt.CausalLMLoss(config.vocab_size, mesh["tp"], denominator=tokens)
    runner = mt.pipeline_schedule(stages, mesh["pp"], schedule, num_microbatches=num_microbatches, loss_fn=loss_fn)
    return optimizer, runner


def main(layout="1x1x1", path=__file__, steps="20", batch=16, sequence=64):
    mesh = mt.build_mesh(mt.Layout.parse(layout), "cpu")
    local, rank = batch // mesh["dp"].size(), mesh.get_local_rank("dp")
    optimizer, runner = build(Config(256, sequence, 128, 4, 4), mesh, batch * sequence, num_microbatches=local // 2)
    mt.seed_ranks(mesh, seed=0)  # dropout: the same within a tp group, another over dp
    text = torch.from_numpy(np.fromfile(path, np.uint8)).long()
    for step in range(int(steps)):
        starts = torch.randint(len(text) - sequence, (batch,), generator=torch.Generator().manual_seed(step))
        rows = torch.stack([text[i : i + sequence + 1] for i in starts[rank * local : (rank + 1) * local]])
        loss = mt.total_loss(runner.step(rows[:, :-1], rows[:, 1:]), mesh)
        print(f"step {step + 1}: loss {loss:.4f}, gradient norm {optimizer.clip_grad_norm(1.0):.3f}")
        optimizer.step()
    mt.save("runs/gpt2", {"optimizer": optimizer}, step=int(steps))


if __name__ == "__main__":
    main(*sys.argv[1:])
