"""What several GPUs of one host do: parity, speed at layouts, checkpoints, and the end of a run whose rank dies.

    python benchmarks/multi_gpu.py --gpus 4 --json FILE
    python benchmarks/multi_gpu.py --gpus 2 --device cpu            the harness itself, on gloo and the tiny recipe

    parity      every layout of N ranks against one process: losses, norms, gradients and weights (meshtron parity).
                In float64 they have to agree; float32 is there for its figures, as AdamW magnifies rounding
    speed       train_speed.py at layouts of the 1B and 8B shapes, on random shards; the loss after the same steps on
                the same data beside that of one GPU shows that bf16 training, too, does not depend on the layout
    checkpoint  stall of an async save (checkpoint.py); a resume at another layout beside the run that went on
    torchtitan  with --against torchtitan: an installed torchtitan at the 8B shape, FSDP2 and TP, as rows of the table
    kill        SIGKILL to one rank: seconds until torchrun and all ranks have ended

No part is started after --minutes; what was not run is said at the end. "of ideal" is tokens/s over N times those of
one GPU, for a pipeline times (m / (m + p - 1)), m micro-batches on p ranks, which no 1F1B schedule can exceed.
"exposed" is time in which a GPU runs communication kernels and no others, of rank 0, milliseconds a step.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torchtitan_rows as torchtitan
from layout_rows import SHAPES, Row, layouts, rows
from rich.console import Console
from rich.table import Table
from train_speed import random_data

from meshtron.recipe import dump_recipe, load_recipe

HERE = Path(__file__).parent
ROOT = HERE.parent
PARTS = ("parity", "speed", "checkpoint", "kill")


def torchrun(ranks: int, *command: str) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*launcher, *command]


def run(command: Sequence[str], seconds: float, log: Path, variables: Mapping[str, str] | None = None) -> bool:
    """Run to the end, output to ``log``; False if it failed or took longer than ``seconds``."""
    env = environment()
    if variables:
        env |= variables | {"PYTHONPATH": os.pathsep.join([env["PYTHONPATH"], variables.get("PYTHONPATH", "")])}
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True, env=env
        )
        try:
            return process.wait(timeout=max(1.0, seconds)) == 0
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return False


def environment() -> dict[str, str]:
    found = {"OMP_NUM_THREADS": "1", "PYTORCH_ALLOC_CONF": "expandable_segments:True"} | os.environ
    return found | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}


def last_lines(log: Path, most: int = 3) -> str:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return " / ".join(lines[-most:])[-400:]


class Bench:
    """One run of the benchmark: its options, folder and what it has found."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.gpus, self.device, self.folder = options.gpus, options.device, folder
        self.deadline = time.monotonic() + 60 * options.minutes
        self.steps = options.steps
        self.results: dict[str, Any] = {}
        self.not_run: list[str] = []

    def left(self) -> float:
        return self.deadline - time.monotonic()

    def why(self, log: Path) -> str:
        """What ended the program that wrote ``log``."""
        return last_lines(log) if self.left() > 0 else "cut off: no time left"

    def tiny(self, run_dir: Path, overrides: Sequence[str]) -> str:
        """A file with the tiny recipe on random shards."""
        base = [f"run.device={self.device}", f"run.dir={run_dir}", "training.global_batch_size=16", *overrides]
        data = self.folder / "tiny-data"
        recipe = load_recipe(ROOT / "recipes/tiny_llama.toml", base)
        if not data.exists():
            random_data(recipe, data, 2000)
        path = self.folder / f"{run_dir.name}-{len(list(self.folder.iterdir()))}.toml"
        path.write_text(dump_recipe(load_recipe(ROOT / "recipes/tiny_llama.toml", [*base, source(data)])))
        return str(path)

    def parity(self) -> None:
        names = ",".join(["1x1x1", *layouts(self.gpus)])
        recipe = self.tiny(self.folder / "parity", [])
        found = self.results["parity"] = {"layouts": names}
        for dtype in ("float64", "float32"):
            path, log = self.folder / f"parity-{dtype}.json", self.folder / f"parity-{dtype}.log"
            command = [sys.executable, "-m", "meshtron", "parity", recipe, "--layouts", names, "--dtype", dtype]
            same = run([*command, "--json", str(path)], self.left(), log)
            report = json.loads(path.read_text()) if path.exists() else {}
            found[dtype] = {"same": same, "report": report, "log": "" if same else last_lines(log)}

    def speed(self, shapes: Sequence[str]) -> None:
        table = self.results["speed"] = {}
        for row in rows(shapes, self.gpus):
            if self.left() < 20:
                self.not_run.append(row.name)
                continue
            path, log = self.folder / "speed.json", self.folder / "speed.log"
            path.unlink(missing_ok=True)
            program = [str(HERE / "train_speed.py"), str(ROOT / "recipes" / SHAPES[row.shape].recipe)]
            program += [*row.overrides(self.gpus), f"run.device={self.device}", "--random-data", "--json", str(path)]
            program += ["--steps", str(self.steps), "--warmup", "3"]
            program += ["--kernels", "1"] if self.device == "cuda" else []
            if run(torchrun(row.ranks, *program), self.left(), log):
                found = json.loads(path.read_text())["meshtron"]
                table[row.name] = {"row": row.__dict__, "total": found["tokens_per_s"] * row.ranks, **found}
            else:
                table[row.name] = {"row": row.__dict__, "error": self.why(log)}
            print(f"{row.name}: {table[row.name].get('total', table[row.name].get('error'))}", flush=True)

    def torchtitan(self) -> None:
        table = self.results.setdefault("speed", {})
        row = Row(shape="8b", dp=self.gpus)
        overrides = [*row.overrides(self.gpus), f"run.device={self.device}"]
        recipe = load_recipe(ROOT / "recipes" / SHAPES[row.shape].recipe, overrides).resolve(row.ranks)
        for name, command in torchtitan.commands(recipe, self.gpus, self.steps):
            if self.left() < 20:
                self.not_run.append(name)
                continue
            log = self.folder / "torchtitan.log"
            whole = run(torchrun(self.gpus, *command), self.left(), log, torchtitan.environment(recipe))
            found = torchtitan.figures(log.read_text(encoding="utf-8", errors="replace")) if whole else {}
            table[name] = (
                found | {"total": found["tokens_per_s"] * self.gpus} if found else {"error": last_lines(log)}
            )

    def checkpoint(self) -> None:
        log = self.folder / "checkpoint.log"
        command = [sys.executable, str(HERE / "checkpoint.py"), "--device", self.device, "--ranks", str(self.gpus)]
        whole = run([*command, "--gib", "4" if self.device == "cuda" else "0.1", "--repeats", "2"], self.left(), log)
        self.results["checkpoint"] = {"table": log.read_text().splitlines()[-3:] if whole else self.why(log)}
        steps = ["training.steps=8", "checkpoint.interval=4", "metrics.log_interval=1"]
        first = [*steps, f"parallel.dp={self.gpus}"]
        went_on = self.train("went-on", first)
        other = [
            *steps,
            f"parallel.tp={self.gpus}",
            f"checkpoint.resume={self.folder}/went-on/checkpoints/step-00000004",
        ]
        resumed = self.train("resumed", other)
        pairs = [(step, went_on[step], loss) for step, loss in resumed.items()]
        self.results["checkpoint"]["resume"] = {
            "losses": pairs,
            "largest difference": max((abs(a / b - 1) for _, a, b in pairs), default=None),
        }

    def train(self, name: str, overrides: Sequence[str]) -> dict[int, float]:
        """Losses by step of a run of the tiny recipe on all ranks."""
        log = self.folder / f"{name}.log"
        recipe = self.tiny(self.folder / name, overrides)
        if not run(torchrun(self.gpus, "train.py", recipe), self.left(), log):
            raise RuntimeError(f"{name}: {self.why(log)}")
        lines = (self.folder / name / "metrics.jsonl").read_text().splitlines()
        return {line["step"]: line["loss"] for line in map(json.loads, lines)}

    def kill(self) -> None:
        recipe = self.tiny(self.folder / "killed", ["training.steps=1000000", "metrics.log_interval=1"])
        command = torchrun(self.gpus, "train.py", recipe)
        with (self.folder / "kill.log").open("w") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, cwd=ROOT, env=environment())
            metrics = self.folder / "killed" / "metrics.jsonl"
            while not (metrics.exists() and metrics.stat().st_size) and self.left() > 0 and process.poll() is None:
                time.sleep(0.1)
            ranks = children(process.pid)
            started = time.monotonic()
            if ranks:
                os.kill(ranks[-1], signal.SIGKILL)
            status = process.wait(timeout=120)
            while any(Path(f"/proc/{rank}").exists() for rank in ranks):
                time.sleep(0.05)
        self.results["kill"] = {"ranks": len(ranks), "status": status, "seconds": time.monotonic() - started}


def source(data: Path) -> str:
    return f"data.train=[{{path='{data}'}}]"


def children(pid: int) -> list[int]:
    """Processes that ``pid`` has started (Linux)."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def show(bench: Bench) -> None:
    """Print what was found."""
    speed: dict[str, Any] = bench.results.get("speed", {})
    if speed:
        table = Table(title=f"{bench.gpus} x {device_name(bench.device)}, torch {torch.__version__}")
        for column in ("layout", "tokens/s", "MFU", "of ideal", "GiB", "exposed ms", "loss - one GPU's"):
            table.add_column(column, justify="left" if column == "layout" else "right")
        for name, found in speed.items():
            one = speed.get(f"{found['row']['shape']} 1x1x1", {}) if "row" in found else {}
            table.add_row(name, *columns(found, one, bench.gpus))
        Console(width=120).print(table)
    for dtype in ("float64", "float32"):
        found = bench.results.get("parity", {}).get(dtype)
        if found:
            print(f"parity in {dtype}:", "equal" if found["same"] else f"differs: {found['log']}")
    rest = {key: value for key, value in bench.results.items() if key not in ("speed", "parity")}
    print(json.dumps(rest, indent=1, default=str))
    print("not run:", ", ".join(bench.not_run) or "nothing")


def columns(found: dict[str, Any], one: dict[str, Any], gpus: int) -> list[str]:
    """A row of the table, from a layout's figures and those of one GPU."""
    if "error" in found:
        return ["failed"]
    ideal = None
    if "total" in one:
        row = Row(**found["row"])
        ideal = one["total"] * row.ranks * (row.bubble(gpus) if row.pp > 1 else 1.0)
    exposed = found.get("exposed_communication_ms")
    return [
        f"{found['total']:,.0f}",
        f"{found['mfu']:.1%}" if found.get("mfu") else "",
        f"{found['total'] / ideal:.1%}" if ideal else "",
        f"{found['memory_gib']:.1f}",
        f"{exposed:.1f}" if exposed is not None else "",
        f"{found['loss'] - one['loss']:+.2e}" if "loss" in one else "",
    ]


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "CPU rank"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, required=True, help="ranks, one a GPU")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, help="default: 1b 8b, on a CPU tiny")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of each layout")
    parser.add_argument("--minutes", type=float, default=9.5)
    parser.add_argument("--against", choices=("torchtitan",), help="measure it too, where it is installed")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    if options.device == "cuda" and torch.cuda.device_count() < options.gpus:
        parser.error(
            f"--gpus {options.gpus}: torch finds {torch.cuda.device_count()}; use --device cpu to try the harness"
        )
    if options.against and (reason := torchtitan.missing()):
        parser.error(reason)
    with tempfile.TemporaryDirectory(prefix="meshtron-gpus-") as folder:
        bench = Bench(options, Path(folder))
        for part in [*options.parts, *filter(None, [options.against])]:
            if bench.left() < 20:
                bench.not_run.append(part)
                continue
            print(f"{part} ...", flush=True)
            try:
                if part == "speed":
                    bench.speed(options.shapes or (["1b", "8b"] if options.device == "cuda" else ["tiny"]))
                else:
                    getattr(bench, part)()
            except Exception as error:  # the other parts are still wanted
                bench.results.setdefault(part, {})["error"] = repr(error)
            if options.json:
                options.json.write_text(json.dumps(bench.results | {"not_run": bench.not_run}, default=str))
    show(bench)
    failed = [part for part, found in bench.results.items() if "error" in found]
    exact = bench.results.get("parity", {}).get("float64", {"same": True})
    return 1 if failed or not exact["same"] else 0


if __name__ == "__main__":
    sys.exit(main())
