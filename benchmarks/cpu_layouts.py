"""Tokens a second of the tiny recipe on CPU: plain torch, one meshtron process, and 8 ranks at four layouts.

    python benchmarks/cpu_layouts.py [--steps 10] [--threads 1]

Plain torch and one meshtron process take turns inside one process, so their ratio holds on a busy machine. The
8-rank rows share the same cores, so they show what the layouts cost, not what more machines would give.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch.nn import functional as F

from meshtron import loop, world
from meshtron.build import build_job, model_section
from meshtron.data import Batch
from meshtron.initialize import init_weights
from meshtron.loop import train_step
from meshtron.models.llama import Llama, config_of
from meshtron.optim import LearningRate
from meshtron.recipe import Recipe, load_recipe
from meshtron.resume import Progress

RECIPE = Path(__file__).parent.parent / "recipes" / "tiny_llama.toml"
LAYOUTS = ("2x2x2", "1x8x1", "8x1x1", "1x1x8")
WARMUP = 2


class RandomBatches:
    """A stream of one rank's random batches, ready before they are asked for."""

    wait_s = 0.0

    def __init__(self, recipe: Recipe, dp_rank: int) -> None:
        training = recipe.training
        rows = training.global_batch_size // recipe.parallel.dp
        generator = torch.Generator().manual_seed(dp_rank)
        shape = (rows, training.seq_len + 1)
        ids = torch.randint(0, recipe.model.vocab_size, shape, generator=generator)
        self._batch = Batch(tokens=ids[:, :-1].contiguous(), labels=ids[:, 1:].contiguous())

    def batch(self, samples: int) -> Batch:
        return self._batch


class PlainTorch:
    """The same training run as a plain torch script would have it."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.model = Llama(config_of(model_section(recipe)))
        init_weights([self.model], seed=0)
        optim = recipe.optimizer
        decayed = [p for p in self.model.parameters() if p.dim() >= 2]
        others = [p for p in self.model.parameters() if p.dim() < 2]
        groups = [{"params": decayed, "weight_decay": optim.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, fused=True)
        schedule = recipe.lr_schedule
        self.rate = LearningRate(peak=optim.lr, total_steps=recipe.training.steps, warmup_steps=schedule.warmup_steps)
        self.steps = 0

    def step(self, batch: Batch) -> float:
        """One optimizer step; returns the loss."""
        self.optimizer.zero_grad(set_to_none=True)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate.at(self.steps)
        micro = self.recipe.training.micro_batch_size
        total = 0.0
        for tokens, labels in zip(batch.tokens.split(micro), batch.labels.split(micro), strict=True):
            logits = self.model(tokens)
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / batch.labels.numel()
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.optimizer.grad_clip)
        self.optimizer.step()
        self.steps += 1
        return total


def measure_rank(layout: str, steps: int, against_plain: bool) -> dict[str, float]:
    """Body of a rank: median seconds a step, and of that outside forward, backward, optimizer and communication."""
    pp, dp, tp = layout.split("x")
    recipe = load_recipe(RECIPE, [f"parallel.pp={pp}", f"parallel.dp={dp}", f"parallel.tp={tp}"])
    recipe = recipe.resolve(world.world_size())
    device = torch.device("cpu")
    with world.process_group(device):
        job = build_job(recipe, device)
        stream = RandomBatches(recipe, job.mesh.get_local_rank("dp"))
        inside = [0.0]
        parts = [(job.runner, "step"), (job.optimizer, "clip_grad_norm"), (job.optimizer, "step")]
        parts += [(loop, "valid_tokens"), (loop, "total_loss")]  # two all-reduces of one number
        for owner, name in parts:
            _time_calls(owner, name, inside)
        plain = PlainTorch(recipe) if against_plain else None
        progress = Progress()
        mine, theirs, outside = [], [], []
        for number in range(WARMUP + steps):
            inside[0] = 0.0
            started = time.perf_counter()
            train_step(job, stream, progress)  # type: ignore[arg-type]
            took = time.perf_counter() - started
            if number >= WARMUP:
                mine.append(took)
                outside.append((took - inside[0]) / took)
            if plain is not None:
                started = time.perf_counter()
                plain.step(stream.batch(0))
                if number >= WARMUP:
                    theirs.append(time.perf_counter() - started)
        result = {"step_s": statistics.median(mine), "outside": statistics.median(outside)}
        if theirs:
            result["plain_step_s"] = statistics.median(theirs)
            result["ratio"] = statistics.median(t / m for t, m in zip(theirs, mine, strict=True))
    return result


def _time_calls(owner: object, name: str, total: list[float]) -> None:
    original = getattr(owner, name)

    def timed(*args: object, **kwargs: object) -> object:
        started = time.perf_counter()
        result = original(*args, **kwargs)
        total[0] += time.perf_counter() - started
        return result

    setattr(owner, name, timed)


def launch(layout: str, steps: int, threads: int) -> dict[str, float]:
    """Run ``measure_rank`` on as many ranks as the layout has; returns rank 0's figures."""
    pp, dp, tp = map(int, layout.split("x"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={pp * dp * tp}"]
    command += [__file__, "--rank-of", layout, "--steps", str(steps)]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": str(threads)}, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="steps that are timed, after 2 to warm up")
    parser.add_argument("--threads", type=int, default=1, help="threads a rank")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        result = measure_rank(options.rank_of, options.steps, against_plain=options.rank_of == "1x1x1")
        if world.rank() == 0:
            print(json.dumps(result))
        return
    training = load_recipe(RECIPE).training
    tokens = training.global_batch_size * training.seq_len
    title = f"tiny_llama, {platform.processor() or platform.machine()}, {os.cpu_count()} cores, "
    table = Table(title=title + f"torch {torch.__version__}, {date.today()}")
    for column in ("layout (pp x dp x tp)", "ranks", "tokens/s", "of plain torch", "outside the four"):
        table.add_column(column, justify="right")
    one = launch("1x1x1", options.steps, options.threads)
    table.add_row("plain torch", "1", f"{tokens / one['plain_step_s']:,.0f}", "100 %", "")
    table.add_row("1x1x1", "1", f"{tokens / one['step_s']:,.0f}", f"{one['ratio']:.1%}", f"{one['outside']:.1%}")
    for layout in LAYOUTS:
        figures = launch(layout, options.steps, options.threads)
        share = one["plain_step_s"] / figures["step_s"]
        row = (f"{tokens / figures['step_s']:,.0f}", f"{share:.1%}", f"{figures['outside']:.1%}")
        table.add_row(layout, "8", *row)
    Console().print(table)


if __name__ == "__main__":
    main()
