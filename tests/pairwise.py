"""Covering tables: few rows in which every two options meet in every pair of their values."""

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Row = dict[str, Any]
_CANDIDATES = 20


def covering_rows(
    factors: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool], *, seed: int = 0
) -> list[Row]:
    """Rows such that every pair of values that some allowed row can hold is in one of them.

    Greedy: of a number of random rows that hold a pair still missing, take the one with the most missing pairs.
    """
    rng = random.Random(seed)
    missing = {
        (first, a, second, b)
        for first, second in itertools.combinations(factors, 2)
        for a in range(len(factors[first]))
        for b in range(len(factors[second]))
    }
    rows = []
    while missing:
        wanted = min(missing)
        candidates = list(_random_rows(factors, allowed, wanted, rng))
        if not candidates:
            missing.discard(wanted)  # no allowed row has this pair
            continue
        best = max(candidates, key=lambda row: len(_pairs(row) & missing))
        missing -= _pairs(best)
        rows.append({name: factors[name][index] for name, index in best.items()})
    return rows


def _pairs(row: Mapping[str, int]) -> set[tuple[str, int, str, int]]:
    return {(a, row[a], b, row[b]) for a, b in itertools.combinations(row, 2)}


def _random_rows(
    factors: Mapping[str, Sequence[Any]],
    allowed: Callable[[Row], bool],
    wanted: tuple[str, int, str, int],
    rng: random.Random,
) -> Iterator[dict[str, int]]:
    found = 0
    for _ in range(20 * _CANDIDATES):
        row = {name: rng.randrange(len(values)) for name, values in factors.items()}
        row[wanted[0]], row[wanted[2]] = wanted[1], wanted[3]
        if allowed({name: factors[name][index] for name, index in row.items()}):
            yield row
            found += 1
        if found == _CANDIDATES:
            return
