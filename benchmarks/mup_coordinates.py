"""Coordinate check of muP: does the size of activations after a few steps depend on the width?

    python benchmarks/mup_coordinates.py --out docs/mup.svg

Trains Llamas of growing width on one batch, with and without ``model.mup_base_width``, and draws the root mean
square of the change in logits and last hidden states since initialisation. Flat lines mean that a learning rate
found at the base width holds at the others.
"""

import argparse
import math
from pathlib import Path

import torch
from torch.nn import functional as F

from meshtron.initialize import init_weights
from meshtron.models.llama_spec import LlamaSpec
from meshtron.optim import parameter_options

BASE, HEAD_DIM, VOCAB = 64, 16, 128


def changes(width: int, mup: bool, *, lr: float = 1e-2, steps: int = 5, layers: int = 2) -> dict[str, float]:
    """Root mean square of what ``steps`` of Adam change in the logits and in the hidden states before the head."""
    section = {
        "vocab_size": VOCAB,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // HEAD_DIM,
        "num_key_value_heads": width // HEAD_DIM,
        "head_dim": HEAD_DIM,
        "init_std": 1 / math.sqrt(BASE),
        "mup_base_width": BASE if mup else 0,
    }
    spec = LlamaSpec()
    model = spec.build(section)
    init_weights([model], seed=0, std=spec.init_std(section))
    options = parameter_options((), spec.lr_scale(section))
    groups = [{"params": [p], "lr": lr * options(name, p.shape)["lr_scale"]} for name, p in model.named_parameters()]
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.95))
    ids = torch.randint(VOCAB, (4, 33), generator=torch.Generator().manual_seed(0))
    seen: dict[str, torch.Tensor] = {}
    model.norm.register_forward_hook(lambda module, inputs, output: seen.update(hidden=inputs[0].detach()))
    first: dict[str, torch.Tensor] = {}
    for step in range(steps + 1):
        logits = model(ids[:, :-1])
        seen["logits"] = logits.detach()
        if step == 0:
            first = dict(seen)
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {name: (seen[name] - first[name]).square().mean().sqrt().item() for name in first}


def draw(curves: dict[str, dict[int, float]], path: Path) -> None:
    """A log-log chart as SVG."""
    left, top, across, down = 60, 20, 420, 260
    widths = sorted(next(iter(curves.values())))
    values = [value for curve in curves.values() for value in curve.values()]
    low, high = math.floor(math.log2(min(values))), math.ceil(math.log2(max(values)))

    def place(width: int, value: float) -> tuple[float, float]:
        right = math.log2(width / widths[0]) / math.log2(widths[-1] / widths[0])
        return left + across * right, top + down * (high - math.log2(value)) / (high - low)

    colours = {"logits": "#b3261e", "hidden": "#1a5fb4"}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + across + 190}" height="{top + down + 50}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<rect x="{left}" y="{top}" width="{across}" height="{down}" fill="none" stroke="#888"/>',
    ]
    for width in widths:
        x, _ = place(width, 2.0**low)
        parts.append(f'<text x="{x}" y="{top + down + 18}" text-anchor="middle">{width}</text>')
    for power in range(low, high + 1):
        _, y = place(widths[0], 2.0**power)
        parts.append(f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{2.0**power:g}</text>')
    parts.append(f'<text x="{left + across / 2}" y="{top + down + 38}" text-anchor="middle">hidden_size</text>')
    for number, (name, curve) in enumerate(curves.items()):
        colour = colours[name.split()[0]]
        dashes = "" if "muP" in name else ' stroke-dasharray="5 4"'
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(width, curve[width]) for width in widths))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>')
        y = top + 14 + 18 * number
        begin = left + across + 12
        parts.append(f'<path d="M{begin} {y - 4}h24" stroke="{colour}" stroke-width="2"{dashes}/>')
        parts.append(f'<text x="{begin + 30}" y="{y}">{name}</text>')
    path.write_text("\n".join([*parts, "</svg>"]) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/mup.svg"))
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256, 512])
    arguments = parser.parse_args()
    curves: dict[str, dict[int, float]] = {}
    for mup in (True, False):
        for width in arguments.widths:
            for name, value in changes(width, mup).items():
                curves.setdefault(f"{name}, {'muP' if mup else 'standard'}", {})[width] = value
    for name, curve in curves.items():
        print(f"{name:>20}  " + "  ".join(f"{width}: {value:.3f}" for width, value in curve.items()))
    draw({name.replace(",", ""): curve for name, curve in curves.items()}, arguments.out)


if __name__ == "__main__":
    main()
