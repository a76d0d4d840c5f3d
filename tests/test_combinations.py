"""Every option with every other: a generated table in which each pair of values meets, against plain torch."""

import functools
import itertools

import pytest
import torch

from meshtron.errors import MeshtronError
from meshtron.testing import run_ranks
from tests.combinations import plain, recipe_of, sharded
from tests.pairwise import Row, covering_rows

TOLERANCE = {"float32": 1e-5, "float64": 1e-10}
FACTORS = {
    "mesh": [
        "1x1x1",
        "1x2x1",
        "1x1x2",
        "1x4x1",
        "1x1x4",
        "1x2x2",
        "2x1x1 AFAB",
        "2x1x2 1F1B",
        "4x1x1 1F1B",
        "2x2x1 Interleaved1F1B",
        "2x1x2 LoopedBFS",
        "2x1x1 InterleavedZeroBubble",
        "2x1x2 ZBVZeroBubble",
        "2x1x1 DualPipeV",
        "2x2x2 1F1B",
    ],
    "labels": ["ragged", "all", "idle"],
    "data.document_mask": [False, True],
    "model.tie_word_embeddings": [False, True],
    "model.vocab_size": [96, 101],
    "model.num_hidden_layers": [4, 5],
    "model.num_key_value_heads": [4, 2],
    "model.attention_bias": [False, True],
    "parallel.zero": [1, 0],
    "parallel.sequence_parallel": [True, False],
    # few and large: each tensor parallel micro-batch costs dozens of collectives, which a CPU does slowly
    "training.micro_batch_size": [2, 4],
    "training.activation_checkpointing": ["none", "selective", "full"],
    "training.param_dtype": ["float64", "float32"],
    "optimizer.grad_clip": [1e-3, 0.0],
    "optimizer.grad_norm": ["l2", "inf"],
}


def allowed(row: Row) -> bool:
    try:
        recipe_of(row).resolve(world_size(row))
    except MeshtronError:
        return False
    return True


def world_size(row: Row) -> int:
    pp, dp, tp = map(int, row["mesh"].partition(" ")[0].split("x"))
    return pp * dp * tp


@functools.cache
def table() -> dict[int, list[Row]]:
    """Rows by number of ranks."""
    rows = sorted(covering_rows(FACTORS, allowed), key=world_size)
    return {size: list(group) for size, group in itertools.groupby(rows, world_size)}


def run_rows(rows: list[Row]) -> list:
    return [sharded(row) for row in rows]


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_every_pair_of_options_equals_plain_torch(ranks):
    rows = table()[ranks]
    results = run_ranks(run_rows, ranks, rows, timeout_s=600)
    for row, curves in zip(rows, zip(*results, strict=True), strict=True):
        expected, tolerance = plain(row), TOLERANCE[row["training.param_dtype"]]
        whole = sum(weight.double().norm() ** 2 for weight in expected.weights.values()) ** 0.5
        held = set()
        for curve in curves:
            compare(curve.losses, expected.losses, f"loss of {row}", rtol=tolerance)
            compare(curve.norms, expected.norms, f"gradient norm of {row}", rtol=tolerance)
            for name, weight in curve.weights.items():
                # By norm, as `meshtron parity` does: Adam makes the float32 rounding of a gradient near zero as
                # large as a step, so single elements say little. In float64 single elements are compared too.
                difference = (weight.double() - expected.weights[name].double()).norm()
                size = max(expected.weights[name].double().norm(), 0.01 * whole)
                assert difference <= tolerance * size, f"{name} of {row}: {difference / size:.1e}"
                if weight.dtype == torch.float64:
                    compare(weight, expected.weights[name], f"{name} of {row}", atol=tolerance)
            held |= set(curve.weights)
        assert held == set(expected.weights)
        if row["model.tie_word_embeddings"]:
            ends = [curve.weights[name] for curve in curves for name in curve.weights if name in TIED]
            assert all(torch.equal(end, ends[0]) for end in ends), row


TIED = ("embed_tokens.weight", "lm_head.weight")


def compare(found, expected, what: str, *, rtol: float = 0.0, atol: float = 0.0) -> None:
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol, msg=lambda text: f"{what}: {text}")


def test_the_table_holds_every_pair_that_can_be():
    rows = [row for group in table().values() for row in group]
    met = {(a, row[a], b, row[b]) for row in rows for a, b in itertools.permutations(FACTORS, 2)}
    every = {(a, x, b, y) for a, b in itertools.combinations(FACTORS, 2) for x in FACTORS[a] for y in FACTORS[b]}
    never = every - met
    # What is missing is refused: micro-batches too few for a schedule.
    assert all({a, b} & {"mesh", "training.micro_batch_size"} for a, _, b, _ in never), never
    assert len(never) < 0.02 * len(every)
