"""What a checkpoint costs: the stall of an async save beside a sync one, and GB/s of save, verify and load.

    python benchmarks/checkpoint.py --gib 1 --ranks 1 8

The state is that of a model with float32 masters and two moments, sharded by rows over all ranks, and one tensor in
eight replicated, as norms and small models under zero = 0 are. Between saves the ranks work on matrix products, as
training would, so that the background thread has to share the processor with them. The first save of each kind, which
allocates the staging buffer, is shown apart from the others.
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from meshtron.checkpoint import Checkpointer, load, read_manifest, step_folder, verify
from meshtron.testing import run_ranks

_COLUMNS = 1024
_TENSORS = 48


def state(gib: float, device: str) -> dict[str, torch.Tensor]:
    """``gib`` GiB over all ranks, in float32."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    size = dist.get_world_size()
    rows = max(size, int(gib * 2**30 / 4 / _COLUMNS / _TENSORS) // size * size)
    tensors: dict[str, torch.Tensor] = {}
    for number in range(_TENSORS):
        replicated = number % 8 == 7
        local = torch.rand(rows if replicated else rows // size, _COLUMNS, device=device)
        placement = Replicate() if replicated else Shard(0)
        tensors[f"tensor{number}"] = DTensor.from_local(local, mesh, [placement], run_check=False)
    return tensors


def timed(work: Callable[[], object]) -> float:
    """Seconds that ``work`` takes the slowest rank."""
    dist.barrier()
    started = time.perf_counter()
    work()
    seconds = torch.tensor(time.perf_counter() - started)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def compute(device: str, seconds: float) -> None:
    """Matrix products for about ``seconds``."""
    matrix, started = torch.rand(512, 512, device=device), time.perf_counter()
    while time.perf_counter() - started < seconds:
        matrix = (matrix @ matrix).clamp(max=1)


def measure(folder: str, gib: float, device: str, repeats: int) -> dict[str, float]:
    """One rank's part of the benchmark; figures are the same on every rank."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // dist.get_world_size()))
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    tensors = state(gib, device)
    figures: dict[str, float] = {}
    stalls, whole = {}, {}
    for async_save in (False, True):
        with Checkpointer(folder, keep_last=1, async_save=async_save) as checkpointer:
            stalls[async_save], whole[async_save] = [], []
            for step in range(1, repeats + 2):
                compute(device, 0.2)
                if device == "cuda":
                    torch.cuda.synchronize()
                stall = timed(lambda step=step, saver=checkpointer: saver.save(step, tensors, {"step": step}))
                compute(device, 0.2)
                stalls[async_save].append(stall)
                whole[async_save].append(stall + timed(checkpointer.wait))
    newest = step_folder(Path(folder), repeats + 1)
    sizes = [record.size for name, record in read_manifest(newest).files.items() if name.startswith("rank-")]
    gigabytes = sum(sizes) / 1e9
    figures["GB"] = gigabytes
    figures["bytes_ratio"] = max(sizes) / min(sizes)
    figures["sync_s"] = statistics.median(stalls[False][1:])
    figures["async_first_s"] = stalls[True][0]
    figures["async_s"] = statistics.median(stalls[True][1:])
    figures["save_gb_s"] = gigabytes / figures["sync_s"]
    figures["verify_gb_s"] = gigabytes / statistics.median(timed(lambda: verify(newest)) for _ in range(3))
    only_load = statistics.median(timed(lambda: load(newest, tensors, check_hashes=False)) for _ in range(3))
    figures["load_gb_s"] = gigabytes / only_load
    figures["checked_load_gb_s"] = gigabytes / statistics.median(
        timed(lambda: load(newest, tensors)) for _ in range(3)
    )
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gib", type=float, default=1.0, help="size of a checkpoint")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", help="where to write; default: a temporary folder")
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, torch {torch.__version__}, {options.device}, median of {options.repeats} saves")
    print("GB/s: save is sync, fsync included; verify and load read from the page cache where it holds the files")
    print()
    print(
        "| ranks | GB | sync save s | async stall s (first) | stall of sync | save GB/s | verify GB/s | load GB/s | "
        "load with hashes GB/s | most/least bytes a rank |"
    )
    print("|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
    for ranks in options.ranks:
        folder = tempfile.mkdtemp(dir=options.folder)
        try:
            one = run_ranks(measure, ranks, folder, options.gib, options.device, options.repeats, timeout_s=600)[0]
        finally:
            shutil.rmtree(folder)
        stall = f"{one['async_s']:.3f} ({one['async_first_s']:.3f}) | {one['async_s'] / one['sync_s']:.1%}"
        speeds = [one[f"{kind}_gb_s"] for kind in ("save", "verify", "load", "checked_load")]
        columns = [f"{one['sync_s']:.3f}", stall, *(f"{speed:.2f}" for speed in speeds), f"{one['bytes_ratio']:.2f}"]
        print(f"| {ranks} | {one['GB']:.2f} | {' | '.join(columns)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
