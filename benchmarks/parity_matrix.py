"""Random combinations of options, each compared with plain torch on one process.

    python benchmarks/parity_matrix.py [--rows 100] [--seed 0] [--schedules ZBVZeroBubble,DualPipeV]

The tests hold a small table in which every two options meet (tests/test_combinations.py); this draws any number of
rows from a wider one, and exits with status 1 if a row differs by more than 1e-5 in float32 or 1e-10 in float64.
"""

import argparse
import itertools
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # the plain reference is the tests'

from meshtron.errors import MeshtronError
from meshtron.parallel.schedules import SCHEDULES
from meshtron.testing import run_ranks
from tests.combinations import plain, recipe_of, sharded
from tests.layouts import Curve

TOLERANCE = {"float32": 1e-5, "float64": 1e-10}
FACTORS: dict[str, list[Any]] = {
    "layout": [
        f"{pp}x{dp}x{tp}" for pp, dp, tp in itertools.product((1, 2, 4), (1, 2, 4, 8), (1, 2, 4)) if pp * dp * tp <= 8
    ],
    "schedule": list(SCHEDULES),
    "labels": ["all", "ragged", "idle"],
    "data.document_mask": [False, True],
    "model.family": ["llama", "qwen2", "qwen3"],
    "model.tie_word_embeddings": [False, True],
    "model.vocab_size": [96, 101, 509],
    "model.num_hidden_layers": [4, 5, 7, 8],
    "model.num_key_value_heads": [4, 2],
    "model.attention_bias": [False, True],
    "parallel.zero": [1, 0],
    "parallel.sequence_parallel": [True, False],
    "training.micro_batch_size": [1, 2, 4],
    "training.activation_checkpointing": ["none", "selective", "full"],
    "training.compile": [False, False, False, True],  # seconds a row; torch 2.11 does not compile float64 attention
    "training.param_dtype": ["float64", "float32"],
    "training.loss_chunks": [0, 3],
    "optimizer.grad_clip": [1e-3, 1.0, 0.0],
    "optimizer.grad_norm": ["l2", "inf"],
}


def draw(rng: random.Random) -> dict[str, Any]:
    """One combination; with a single pipeline rank there is no schedule to choose."""
    row = {name: rng.choice(values) for name, values in FACTORS.items()}
    layout, schedule = row.pop("layout"), row.pop("schedule")
    return {"mesh": layout if layout.startswith("1x") else f"{layout} {schedule}"} | row


def world_size(row: dict[str, Any]) -> int:
    """Ranks that a combination takes."""
    pp, dp, tp = map(int, row["mesh"].partition(" ")[0].split("x"))
    return pp * dp * tp


def difference(curves: list[Curve], expected: Curve) -> float:
    """Largest relative difference of any rank's losses, norms and weights; a weight's is that of its norm."""
    whole = sum(weight.double().norm() ** 2 for weight in expected.weights.values()) ** 0.5
    found = []
    for curve in curves:
        pairs = zip(curve.losses + curve.norms, expected.losses + expected.norms, strict=True)
        found += [abs(ours - theirs) / max(abs(theirs), 1e-30) for ours, theirs in pairs]
        for name, weight in curve.weights.items():
            reference = expected.weights[name].double()
            found.append(float((weight.double() - reference).norm() / max(reference.norm(), 0.01 * whole)))
    return max(value if value == value else float("inf") for value in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100, help="combinations to run")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--schedules", default="", help="draw rows with these only, separated by commas")
    options = parser.parse_args()
    wanted = options.schedules.split(",") if options.schedules else []
    rng, refused, wrong = random.Random(options.seed), 0, 0
    worst = dict.fromkeys(TOLERANCE, 0.0)
    done: Counter[str] = Counter()
    schedules: Counter[str] = Counter()
    while done.total() < options.rows:
        row = draw(rng)
        if wanted and row["mesh"].partition(" ")[2] not in wanted:
            continue
        try:
            recipe_of(row).resolve(world_size(row))
        except MeshtronError:
            refused += 1
            continue
        dtype = row["training.param_dtype"]
        found = difference(run_ranks(sharded, world_size(row), row, timeout_s=600), plain(row))
        worst[dtype] = max(worst[dtype], found)
        layout, _, schedule = row["mesh"].partition(" ")
        done[layout] += 1
        schedules[schedule or "none"] += 1
        differs = found > TOLERANCE[dtype]
        wrong += differs
        print(f"{found:.1e} {'DIFFERS ' if differs else ''}{row}", flush=True)
    largest = ", ".join(f"{value:.1e} in {dtype}" for dtype, value in worst.items())
    print(f"{done.total()} combinations at {len(done)} layouts, largest difference {largest}; {wrong} differ")
    print("rows by schedule:", ", ".join(f"{name} {count}" for name, count in sorted(schedules.items())))
    print(f"{refused} other draws were refused before they started")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
