"""Speed of a recipe through the real loop: tokens a second, MFU, memory, and where the time of a step goes.

    python benchmarks/train_speed.py recipes/llama_1b.toml [key=value ...] [--steps 20] [--warmup 5]
        [--against plain|torchtitan] [--random-data] [--kernels 20] [--json FILE]

Batches come from the recipe's token shards through the real loader; with --random-data, shards of random ids of the
recipe's vocabulary are written to a temporary folder first and read in their place. Nothing is saved.

Two passes over the same job: one counts whole steps, the other marks the phases of each step (with device events on
a GPU), so that marking costs the first nothing. Phases are those of the device: "data" is the time it stood still for
a batch, "backward" the end of the loss to the end of autograd, "reduce" communication over dp and the gradient norm.
The breakdown needs one pipeline stage; with more only whole steps are measured.
"""

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchtitan_rows
from kernel_times import exposed, kind_of
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional as F

from meshtron import world
from meshtron.build import Job, build_job, layout_of, model_section
from meshtron.data.shard_writer import ShardWriter
from meshtron.data.shards import HEADER, Header, dtype_name
from meshtron.feed import open_training
from meshtron.initialize import init_weights
from meshtron.layers import compile_layers
from meshtron.loop import train_step
from meshtron.mesh import build_mesh
from meshtron.metrics import memory_gib, peak_flops
from meshtron.models import model_spec
from meshtron.models.llama import Llama, config_of
from meshtron.recipe import Recipe, load_recipe
from meshtron.resume import Progress

PHASES = ("forward", "loss", "backward", "reduce", "optimizer", "data", "other")


class Marks:
    """Points in a device's time; the span before each belongs to the phase it is named for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.points: list[tuple[str, Any]] = []

    def __call__(self, phase: str) -> None:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.points.append((phase, event))
        else:
            self.points.append((phase, time.perf_counter()))

    def milliseconds(self, steps: int) -> dict[str, float]:
        """Mean time of each phase over ``steps`` steps."""
        synchronize(self.device)
        totals: dict[str, float] = defaultdict(float)
        for (_, before), (phase, point) in zip(self.points, self.points[1:], strict=False):
            span = before.elapsed_time(point) if self.device.type == "cuda" else 1e3 * (point - before)
            totals[phase] += span / steps
        return {phase: totals[phase] for phase in PHASES}


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def random_data(recipe: Recipe, folder: Path, samples: int) -> Recipe:
    """The recipe on freshly written shards of random ids, enough for ``samples`` sequences.

    Id k comes up about 1 / (k + 1) of the time, as words do: how often ids repeat tells on the embedding's gradient.
    """
    vocab, length = recipe.model.vocab_size, recipe.training.seq_len
    random = np.random.default_rng(0)
    folder.mkdir()
    writer = ShardWriter(folder, vocab_size=vocab)
    for _ in range(samples + 1):
        ids = np.exp(random.random(length + 1) * np.log(vocab)).astype(np.int64) - 1
        writer.append(ids, np.array([length + 1]))
    writer.close()
    header = Header(
        dtype=dtype_name(vocab), vocab_size=vocab, eos_id=0, tokenizer_hash="", shards=tuple(writer.shards)
    )
    (folder / HEADER).write_text(header.dumps())
    values = recipe.model_dump()
    values["data"]["train"] = [{"path": str(folder)}]
    return Recipe(**values)


def measure(job: Job, stream: Any, warmup: int, steps: int) -> dict[str, Any]:
    """Milliseconds a step, their phases, and peak memory, of the real loop's ``train_step``."""
    progress = Progress()
    outcome = None
    for _ in range(warmup):
        outcome = train_step(job, stream, progress)
    synchronize(job.device)
    if job.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(job.device)
    started = time.perf_counter()
    for _ in range(steps):
        outcome = train_step(job, stream, progress)
    synchronize(job.device)
    result: dict[str, Any] = {
        "step_ms": 1e3 * (time.perf_counter() - started) / steps,
        "memory_gib": memory_gib(job.device),
    }
    if outcome is not None:
        result["loss"], result["grad_norm"] = outcome.loss.item(), outcome.grad_norm.item()
    if job.recipe.parallel.pp == 1:
        marks = Marks(job.device)
        mark_phases(job, stream, marks)
        marks("other")
        for _ in range(steps):
            train_step(job, stream, progress)
            marks("other")
        result["phases_ms"] = marks.milliseconds(steps)
    return result


def measure_kernels(job: Job, stream: Any, steps: int, most: int) -> dict[str, Any]:
    """Device time of a step by kind of kernel, and of the ``most`` longest ones, in milliseconds."""
    progress = Progress()
    train_step(job, stream, progress)
    synchronize(job.device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            train_step(job, stream, progress)
        synchronize(job.device)
    times: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for event in profile.key_averages():
        times[event.key][0] += event.self_device_time_total / 1e3 / steps
        times[event.key][1] += event.count / steps
    kinds: dict[str, float] = defaultdict(float)
    for name, (ms, _) in times.items():
        kinds[kind_of(name)] += ms
    spans = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profile.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    longest = sorted(times.items(), key=lambda item: -item[1][0])[:most]
    return {
        "kinds_ms": {kind: round(ms, 3) for kind, ms in sorted(kinds.items(), key=lambda item: -item[1])},
        "exposed_communication_ms": exposed(spans) / 1e3 / steps,
        "kernels_ms": [[name[:120], round(ms, 3), count] for name, (ms, count) in longest],
    }


def mark_phases(job: Job, stream: Any, marks: Marks) -> None:
    """Wrap the parts of a step so that each marks its end."""
    model = job.model.stages[0]

    def before_forward(*_: Any) -> None:
        marks("backward" if marks.points[-1][0] == "loss" else "other")

    model.register_forward_pre_hook(before_forward)
    model.register_forward_hook(lambda *_: marks("forward"))
    _mark_after(stream, "batch", marks, "data")
    _mark_after(job.runner, "loss_fn", marks, "loss")
    _mark_after(job.runner, "step", marks, "backward")
    _mark_after(job.optimizer, "clip_grad_norm", marks, "reduce")
    _mark_after(job.optimizer, "step", marks, "optimizer")


def _mark_after(owner: Any, name: str, marks: Marks, phase: str) -> None:
    original: Callable[..., Any] = getattr(owner, name)

    def marked(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        marks(phase)
        return result

    setattr(owner, name, marked)


def measure_plain(recipe: Recipe, stream: Any, device: torch.device, warmup: int, steps: int) -> dict[str, Any]:
    """The same training run as a plain torch script has it: fp32 weights, autocast, whole logits, fused AdamW."""
    training, optim = recipe.training, recipe.optimizer
    model: nn.Module = Llama(config_of(model_section(recipe))).to(device)
    init_weights([model], seed=recipe.run.seed)
    if training.compile:
        compile_layers(model.layers, tensor_parallel=False)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay, fused=True
    )
    narrow = training.param_dtype == "bfloat16"
    micro = training.micro_batch_size

    def step(samples: int) -> None:
        batch = stream.batch(samples).to(device)
        optimizer.zero_grad(set_to_none=True)
        for tokens, labels in zip(batch.tokens.split(micro), batch.labels.split(micro), strict=True):
            with torch.autocast(device.type, torch.bfloat16, enabled=narrow):
                logits = model(tokens)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
            (loss / batch.labels.numel()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), optim.grad_clip)
        optimizer.step()

    size = training.global_batch_size
    for number in range(warmup):
        step(number * size)
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    started = time.perf_counter()
    for number in range(warmup, warmup + steps):
        step(number * size)
    synchronize(device)
    return {"step_ms": 1e3 * (time.perf_counter() - started) / steps, "memory_gib": memory_gib(device)}


def measure_torchtitan(recipe: Recipe, steps: int) -> dict[str, Any]:
    """The same shape and batch through an installed torchtitan, in a process of its own, from its log."""
    variables = torchtitan_rows.environment(recipe)
    variables["PYTHONPATH"] = os.pathsep.join([variables["PYTHONPATH"], *filter(None, sys.path)])
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    command = [*launcher, *torchtitan_rows.command(recipe, steps=steps)]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            command, env=os.environ | variables, cwd=folder, capture_output=True, text=True, errors="replace"
        )
    found = torchtitan_rows.figures(done.stdout + done.stderr)
    if done.returncode or not found:
        sys.exit(f"torchtitan ended with status {done.returncode}:\n{done.stderr[-3000:]}")
    tokens = recipe.training.global_batch_size * recipe.training.seq_len
    return {"step_ms": 1e3 * tokens / found["tokens_per_s"], "memory_gib": found["memory_gib"]}


def add_rates(result: dict[str, Any], recipe: Recipe, device: torch.device) -> None:
    """Tokens a second, FLOP/s and MFU of one device."""
    training = recipe.training
    tokens_per_s = training.global_batch_size * training.seq_len / result["step_ms"] * 1e3 / world.world_size()
    spec = model_spec(recipe.model.family)
    flops = tokens_per_s * spec.flops_per_token(model_section(recipe), training.seq_len)
    peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    result |= {"tokens_per_s": tokens_per_s, "tflops": flops / 1e12, "mfu": flops / peak if peak else None}


def show(results: dict[str, dict[str, Any]], title: str) -> None:
    """Print the figures as a table."""
    table = Table(title=title)
    rows = ("tokens/s", "MFU", "TFLOP/s", "peak GiB", "ms a step", *PHASES)
    table.add_column("a device")
    columns = []
    for name, result in results.items():
        table.add_column(name, justify="right")
        mfu = f"{result['mfu']:.1%}" if result["mfu"] else "unknown peak"
        phases = result.get("phases_ms", {})
        columns.append(
            [
                f"{result['tokens_per_s']:,.0f}",
                mfu,
                f"{result['tflops']:,.4g}",
                f"{result['memory_gib']:.1f}",
                f"{result['step_ms']:.1f}",
                *(f"{phases[phase]:.1f}" if phase in phases else "" for phase in PHASES),
            ]
        )
    for row, name in enumerate(rows):
        table.add_row(name, *(column[row] for column in columns))
    Console(width=100).print(table)


def measure_ours(options: argparse.Namespace, recipe: Recipe, device: torch.device) -> dict[str, Any]:
    """The recipe through the real loop."""
    job = build_job(recipe, device)
    with closing(open_training(recipe, job.mesh, device)) as stream:
        result = measure(job, stream, options.warmup, options.steps)
        if options.kernels:
            result |= measure_kernels(job, stream, 3, options.kernels)
    return result


def run(options: argparse.Namespace, recipe: Recipe) -> Iterator[tuple[str, dict[str, Any]]]:
    """Measure what was asked for, one after another on this device; each result as soon as it is there."""
    device = world.pick_device(recipe.run.device)
    if options.against == "torchtitan":  # first, while this process holds nothing on the device
        theirs = measure_torchtitan(recipe, options.steps)
        add_rates(theirs, recipe, device)
        yield "torchtitan", theirs
    with world.process_group(device):
        ours = measure_ours(options, recipe, device)
        add_rates(ours, recipe, device)
        yield "meshtron", ours
        if options.against == "plain":
            gc.collect()  # hooks and parameters hold one another; their memory is wanted now
            mesh = build_mesh(layout_of(recipe), device.type)
            with closing(open_training(recipe, mesh, device)) as stream:
                plain = measure_plain(recipe, stream, device, options.warmup, options.steps)
            add_rates(plain, recipe, device)
            yield "plain torch", plain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--steps", type=int, default=20, help="steps that are timed")
    parser.add_argument("--warmup", type=int, default=5, help="steps before, which compile")
    parser.add_argument("--against", choices=["plain", "torchtitan"], help="run the same shape through this too")
    parser.add_argument("--random-data", action="store_true", help="write random token shards and read those")
    parser.add_argument("--kernels", type=int, default=0, help="show this many of the GPU's longest kernels")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_intermixed_args()
    recipe = load_recipe(options.recipe, options.overrides).resolve(world.world_size())
    if options.against == "torchtitan":
        if reason := torchtitan_rows.missing():
            parser.error(reason)
        if world.world_size() > 1 or recipe.model.family != "llama":
            parser.error("--against torchtitan compares a Llama on one GPU; multi_gpu.py has the rows of several")
    with tempfile.TemporaryDirectory() as folder:
        if options.random_data:
            samples = recipe.training.global_batch_size * (2 * options.steps + options.warmup + 4)
            recipe = random_data(recipe, Path(folder) / "data", samples)
        cuda = torch.cuda.is_available()
        where = torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine()
        title = f"{recipe.run.name}, {where}, torch {torch.__version__}, {date.today()}"
        results: dict[str, dict[str, Any]] = {}
        for name, result in run(options, recipe):
            results[name] = result
            if options.json and world.rank() == 0:
                content = {"title": title, "recipe": recipe.model_dump(mode="json"), **results}
                options.json.write_text(json.dumps(content))
    if world.rank() != 0:
        return
    show(results, title)
    for kind, ms in results["meshtron"].get("kinds_ms", {}).items():
        print(f"{ms:9.3f} ms a step  {kind}")
    for name, ms, count in results["meshtron"].get("kernels_ms", []):
        print(f"{ms:9.3f} ms {count:7.1f} x  {name}")


if __name__ == "__main__":
    main()
