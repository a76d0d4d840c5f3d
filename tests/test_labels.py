"""Rows with few labels, dp ranks and whole steps without any: the loss is the mean over the global batch's labels."""

import functools

import pytest
import torch

from meshtron.testing import run_ranks
from tests.labels import options_of, plain, sharded

reference = functools.cache(plain)
SAID = ["step 3: no token of the batch has a loss, so weights stay as they are"]
# (pp, dp, micro-batches, tp) by number of ranks; benchmarks/label_grid.py has all of them
CELLS = {
    1: [(1, 1, 1, 1), (1, 1, 4, 1)],
    2: [(2, 1, 2, 1), (1, 2, 1, 1)],
    4: [(1, 4, 2, 1), (2, 2, 4, 1), (4, 1, 1, 1)],
    8: [(4, 2, 4, 1), (2, 4, 1, 1), (2, 2, 2, 2)],
}


def run_cells(options: list[dict]) -> list:
    return [sharded(one) for one in options]


@pytest.mark.parametrize("ranks", CELLS)
def test_uneven_labels_count_once_at_every_layout(ranks):
    options = [options_of(pp, dp, parts, "float64", tp) for pp, dp, parts, tp in CELLS[ranks]]
    expected = reference("float64")
    assert expected.losses[2] == expected.norms[2] == 0
    for cells in run_ranks(run_cells, ranks, options):
        for curve, said, moved in cells:
            torch.testing.assert_close(curve.losses, expected.losses, rtol=1e-10, atol=0)
            torch.testing.assert_close(curve.norms, expected.norms, rtol=1e-10, atol=0)
            assert said == SAID
            assert moved == [True, True, False, True]  # not even by weight decay
            for name, weight in curve.weights.items():
                torch.testing.assert_close(weight, expected.weights[name], rtol=0, atol=1e-10)
