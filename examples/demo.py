"""The whole of meshtron on a laptop: prepare data, train on 4 ranks, stop, resume at another layout, generate.

`make demo` runs it. Each command is printed before it runs, to be copied and changed. Arguments change the recipe:
`python examples/demo.py training.steps=400`.
"""

import json
import math
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import numpy as np

DATA = Path("data/python_stdlib")
RUN = Path("runs/demo")
RECIPE = "recipes/tiny_llama.toml"
CHECKPOINTS = "checkpoints/step-" + 8 * "[0-9]"  # a checkpoint that is still being written has another name

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4"]
TRAIN = [*TORCHRUN, "train.py", RECIPE, "run.name=demo", *sys.argv[1:]]


def show(title: str, command: list[str]) -> None:
    """Print what is about to run."""
    print(f"\n=== {title}\n$ {shlex.join(command).replace(sys.executable, 'python')}", flush=True)


def run(title: str, command: list[str]) -> None:
    """Run a command to its end; a failure ends the demo."""
    show(title, command)
    subprocess.run(command, check=True)


def run_until_checkpoint(title: str, command: list[str]) -> None:
    """Run a command until there is a checkpoint, then end it the way a cluster ends a job."""
    show(title, command)
    # torchrun writes a traceback when it is told to stop; the demo is not the place for it
    with open(RUN.with_suffix(".log"), "w") as log, subprocess.Popen(command, stderr=log) as process:
        while process.poll() is None and not (saved := list(RUN.glob(CHECKPOINTS))):
            time.sleep(0.1)
        if process.poll() is not None:
            sys.exit(f"the run ended by itself; see {log.name}")
        process.terminate()
    print(f"stopped, with {saved[0]} saved", flush=True)


def unigram_entropy(folder: Path) -> float:
    """Nats a token of a model that knows how often each token occurs, and nothing else."""
    counts = sum(
        np.bincount(np.fromfile(shard, dtype=np.uint16), minlength=4096) for shard in folder.glob("shard-*.bin")
    )
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def main() -> None:
    """Run every part in order."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    started = time.monotonic()
    shutil.rmtree(RUN, ignore_errors=True)
    RUN.parent.mkdir(exist_ok=True)

    if not DATA.exists():
        library = sysconfig.get_path("stdlib")
        prepare = [
            sys.executable,
            "-m",
            "meshtron",
            "prepare",
            library,
            "--out",
            str(DATA),
            "--train-tokenizer",
            "4096",
        ]
        run("tokenize the source of Python's standard library", prepare)

    first = [*TRAIN, "parallel.pp=2", "parallel.dp=1", "parallel.tp=2"]
    run_until_checkpoint("train on 4 ranks: 2 pipeline stages x 2 tensor parallel ranks", first)
    second = [*TRAIN, "parallel.pp=1", "parallel.dp=2", "parallel.tp=2"]
    run("go on with the same run as 2 data parallel x 2 tensor parallel ranks", second)

    prompt = "def __init__(self"
    generate = [sys.executable, "generate.py", str(RUN), "--prompt", prompt, "--max-new-tokens", "80"]
    run("generate", [*generate, "--temperature", "0.7", "--seed", "0"])

    losses = [json.loads(line)["loss"] for line in (RUN / "metrics.jsonl").read_text().splitlines()]
    print(
        f"\nloss {losses[0]:.2f} -> {losses[-1]:.2f} nats a token; knowing nothing costs "
        f"ln(4096) = {math.log(4096):.2f}, knowing only how frequent each token is {unigram_entropy(DATA):.2f}\n"
        f"in {time.monotonic() - started:.0f} s; the run is in {RUN}"
    )


if __name__ == "__main__":
    main()
