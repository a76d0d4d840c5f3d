"""Train a transformers model as it is: torchrun --nproc-per-node 8 examples/transformers_llama/train.py 2x2x2 llama

Any decoder with Llama's module names will do (llama, qwen2, mistral ...). Random weights, random tokens.
"""

import sys

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from transformers import AutoConfig, AutoModelForCausalLM

import meshtron as mt
from meshtron.checkpoint import read_tensors, stored_tensors

# Hidden states are whole on every tp rank: transformers derives positions from their length.
PLAN = {
    "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
    "model.layers.*.self_attn.[qkv]_proj": ColwiseParallel(),
    "model.layers.*.self_attn.o_proj": RowwiseParallel(),
    "model.layers.*.mlp.gate_proj": ColwiseParallel(),
    "model.layers.*.mlp.up_proj": ColwiseParallel(),
    "model.layers.*.mlp.down_proj": RowwiseParallel(),
    "lm_head": ColwiseParallel(output_layouts=Shard(-1)),
}
STAGES = {"layers": "model.layers", "first": ["model.embed_tokens"], "last": ["model.norm", "lm_head"]}
SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}


def config_of(family, **changes):
    return AutoConfig.for_model(family, **(SIZES | {"use_cache": False, "attention_dropout": 0.0} | changes))


def build(config, mesh, tokens, num_microbatches, schedule="1F1B", dtype=torch.float32):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config)  # its buffers have values from the start
    model.register_forward_hook(lambda module, args, output: output.logits)  # stages hand on a tensor
    mt.check_plan(model, PLAN, mesh["tp"].size())
    stages = mt.split_stages(model, mesh["pp"], **STAGES, schedule=schedule)
    mt.apply_tensor_parallel(stages, mesh["tp"], PLAN)
    mt.init_weights(stages, seed=0)
    optimizer = mt.ZeroOptimizer(stages, mesh, lr=1e-3, grad_dtype=dtype)
    loss_fn = mt.CausalLMLoss(config.vocab_size, mesh["tp"], denominator=tokens)
    runner = mt.pipeline_schedule(stages, mesh["pp"], schedule, num_microbatches=num_microbatches, loss_fn=loss_fn)
    return optimizer, runner


def export(checkpoint, config, folder):
    """One process: the weights of a checkpoint, whatever layout saved it, as a folder that transformers opens."""
    model = AutoModelForCausalLM.from_config(config)
    prefix = "optimizer.master."
    names = [name for name in stored_tensors(checkpoint) if name.startswith(prefix)]
    weights = read_tensors(checkpoint, names)
    # A tied head has no tensor of its own.
    missing, _ = model.load_state_dict({n.removeprefix(prefix): w for n, w in weights.items()}, strict=False)
    if missing not in ([], ["lm_head.weight"]):
        raise SystemExit(f"{checkpoint} lacks {missing}")
    model.save_pretrained(folder)


def main(layout="1x1x1", family="llama", steps="5", batch=16, sequence=32):
    mesh = mt.build_mesh(mt.Layout.parse(layout), "cpu")
    config, local = config_of(family), batch // mesh["dp"].size()
    optimizer, runner = build(config, mesh, batch * sequence, num_microbatches=local // 2)
    for step in range(int(steps)):
        ids = torch.randint(config.vocab_size, (batch, sequence + 1), generator=torch.Generator().manual_seed(step))
        mine = ids[mesh.get_local_rank("dp") * local :][:local]
        loss = mt.total_loss(runner.step(mine[:, :-1], mine[:, 1:]), mesh)
        norm = optimizer.clip_grad_norm(1.0)
        optimizer.step()
        if torch.distributed.get_rank() == 0:
            print(f"step {step + 1}: loss {loss:.4f}, gradient norm {norm:.3f}")
    checkpoint = mt.save(f"runs/{family}", {"optimizer": optimizer}, step=int(steps))
    if torch.distributed.get_rank() == 0:
        export(checkpoint, config, f"runs/{family}/transformers")


if __name__ == "__main__":
    main(*sys.argv[1:])
