"""Uneven labels at pp 1, 2, 4, dp 1, 2, 4 and 1, 2, 4 micro-batches, compared with plain torch on one process.

    python benchmarks/label_grid.py

Four steps: rows of 3 to 60 labels; half of the rows without any (whole dp ranks have none); no label at all; 3 to 60
again. Prints a line a cell with the largest relative difference of loss, norm and weights; exits with status 1 if one
is above 1e-5 in float32 or 1e-10 in float64.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # the plain reference is the tests'

from benchmarks.parity_matrix import TOLERANCE, difference
from meshtron.testing import run_ranks
from tests.labels import CELLS, options_of, plain, sharded


def main() -> None:
    wrong = 0
    for dtype, tolerance in TOLERANCE.items():
        expected, worst = plain(dtype), 0.0
        for pp, dp, parts in CELLS:
            ranks = run_ranks(sharded, pp * dp, options_of(pp, dp, parts, dtype))
            found = difference([curve for curve, _, _ in ranks], expected)
            untouched = all(moved == [True, True, False, True] for _, _, moved in ranks)
            wrong += found > tolerance or not untouched
            worst = max(worst, found)
            print(f"{found:.1e} pp {pp} dp {dp} micro-batches {parts} {'' if untouched else 'WRONG STEPS MOVED'}")
        print(f"{len(CELLS)} cells in {dtype}: largest difference {worst:.1e}", flush=True)
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
