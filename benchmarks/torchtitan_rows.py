"""torchtitan beside meshtron: the command that has an installed torchtitan train a shape, and what its log says.

Written from torchtitan 0.3's command line and log lines; it has not run yet.
"""

import importlib.util
import re
from collections.abc import Iterator

ARGUMENTS = (
    "--module llama3 --config llama3_8b --training.seq_len 4096 --training.local_batch_size 1 "
    "--activation_checkpoint.mode full --compile.enable"
)
"""The 8B shape as layout_rows.py has it; its tokenizer and data are torchtitan's own to find."""
_STEP = re.compile(r"memory: *([\d.]+)GiB.*?tps: *([\d,]+).*?mfu: *([\d.]+)%")
_WARMUP = 2  # logged steps that are left out


def missing() -> str:
    """Why torchtitan cannot run here, or ""."""
    if importlib.util.find_spec("torchtitan") is None:
        return "--against torchtitan: it is not installed here; pip install torchtitan, or leave the option out"
    return ""


def commands(gpus: int, steps: int, arguments: str = ARGUMENTS) -> Iterator[tuple[str, list[str]]]:
    """A row's name, and what follows ``torchrun``, for FSDP2 over all GPUs and for tensor parallelism over all."""
    for name, dp, tp in ((f"torchtitan FSDP2 1x{gpus}x1", gpus, 1), (f"torchtitan TP 1x1x{gpus}", 1, gpus)):
        degrees = [
            "--parallelism.data_parallel_shard_degree",
            str(dp),
            "--parallelism.tensor_parallel_degree",
            str(tp),
        ]
        length = ["--training.steps", str(_WARMUP + steps), "--metrics.log_freq", "1"]
        yield name, ["-m", "torchtitan.train", *arguments.split(), *degrees, *length]


def figures(log: str, gpus: int) -> dict[str, float]:
    """Means over the steps of a log; nothing where it has too few. torchtitan counts tokens/s for one device."""
    plain = re.sub(r"\x1b\[[\d;]*m", "", log)
    steps = [[float(number.replace(",", "")) for number in found] for found in _STEP.findall(plain)][_WARMUP:]
    if not steps:
        return {}
    memory, tokens, mfu = zip(*steps, strict=True)
    return {
        "total": gpus * len(tokens) / sum(1 / value for value in tokens),  # equal steps: the mean of their times
        "mfu": sum(mfu) / len(mfu) / 100,
        "memory_gib": max(memory),
    }
