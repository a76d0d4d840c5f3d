"""The order of samples: permutations, mixtures, epochs and stages, against sequential references."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshtron.data.sampler import Mixture, Order, StageSources, permute
from meshtron.errors import DataError

property_test = settings(deadline=None, max_examples=40, derandomize=True)


@property_test
@given(st.integers(1, 700), st.integers(0, 5), st.integers(0, 5))
def test_permute_is_a_bijection(size, seed, epoch):
    assert sorted(permute(np.arange(size), size, seed, epoch)) == list(range(size))


def test_permute_differs_by_seed_and_epoch_and_spreads_evenly():
    orders = {tuple(permute(np.arange(100), 100, seed, epoch)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9
    firsts = np.array([permute(np.arange(10), 10, 0, epoch) for epoch in range(4000)])
    counts = np.stack([np.bincount(firsts[:, place], minlength=10) for place in range(10)])
    assert np.abs(counts - 400).max() < 100  # five standard deviations of a fair draw


def test_permute_reaches_far_into_a_huge_source_at_once():
    size = 10**12 + 7
    places = np.array([0, 1, size - 1])
    values = permute(places, size, 1, 2)
    assert len(set(values)) == 3
    assert values.max() < size


weights = st.lists(st.sampled_from([0.001, 0.1, 0.3, 0.5, 1.0, 2.0, 7.0]), min_size=1, max_size=6)


@property_test
@given(weights, st.integers(0, 3000))
def test_mixture_keeps_exact_proportions_and_counts_agree_with_its_sequence(values, start):
    mixture = Mixture(values)
    sources, numbers = mixture.locate(np.arange(start, start + 300))
    exact = [Fraction(str(value)) / sum(Fraction(str(v)) for v in values) for value in values]
    for source, share in enumerate(exact):
        begin = int(mixture.count(source, np.array([start]))[0])
        mine = numbers[sources == source]
        assert list(mine) == list(range(begin, begin + len(mine)))
        assert abs(len(mine) - 300 * share) <= 2 * mixture.errors[source]
        assert mixture.errors[source] <= Fraction(3, 2)


def test_mixture_takes_decimals_at_face_value():
    assert Mixture([0.7, 0.3]).weights == [7, 3]
    assert Mixture([0.1, 0.2, 0.3]).weights == [1, 2, 3]


def order(sizes, weights, batch, seed=0, start=0, keys=None):
    keys = keys or tuple(f"s{number}" for number in range(len(sizes)))
    return StageSources(
        start=start, keys=keys, sizes=tuple(sizes), weights=tuple(weights), contents=("",) * len(sizes)
    )


@property_test
@given(
    st.lists(st.tuples(st.integers(40, 200), st.sampled_from([0.2, 1.0, 3.0])), min_size=1, max_size=4),
    st.integers(1, 12),
    st.integers(0, 3),
)
def test_no_window_twice_in_a_global_batch_nor_in_an_epoch(sources, batch, seed):
    sizes, values = zip(*sources, strict=True)
    sampler = Order([order(sizes, values, batch)], global_batch_size=batch, seed=seed)
    seen = [set() for _ in sizes]
    drawn = [0] * len(sizes)
    epochs = [0] * len(sizes)
    for step in range(60):
        _, picks, windows = sampler.locate(step * batch, batch)
        pairs = list(zip(picks.tolist(), windows.tolist(), strict=True))
        assert len(set(pairs)) == batch
        cursors = list(sampler.cursors((step + 1) * batch).values())
        for source, cursor in enumerate(cursors):
            mine = {window for pick, window in pairs if pick == source}
            drawn[source] += len(mine)
            if cursor.epoch != epochs[source]:
                # An epoch leaves out less than a global batch's part and the rounding of the mixture.
                assert len(seen[source]) > sizes[source] - batch - 4
                seen[source], epochs[source] = set(), cursor.epoch
            assert not seen[source] & mine
            seen[source] |= mine
            assert cursor.used == len(seen[source])
    total = sum(Fraction(str(value)) for value in values)
    for source, value in enumerate(values):
        assert abs(drawn[source] - 60 * batch * Fraction(str(value)) / total) < batch + 1


@property_test
@given(st.integers(1, 9), st.integers(1, 4), st.data())
def test_any_slice_equals_the_sequence_read_from_the_start(batch, num_sources, data):
    sizes = data.draw(st.lists(st.integers(40, 90), min_size=num_sources, max_size=num_sources))
    values = data.draw(st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=num_sources, max_size=num_sources))
    stages = [order(sizes, values, batch), order(sizes, values[::-1], batch, start=7 * batch)]
    sampler = Order(stages, global_batch_size=batch, seed=3)
    whole = [sampler.locate(n, 1) for n in range(30 * batch)]
    first = data.draw(st.integers(0, 29)) * batch
    skip = data.draw(st.integers(0, batch - 1))
    stage, picks, windows = sampler.locate(first + skip, batch - skip)
    for row in range(batch - skip):
        want = whole[first + skip + row]
        assert (stage, picks[row], windows[row]) == (want[0], want[1][0], want[2][0])


def test_a_source_goes_on_in_the_next_stage_and_another_starts_afresh():
    stages = [
        order([64], [1.0], 4, keys=("web",)),
        order([64, 64], [1.0, 1.0], 4, start=32, keys=("web", "code")),
    ]
    sampler = Order(stages, global_batch_size=4, seed=0)
    _, _, before = sampler.locate(0, 32)
    web = []
    for sample in range(32, 32 + 48, 4):
        _, picks, windows = sampler.locate(sample, 4)
        web += list(windows[picks == 0])
    assert len(web) == 24
    assert not set(before) & set(web)  # 32 and 24 of 64 windows, none twice


def test_streams_are_read_in_their_own_order():
    sampler = Order([order([None, 50], [3.0, 1.0], 8)], global_batch_size=8, seed=0)
    _, picks, windows = sampler.locate(80, 8)
    assert list(windows[picks == 0]) == list(range(60, 66))


def test_a_source_smaller_than_its_part_of_a_batch_is_refused():
    assert Order([order([8], [1.0], 8)], global_batch_size=8, seed=0).locate(8, 8)[2].size == 8
    with pytest.raises(DataError, match=r"s0: 7 samples an epoch, but a global batch takes up to 8"):
        Order([order([7], [1.0], 8)], global_batch_size=8, seed=0)
