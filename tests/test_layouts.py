"""The promise: at every layout the numbers are those of one process that runs plain torch."""

import functools
import itertools

import pytest
import torch

from meshtron.mesh import Layout
from meshtron.testing import run_ranks
from tests.layouts import Case, Curve, plain_run, sharded_run, small_config, stages_for

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
LAYOUTS = [
    Layout(pp=pp, dp=dp, tp=tp)
    for pp, dp, tp in itertools.product((1, 2, 4), repeat=3)
    if pp * dp * tp in (1, 2, 4, 8)
]


@functools.cache
def reference(**changes) -> Curve:
    return plain_run(Case(layout=Layout(), **changes))


def run_cases(cases: list[Case]) -> list[Curve]:
    return [sharded_run(case) for case in cases]


def assert_same(curves: list[Curve], expected: Curve, dtype: torch.dtype) -> None:
    """Every rank's losses and norms to relative tolerance, every weight any rank holds to absolute tolerance."""
    tolerance = TOLERANCE[dtype]
    held = set()
    for curve in curves:
        torch.testing.assert_close(curve.losses, expected.losses, rtol=tolerance, atol=0)
        torch.testing.assert_close(curve.norms, expected.norms, rtol=tolerance, atol=0)
        for name, weight in curve.weights.items():
            torch.testing.assert_close(weight, expected.weights[name], rtol=0, atol=tolerance, msg=name)
        held |= set(curve.weights)
    assert held == set(expected.weights)


def large_micro_batch(layout: Layout, stages_per_rank: int = 1) -> int:
    """As few micro-batches as still accumulate and fill the pipeline: tensor parallel ones are slow on a CPU."""
    return 16 // layout.dp // max(layout.pp * stages_per_rank, 2)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_equals_one_plain_process(layout):
    cases = [Case(layout=layout, micro_batch=large_micro_batch(layout), dtype=dtype) for dtype in TOLERANCE]
    ranks = run_ranks(run_cases, layout.world_size, cases)
    for case, curves in zip(cases, zip(*ranks, strict=True), strict=True):
        assert_same(list(curves), reference(dtype=case.dtype), case.dtype)


OPTIONS = [
    # layout, schedule, what else differs from the plain case
    ("2x4x1", "AFAB", {"micro_batch": 1, "zero": 0}),
    ("2x2x2", "1F1B", {"micro_batch": 4, "zero": 0, "sequence_parallel": False}),
    ("2x2x2", "Interleaved1F1B", {"micro_batch": 2, "sequence_parallel": False}),
    ("4x1x2", "1F1B", {"sequence_parallel": False}),
    ("1x2x4", "1F1B", {"micro_batch": 4, "masked": True}),
    ("1x4x1", "1F1B", {"micro_batch": 1, "zero": 0, "masked": True}),
    ("2x1x4", "AFAB", {"micro_batch": 4, "masked": True}),
    ("2x4x1", "Interleaved1F1B", {"micro_batch": 1, "masked": True}),
    ("2x1x2", "1F1B", {"num_hidden_layers": 5}),
    ("4x1x1", "1F1B", {"num_hidden_layers": 7, "micro_batch": 2}),
    ("2x1x1", "Interleaved1F1B", {"num_hidden_layers": 7, "micro_batch": 2}),
    ("1x2x2", "1F1B", {"vocab_size": 101, "num_key_value_heads": 2}),
    ("2x2x2", "ZBVZeroBubble", {"masked": True}),
    ("2x2x2", "DualPipeV", {"micro_batch": 2}),
    ("2x2x2", "InterleavedZeroBubble", {"micro_batch": 2}),
    ("2x2x2", "1F1B", {"tie_word_embeddings": True}),
    ("2x2x2", "ZBVZeroBubble", {"tie_word_embeddings": True}),
    ("2x2x2", "1F1B", {"qk_norm": True, "sliding_window": 5}),
    ("1x2x2", "1F1B", {"qk_norm": True, "qkv_bias": True, "sequence_parallel": False}),
    ("2x1x2", "1F1B", {"attention_bias": True}),
]


@pytest.mark.parametrize(("layout", "schedule", "changes"), OPTIONS, ids=str)
def test_options_equal_one_plain_process(layout, schedule, changes):
    mesh, stages_per_rank = Layout.parse(layout), stages_for(schedule)
    sizes = {key: changes[key] for key in changes if key in small_config().__dict__}
    options = {"config": small_config(**sizes), "micro_batch": large_micro_batch(mesh, stages_per_rank)}
    options |= {key: changes[key] for key in changes if key not in sizes}
    case = Case(layout=mesh, schedule=schedule, stages_per_rank=stages_per_rank, steps=2, **options)
    expected = plain_run(case)
    curves = run_ranks(sharded_run, case.layout.world_size, case)
    assert_same(curves, expected, case.dtype)
    if case.config.tie_word_embeddings:
        ends = [curve.weights[name] for curve in curves for name in curve.weights if name in TIED]
        assert all(torch.equal(end, ends[0]) for end in ends)


TIED = ("embed_tokens.weight", "lm_head.weight")


def test_initial_weights_are_bit_equal_at_all_layouts():
    expected = plain_run(Case(layout=Layout(), steps=0, dtype=torch.float32)).weights
    for text in ("2x2x2", "4x1x2", "1x1x4"):
        case = Case(layout=Layout.parse(text), steps=0, dtype=torch.float32)
        for curve in run_ranks(sharded_run, case.layout.world_size, case):
            for name, weight in curve.weights.items():
                assert torch.equal(weight, expected[name]), name
