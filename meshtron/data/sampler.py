"""Which window of which source is sample n: pure functions of the recipe, with random access.

Three layers, each O(1) in memory whatever the size of the corpus:

1. ``permute``: the order of a source in one epoch, a function of (seed, epoch).
2. ``Mixture``: which source sample n comes from, and how many samples that source gave before.
3. ``Order``: both together, for the stages of a run. It answers "source and window of samples [n, n + k)".

The global batch is cut from this order first and only then divided over dp ranks and micro-batches, so the
order knows nothing of either.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from hashlib import blake2b
from math import ceil, gcd, lcm
from typing import Any

import numpy as np

from meshtron.errors import DataError

_ROUNDS = 6
_MAX_TOTAL_WEIGHT = 1 << 20  # n * total stays below 2^63 up to 4e12 samples


def permute(indices: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """Where a bijection of 0 .. ``size`` - 1, chosen by (seed, epoch), sends ``indices``.

    A Feistel network over the next even power of two, walked along its cycle until the value is inside (Black
    and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002); fewer than four steps on average.
    """
    half_bits = max(1, ((max(size, 2) - 1).bit_length() + 1) // 2)
    half, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    key = blake2b(f"{seed}/{epoch}".encode(), digest_size=8 * _ROUNDS).digest()
    round_keys = np.frombuffer(key, dtype="<u8").astype(np.uint64)

    def encrypt(values: np.ndarray) -> np.ndarray:
        left, right = values >> half, values & mask
        for round_key in round_keys:
            left, right = right, left ^ (_mix(right ^ round_key) & mask)
        return (left << half) | right

    values = encrypt(np.asarray(indices, dtype=np.uint64))
    while (outside := np.flatnonzero(values >= size)).size:
        values[outside] = encrypt(values[outside])
    return values.astype(np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
    """Spread every input bit over 64 output bits (the finalizer of SplitMix64; Steele, Lea and Flood, 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Mixture:
    """Deals samples to sources in proportion to their weights, evenly along the way.

    A binary tree: each node deals the samples it gets to its two halves so that the left one has
    ``round(n * left weight / weight)`` of the first n. Counts are monotone, sum to n, and stay within
    ``errors[k]`` of the exact proportion at every n; both directions are closed formulas.

    Args:
        weights: positive numbers; decimals are taken at face value (0.7 and 0.3 are 7 to 3 exactly).
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self.weights = _whole_weights(weights)
        total = sum(self.weights)
        self.shares = [Fraction(weight, total) for weight in self.weights]
        self.errors = [Fraction(0)] * len(self.weights)
        self._bound(0, len(self.weights), Fraction(0))

    def _bound(self, low: int, high: int, error: Fraction) -> None:
        if high - low == 1:
            self.errors[low] = error
            return
        middle, whole = (low + high) // 2, sum(self.weights[low:high])
        for start, stop in ((low, middle), (middle, high)):
            self._bound(start, stop, error * Fraction(sum(self.weights[start:stop]), whole) + Fraction(1, 2))

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Source of each sample, and how many samples that source gave before it."""
        sources = np.zeros(len(samples), dtype=np.int64)
        numbers = np.array(samples, dtype=np.int64)

        def descend(low: int, high: int, rows: np.ndarray) -> None:
            if high - low == 1 or not rows.size:
                sources[rows] = low
                return
            middle = (low + high) // 2
            before = self._left(low, middle, high, numbers[rows])
            goes_left = self._left(low, middle, high, numbers[rows] + 1) > before
            numbers[rows] = np.where(goes_left, before, numbers[rows] - before)
            descend(low, middle, rows[goes_left])
            descend(middle, high, rows[~goes_left])

        descend(0, len(self.weights), np.arange(len(samples)))
        return sources, numbers

    def count(self, source: int, samples: np.ndarray) -> np.ndarray:
        """How many of the first ``samples`` samples come from a source."""
        numbers = np.array(samples, dtype=np.int64)
        low, high = 0, len(self.weights)
        while high - low > 1:
            middle = (low + high) // 2
            left = self._left(low, middle, high, numbers)
            numbers, low, high = (left, low, middle) if source < middle else (numbers - left, middle, high)
        return numbers

    def _left(self, low: int, middle: int, high: int, numbers: np.ndarray) -> np.ndarray:
        left, whole = sum(self.weights[low:middle]), sum(self.weights[low:high])
        return (2 * numbers * left + whole) // (2 * whole)


def _whole_weights(weights: Sequence[float]) -> list[int]:
    exact = [Fraction(str(weight)) for weight in weights]
    scale = lcm(*(fraction.denominator for fraction in exact))
    whole = [int(fraction * scale) for fraction in exact]
    whole = [weight // gcd(*whole) for weight in whole]
    if sum(whole) > _MAX_TOTAL_WEIGHT:  # proportions finer than one in a million are rounded to that
        whole = [max(1, round(fraction / sum(exact) * _MAX_TOTAL_WEIGHT)) for fraction in exact]
    return whole


@dataclass(frozen=True, kw_only=True)
class StageSources:
    """What the order needs to know of one data stage."""

    start: int
    """Sample at which the stage begins."""
    keys: tuple[str, ...]
    """One name a source; one that was in an earlier stage under the same key goes on where it was."""
    sizes: tuple[int | None, ...]
    """Samples in one epoch of each source; None for a stream, which has an order of its own and no epochs."""
    weights: tuple[float, ...]
    contents: tuple[str, ...]
    """A hash of what each source holds; empty where it is not known."""


@dataclass(frozen=True, kw_only=True)
class Cursor:
    """Where a source stands: ``used`` samples of epoch ``epoch`` have been given (of a stream: of all)."""

    epoch: int = 0
    used: int = 0
    size: int | None = None  # as in StageSources
    content: str = ""

    def in_source(self, size: int | None, content: str) -> "Cursor":
        """The same place in a source; of another size or content it begins its next epoch, for nothing says which of
        its samples have been given."""
        same = self.size == size and (self.content == content or not self.content or not content)
        return Cursor(epoch=self.epoch + (not same), used=self.used * same, size=size, content=content)


class Order:
    """Source and window of every sample of a run.

    An epoch of a source is a whole number of global batches: when the samples left in it might not do for one
    more batch, the next epoch begins instead. So no window comes twice in one global batch, and what an epoch
    leaves out (less than a global batch) is other windows each time.

    Args:
        stages: in the order of their starts, each a whole number of global batches after the first.
        global_batch_size: samples a step.
        seed: of every epoch's order.
        cursors: where sources stand when the first stage starts; those that are not named, at their beginning.

    Raises:
        DataError: a source has too few samples for its part of one global batch.
    """

    def __init__(
        self,
        stages: Sequence[StageSources],
        *,
        global_batch_size: int,
        seed: int,
        cursors: Mapping[str, Cursor] | None = None,
    ) -> None:
        self.stages = list(stages)
        self.global_batch_size = global_batch_size
        self.seed = seed
        self._parts: list[_Part] = []
        self._before = [dict(cursors or {})]
        for number, stage in enumerate(self.stages):
            self._parts.append(_Part(stage, self._before[number], global_batch_size, seed))
            if number + 1 < len(self.stages):
                self._before.append(self._before[number] | self._parts[number].cursors(self.stages[number + 1].start))

    def facts(self) -> dict[str, Any]:
        """All that the order depends on beside ``cursors``, as plain values; sources by their place in ``keys``."""
        keys = self.keys
        stages = [
            {
                "start": stage.start,
                "sources": [keys.index(key) for key in stage.keys],
                "sizes": list(stage.sizes),
                "weights": list(stage.weights),
                "contents": list(stage.contents),
            }
            for stage in self.stages
        ]
        return {"global_batch_size": self.global_batch_size, "seed": self.seed, "stages": stages}

    @property
    def keys(self) -> list[str]:
        """The sources of all stages, each once."""
        return list(dict.fromkeys(key for stage in self.stages for key in stage.keys))

    def stage(self, sample: int) -> int:
        """Number of the stage that a sample belongs to."""
        return max(number for number, stage in enumerate(self.stages) if stage.start <= sample)

    def locate(self, start: int, count: int) -> tuple[int, np.ndarray, np.ndarray]:
        """Stage, and source and window of each of the samples [start, start + count) of that stage."""
        number = self.stage(start)
        sources, windows = self._parts[number].locate(np.arange(start, start + count))
        return number, sources, windows

    def cursors(self, sample: int) -> dict[str, Cursor]:
        """Where each source of this and earlier stages stands just before a sample."""
        number = self.stage(sample)
        return self._before[number] | self._parts[number].cursors(sample)


class _Part:
    """The order inside one stage."""

    def __init__(self, stage: StageSources, cursors: Mapping[str, Cursor], global_batch_size: int, seed: int) -> None:
        self.stage = stage
        self.batch = global_batch_size
        self.seed = seed
        self.mixture = Mixture(stage.weights)
        self.begin = [
            cursors.get(key, Cursor(size=size)).in_source(size, content)
            for key, size, content in zip(stage.keys, stage.sizes, stage.contents, strict=True)
        ]
        self.first: list[int] = []
        self.later: list[int] = []
        for source, size in enumerate(stage.sizes):
            self.later.append(self._batches(source, size))
            left = None if size is None else max(0, size - self.begin[source].used)
            self.first.append(self._batches(source, left))
            if self.later[source] < 1:
                need = ceil(self.batch * self.mixture.shares[source] + 2 * self.mixture.errors[source])
                raise DataError(
                    f"{stage.keys[source]}: {size} samples an epoch, but a global batch takes up to {need} of them: "
                    "use more data, a shorter seq_len, a smaller global_batch_size or a lower weight"
                )

    def _batches(self, source: int, size: int | None) -> int:
        """Global batches that surely find their part of a source in ``size`` samples."""
        if size is None:
            return 1 << 62
        spare = size - 2 * self.mixture.errors[source]
        return max(0, int(spare // (self.batch * self.mixture.shares[source])))

    def _epochs(self, source: int, batches: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Epoch that each batch of the stage is in, and the samples of the source used in it before the stage's
        sample count began, so that ``count + offset`` is the place in the epoch."""
        begin, first, later = self.begin[source], self.first[source], self.later[source]
        turns = np.where(batches < first, -1, (batches - first) // later)
        opening = np.where(turns < 0, 0, first + turns * later) * self.batch
        offsets = np.where(turns < 0, begin.used, -self.mixture.count(source, opening))
        return begin.epoch + 1 + turns, offsets

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Source and window of each sample."""
        inside = samples - self.stage.start
        sources, counts = self.mixture.locate(inside)
        windows = np.empty_like(counts)
        for source in np.unique(sources):
            rows = np.flatnonzero(sources == source)
            epochs, offsets = self._epochs(source, inside[rows] // self.batch)
            places = counts[rows] + offsets
            size = self.stage.sizes[source]
            if size is None:
                windows[rows] = places
                continue
            for epoch in np.unique(epochs):
                chosen = epochs == epoch
                windows[rows[chosen]] = permute(places[chosen], size, self.seed, int(epoch))
        return sources, windows

    def cursors(self, sample: int) -> dict[str, Cursor]:
        """Where each source stands when the stage has given its samples before ``sample``."""
        inside = sample - self.stage.start
        if inside == 0:
            return dict(zip(self.stage.keys, self.begin, strict=True))
        found = {}
        for source, key in enumerate(self.stage.keys):
            epochs, offsets = self._epochs(source, np.array([(inside - 1) // self.batch]))
            count = int(self.mixture.count(source, np.array([inside]))[0])
            begin = self.begin[source]
            found[key] = replace(begin, epoch=int(epochs[0]), used=count + int(offsets[0]))
        return found
