"""Does training in bfloat16 follow float32? The tiny recipe in both, with the loss of every step compared.

    python examples/demo.py                 prepares data/python_stdlib, among other things
    python benchmarks/bf16_band.py [--steps 500] [--dir runs/bf16_band] [--float32-products]

Both runs start from the same weights and see the same batches. The exit status is 1 if the mean loss of any
``WINDOW`` steps is further from float32's than the band, or if bfloat16 gains less than nine tenths of what float32
gains in the second half. A run that has ended is not repeated.
"""

import argparse
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from meshtron.cli import train_main

EARLY, BAND, EARLY_STEPS = 0.06, 0.02, 50
"""Nats a token, in the first ``EARLY_STEPS`` steps, where the loss falls by tenths a step, and after them."""
WINDOW = 25
RECIPE = Path(__file__).parent.parent / "recipes" / "tiny_llama.toml"


class Float32Products(TorchDispatchMode):
    """Matrix products of bfloat16 summed in float32 and rounded once, which is what tensor cores do.

    For CPUs without instructions for bfloat16, where torch's own take up to a hundred times as long.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in (torch.ops.aten.mm.default, torch.ops.aten.mm.out) or args[0].dtype != torch.bfloat16:
            return func(*args, **kwargs)
        product = torch.mm(args[0].float(), args[1].float())
        return kwargs["out"].copy_(product) if "out" in kwargs else product.bfloat16()


def losses(folder: Path, dtype: str, steps: int) -> torch.Tensor:
    """The loss of each step of the recipe in ``dtype``, run first where it has not been."""
    overrides = [f"run.dir={folder / dtype}", f"training.param_dtype={dtype}", f"training.steps={steps}"]
    train_main([str(RECIPE), *overrides, "metrics.log_interval=1", "checkpoint.interval=100"])
    lines = (folder / dtype / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return torch.tensor([json.loads(line)["loss"] for line in lines], dtype=torch.float64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500, help="more than 150")
    parser.add_argument("--dir", type=Path, default=Path("runs/bf16_band"))
    parser.add_argument("--float32-products", action="store_true", help="see Float32Products")
    options = parser.parse_args()
    with Float32Products() if options.float32_products else nullcontext():
        wide, narrow = (losses(options.dir, dtype, options.steps) for dtype in ("float32", "bfloat16"))
    apart = (narrow - wide).abs()
    windows = (narrow - wide).unfold(0, WINDOW, 1).mean(dim=1).abs()
    early, later = windows[:EARLY_STEPS].max(), windows[EARLY_STEPS:].max()
    half = options.steps // 2
    gains = [(curve[half - WINDOW : half].mean() - curve[-WINDOW:].mean()).item() for curve in (wide, narrow)]
    print(f"float32  {wide[0]:.4f} -> {wide[-WINDOW:].mean():.4f} over the last {WINDOW} of {options.steps} steps")
    print(f"bfloat16 {narrow[0]:.4f} -> {narrow[-WINDOW:].mean():.4f}")
    first, rest = apart[:EARLY_STEPS].max(), apart[EARLY_STEPS:].max()
    print(f"single steps differ by {first:.4f} at most in the first {EARLY_STEPS}, {rest:.4f} later")
    print(f"means of {WINDOW} steps differ by {early:.4f} (band {EARLY}) and {later:.4f} (band {BAND})")
    print(f"gain of the second half: {gains[0]:.4f} in float32, {gains[1]:.4f} in bfloat16")
    sys.exit(not (early <= EARLY and later <= BAND and gains[1] >= 0.9 * gains[0]))


if __name__ == "__main__":
    main()
