"""How near does a run stay to the same run in other numerics? Losses of every step, compared with a stated band.

    python examples/demo.py                 prepares data/python_stdlib, among other things
    python benchmarks/loss_band.py recipes/tiny_llama.toml training.steps=500 --dir runs/bf16_band
        --base training.param_dtype=float32 --against training.param_dtype=bfloat16 [--float32-products]

Keys after the recipe hold for all runs, --base for the first, each --against (several keys with spaces between them,
in quotes) for one more. All start from the same weights and see the same batches. The exit status is 1 if the mean
loss of any ``WINDOW`` steps is further from the first run's than the band, or if a run gains less than nine tenths of
what the first one gains in its second half. A run that has ended is not repeated.
"""

import argparse
import gc
import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from meshtron.launch import reported_errors
from meshtron.loop import train
from meshtron.recipe import load_recipe

WINDOW = 25


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


def losses(recipe: str, folder: Path, overrides: Sequence[str]) -> torch.Tensor:
    """The loss of each step of a run in ``folder``, which is made first where it has not been."""
    train(load_recipe(recipe, [*overrides, f"run.dir={folder}", "metrics.log_interval=1"]))
    gc.collect()  # models and their hooks hold one another; a GPU's memory is wanted for the next run
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return torch.tensor([json.loads(line)["loss"] for line in lines], dtype=torch.float64)


def compare(name: str, curve: torch.Tensor, base: torch.Tensor, options: argparse.Namespace) -> bool:
    """Print how far ``curve`` is from ``base``; whether it keeps to the band."""
    apart = (curve - base).abs()
    windows = (curve - base).unfold(0, WINDOW, 1).mean(dim=1).abs()
    early = options.early_steps
    highest, later = windows[:early].max(), windows[early:].max()
    half = len(base) // 2
    of_base, gain = (
        (losses[half - WINDOW : half].mean() - losses[-WINDOW:].mean()).item() for losses in (base, curve)
    )
    print(f"{name}: {curve[0]:.4f} -> {curve[-WINDOW:].mean():.4f}")
    single, rest = apart[:early].max(), apart[early:].max()
    print(f"  single steps differ by {single:.4f} at most in the first {early}, {rest:.4f} later")
    print(
        f"  means of {WINDOW} steps differ by {highest:.4f} (band {options.early_band}) and {later:.4f} "
        f"(band {options.band})"
    )
    print(f"  gain of the second half: {gain:.4f}, the first run's {of_base:.4f}")
    return bool(highest <= options.early_band and later <= options.band and gain >= 0.9 * of_base)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of all runs; more than 150 steps")
    parser.add_argument("--base", default="", metavar="KEYS", help="of the first run")
    parser.add_argument("--against", action="append", required=True, metavar="KEYS", help="of one other run each")
    parser.add_argument("--dir", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--band", type=float, default=0.02, help="nats a token, default %(default)s")
    parser.add_argument("--early-band", type=float, default=0.06, help="while the loss falls by tenths a step")
    parser.add_argument("--early-steps", type=int, default=50, help="how long that is, default %(default)s")
    parser.add_argument("--float32-products", action="store_true", help="see Float32Products")
    options = parser.parse_intermixed_args()
    with reported_errors(), Float32Products() if options.float32_products else nullcontext():
        base, *others = (
            losses(options.recipe, options.dir / str(number), [*options.overrides, *keys.split()])
            for number, keys in enumerate([options.base, *options.against])
        )
    print(f"{options.base or 'the recipe'}: {base[0]:.4f} -> {base[-WINDOW:].mean():.4f}")
    print(f"  (the first step's loss, and the mean of the last {WINDOW} of {len(base)})")
    kept = [compare(name, curve, base, options) for name, curve in zip(options.against, others, strict=True)]
    sys.exit(not all(kept))


if __name__ == "__main__":
    main()
