"""torchtitan beside meshtron: the command that trains a recipe's shape with it, and what its log says.

For torchtitan 0.2, whose settings are flags. It trains as it does by default: float32 parameters and state, products
in bfloat16 through autocast or FSDP2, fused AdamW, clipping; compiled and recomputed as the recipe says.
"""

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path

from meshtron.build import model_section
from meshtron.recipe import Recipe

_STEP = re.compile(r"memory: *([\d.]+)GiB.*?tps: *([\d,]+).*?mfu: *([\d.]+)%")
_LOG_FREQ = 5
_WARMUP = 2  # logged means that are left out: of the first step, and of steps 2 to 5
_CHECKPOINTING = {
    "none": ["none"],
    "selective": ["selective", "--activation_checkpoint.selective_ac_option", "op"],
    "full": ["full"],
}


def missing() -> str:
    """Why torchtitan cannot run here, or ""."""
    if importlib.util.find_spec("torchtitan") is None:
        return (
            '--against torchtitan: it is not installed here; pip install "torchtitan==0.2.*", or leave the option out'
        )
    return ""


def environment(recipe: Recipe) -> dict[str, str]:
    """What torchtitan's process needs to know of the model."""
    return {"SHAPE": json.dumps(model_section(recipe)), "PYTHONPATH": str(Path(__file__).parent)}


def command(recipe: Recipe, *, dp: int = 1, tp: int = 1, steps: int) -> list[str]:
    """What follows ``torchrun`` for ``steps`` timed steps of a resolved recipe's batch at a layout."""
    training = recipe.training
    flags = {
        "experimental.custom_import": "torchtitan_shape",
        "model.name": "recipe_shape",
        "model.flavor": "recipe_shape",
        "parallelism.data_parallel_shard_degree": dp,
        "parallelism.tensor_parallel_degree": tp,
        "training.seq_len": training.seq_len,
        "training.local_batch_size": training.micro_batch_size,
        "training.global_batch_size": training.global_batch_size,
        "training.max_norm": recipe.optimizer.grad_clip,
        "training.steps": _LOG_FREQ * (1 + -(-steps // _LOG_FREQ)),
        "metrics.log_freq": _LOG_FREQ,
        "optimizer.lr": recipe.optimizer.lr,
    }
    words = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
    words += ["--activation_checkpoint.mode", *_CHECKPOINTING[training.activation_checkpointing]]
    return ["-m", "torchtitan.train", *words, *(["--compile.enable"] if training.compile else [])]


def commands(recipe: Recipe, gpus: int, steps: int) -> Iterator[tuple[str, list[str]]]:
    """A row's name, and its command, for FSDP2 over all GPUs and for tensor parallelism over all."""
    for name, dp, tp in ((f"torchtitan FSDP2 1x{gpus}x1", gpus, 1), (f"torchtitan TP 1x1x{gpus}", 1, gpus)):
        yield name, command(recipe, dp=dp, tp=tp, steps=steps)


def figures(log: str) -> dict[str, float]:
    """Means over the timed steps of a log; nothing where it has too few.

    ``tokens_per_s`` and ``mfu`` are of one device, ``memory_gib`` is the most that its allocator had reserved.
    """
    plain = re.sub(r"\x1b\[[\d;]*m", "", log)
    means = [[float(number.replace(",", "")) for number in found] for found in _STEP.findall(plain)][_WARMUP:]
    if not means:
        return {}
    memory, tokens, mfu = zip(*means, strict=True)
    return {
        "tokens_per_s": len(tokens) / sum(1 / value for value in tokens),  # equal steps: the mean of their times
        "mfu": sum(mfu) / len(mfu) / 100,
        "memory_gib": max(memory),
    }
