"""Shards, packing and batches, against plain Python on the same tokens."""

import dataclasses
import itertools
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshtron.data import Sample, Source, Stage, TrainStream, ValidationSet, Windows, open_source, open_tokens
from meshtron.data.shard_writer import ShardWriter
from meshtron.data.shards import HEADER, Header, dtype_name
from meshtron.errors import DataError

VOCAB = 1000


def write(folder, documents, *, vocab_size=VOCAB, prompts=None, max_shard_tokens=1 << 28):
    """Shards that hold ``documents``, lists of ids that end with their separator."""
    folder.mkdir()
    writer = ShardWriter(
        folder, vocab_size=vocab_size, has_prompts=prompts is not None, max_shard_tokens=max_shard_tokens
    )
    for number, document in enumerate(documents):
        prompt = None if prompts is None else np.array([prompts[number]])
        writer.append(np.array(document), np.array([len(document)]), prompt)
    writer.close()
    header = Header(
        dtype=dtype_name(vocab_size),
        vocab_size=vocab_size,
        eos_id=0,
        tokenizer_hash="",
        shards=tuple(writer.shards),
        has_prompts=prompts is not None,
    )
    (folder / HEADER).write_text(header.dumps())
    return folder


def some_documents(count=60, seed=0):
    random = np.random.default_rng(seed)
    return [[*random.integers(1, VOCAB, random.integers(0, 30)).tolist(), 0] for _ in range(count)]


def windows(folder, seq_len, packing="concat"):
    return Windows(open_tokens(folder), seq_len, packing, vocab_size=VOCAB)


@pytest.mark.parametrize("max_shard_tokens", [1 << 28, 50, 1])
def test_concat_windows_are_the_row_of_tokens_cut_up(tmp_path, max_shard_tokens):
    documents = some_documents()
    row = [token for document in documents for token in document]
    folder = write(tmp_path / "data", documents, max_shard_tokens=max_shard_tokens)
    samples = windows(folder, 16)
    assert len(samples) == (len(row) - 1) // 16
    for index in range(len(samples)):
        sample = samples[index]
        assert sample.tokens.tolist() == row[index * 16 : index * 16 + 16]
        assert sample.labels.tolist() == row[index * 16 + 1 : index * 16 + 17]
        assert sample.document_ids is None


@pytest.mark.parametrize("with_prompts", [False, True])
@pytest.mark.parametrize("packing", ["concat", "documents", "pad"])
def test_packings_against_a_token_by_token_reference(tmp_path, packing, with_prompts):
    documents = some_documents()
    prompts = [min(len(document) - 1, number % 5) for number, document in enumerate(documents)]
    folder = write(tmp_path / "data", documents, prompts=prompts if with_prompts else None)
    # Of each token: id, document, and whether predicting it gives loss.
    row = [
        (token, number, not with_prompts or place >= prompts[number])
        for number, document in enumerate(documents)
        for place, token in enumerate(document)
    ]
    length = 8
    if packing == "pad":
        pieces = []
        for number in range(len(documents)):
            mine = [entry for entry in row if entry[1] == number]
            pieces += [mine[start : start + length + 1] for start in range(0, len(mine) - 1, length)]
    else:
        pieces = [row[start : start + length + 1] for start in range(0, len(row) - length, length)]
    samples = windows(folder, length, packing)
    assert len(samples) == len(pieces)
    for index, piece in enumerate(pieces):
        tokens, labels = [0] * length, [-100] * length
        for place, (here, following) in enumerate(itertools.pairwise(piece)):
            tokens[place] = here[0]
            if following[2] and (packing != "documents" or here[1] == following[1]):
                labels[place] = following[0]
        sample = samples[index]
        assert sample.tokens.tolist() == tokens
        assert sample.labels.tolist() == labels
        if packing == "documents":
            assert sample.document_ids.tolist() == [entry[1] - piece[0][1] for entry in piece[:length]]
        else:
            assert sample.document_ids is None


def test_positions_restart_with_each_document(tmp_path):
    folder = write(tmp_path / "data", [[1, 2, 3, 0], [4, 0], [5, 6, 7, 8, 9, 10, 0]])
    stream = TrainStream(
        [Stage(seq_len=12, sources=(Source(key="a", dataset=windows(folder, 12, "documents")),))],
        global_batch_size=1,
        seed=0,
    )
    batch = stream.batch(0)
    stream.close()
    assert batch.document_ids.tolist() == [[0, 0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 2]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 0, 1, 0, 1, 2, 3, 4, 5]]


class Numbered:
    """Samples that are their own number."""

    def __init__(self, size, seq_len=4, base=0):
        self.size, self.seq_len, self.base = size, seq_len, base

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return np.full(self.seq_len + 1, self.base + index)


class Counting:
    """A stream of its own positions; seeking anywhere is allowed."""

    def __init__(self, seq_len=4, base=10_000):
        self.position, self.seq_len, self.base = 0, seq_len, base

    def seek(self, position):
        self.position = position

    def __next__(self):
        self.position += 1
        return np.full(self.seq_len + 1, self.base + self.position - 1)


def stages(batch, seq_lens=(4, 4), size=97):
    sets = (
        Source(key="a", dataset=Numbered(size, seq_lens[0]), weight=0.7),
        Source(key="c", dataset=Counting()),
    )
    later = (
        Source(key="a", dataset=Numbered(size, seq_lens[1])),
        Source(key="b", dataset=Numbered(60, seq_lens[1], 500)),
    )
    return [
        Stage(seq_len=seq_lens[0], sources=sets),
        Stage(start=5 * batch, seq_len=seq_lens[1], sources=later),
    ]


@settings(deadline=None, max_examples=25, derandomize=True)
@given(
    st.integers(60, 130),
    st.sampled_from([1, 2, 3, 4]),
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(0, 3),
    st.lists(st.tuples(st.integers(0, 11), st.sampled_from([1, 2, 3, 4, 6, 12])), max_size=3),
)
def test_global_batches_are_the_same_at_any_dp_and_after_any_resume(size, dp, factor, prefetch, workers, stops):
    batch = 12 * factor

    def read(samples, dp_size, count=1):
        parts = []
        for rank in range(dp_size):
            stream = TrainStream(
                stages(batch, size=size),
                global_batch_size=batch,
                seed=5,
                dp_rank=rank,
                dp_size=dp_size,
                prefetch=prefetch,
                workers=workers,
            )
            with stream:
                parts.append(torch.stack([stream.batch(samples + n * batch).tokens[:, 0] for n in range(count)]))
        return torch.cat(parts, dim=1)

    whole = read(0, 1, 12)
    assert len(set(whole.flatten().tolist())) > 100
    assert torch.equal(read(0, dp, 12), whole)
    for step, dp_size in stops:
        assert torch.equal(read(step * batch, dp_size), whole[step : step + 1])


def test_stages_may_change_the_sequence_length():
    stream = TrainStream(stages(4, (4, 8)), global_batch_size=4, seed=0)
    with pytest.raises(DataError, match="expected 8"):
        TrainStream(
            [dataclasses.replace(stage, seq_len=8) for stage in stages(4)], global_batch_size=4, seed=0
        ).batch(0)
    assert stream.batch(16).tokens.shape == (4, 4)
    assert stream.batch(20).tokens.shape == (4, 8)
    assert stream.stage(20).seq_len == 8
    stream.close()


def test_validation_covers_the_set_once_and_pads_the_last_batch():
    sources = [Source(key="a", dataset=Numbered(5)), Source(key="b", dataset=Numbered(6, base=100))]
    seen, rows = [], 0
    for rank in range(2):
        data = ValidationSet(sources, seq_len=4, global_batch_size=4, dp_rank=rank, dp_size=2)
        for start in data.starts():
            batch = data.batch(start)
            rows += len(batch.tokens)
            real = batch.labels[:, 0] != -100
            seen += batch.tokens[real, 0].tolist()
            assert (batch.labels[~real] == -100).all()
    assert sorted(seen) == [*range(5), *range(100, 106)]
    assert rows == 12
    assert ValidationSet(sources, seq_len=4, global_batch_size=4, max_samples=3).num_samples == 3


class Stalling(Numbered):
    """From the 17th sample on, each waits for ``goes_on``, as for a disk that does not answer."""

    def __init__(self, size):
        super().__init__(size)
        self.calls, self.stands, self.goes_on = 0, threading.Event(), threading.Event()

    def __getitem__(self, index):
        self.calls += 1
        if self.calls > 16:
            self.stands.set()
            assert self.goes_on.wait(timeout=60)
        return super().__getitem__(index)


def test_prefetch_hides_a_stall():
    data = Stalling(1000)
    source = Source(key="a", dataset=data)
    with TrainStream([Stage(seq_len=4, sources=(source,))], global_batch_size=4, seed=0, prefetch=8) as stream:
        stream.batch(0)
        assert data.stands.wait(timeout=60)
        for step in (1, 2, 3):
            stream.batch(4 * step)
        assert data.calls == 17  # three batches came while the source stood still
        data.goes_on.set()
        assert len(stream.batch(16).tokens) == 4


def test_an_error_in_the_thread_reaches_the_caller(tmp_path):
    folder = write(tmp_path / "data", some_documents())
    tokens = open_tokens(folder)
    with open(folder / "shard-00000.bin", "r+b") as file:
        file.seek(2 * 37)
        file.write((VOCAB + 5).to_bytes(2, "little"))
    with pytest.raises(DataError, match=r"shard-00000.bin, token 37 \(byte 74\): id 1005 is outside the voc"):
        open_source(folder, seq_len=8, vocab_size=VOCAB)
    source = Source(key="a", dataset=Windows(tokens, 8, vocab_size=VOCAB))
    stream = TrainStream([Stage(seq_len=8, sources=(source,))], global_batch_size=4, seed=0)
    windows = len(source.dataset)
    with pytest.raises(DataError, match="token 37"):
        [stream.batch(4 * step) for step in range(windows // 4 + 1)]


def stage_of(*sources, **changes):
    return [Stage(**({"seq_len": 4, "sources": sources} | changes))]


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (stage_of(Source(key="a", dataset=Numbered(3))), "a .*: 3 samples an epoch"),
        (stage_of(Source(key="a", dataset=Numbered(0))), "a: empty"),
        (
            stage_of(Source(key="a", dataset=Numbered(9), weight=0.0)),
            "a: weight 0.0, expected a number above 0",
        ),
        (stage_of(Source(key="a", dataset=Numbered(9)), Source(key="a", dataset=Numbered(9))), "given twice"),
        (stage_of(), "no source"),
        ([], "no data stage"),
        (
            stages(4)[:1] + stage_of(Source(key="a", dataset=Numbered(9)), start=6),
            "not at the start of a global",
        ),
    ],
)
def test_wrong_stages_are_refused(stages, message):
    with pytest.raises(DataError, match=message):
        TrainStream(stages, global_batch_size=4, seed=0)


def test_sizes_that_do_not_divide_are_refused():
    with pytest.raises(DataError, match="not a multiple of dp = 3"):
        TrainStream(stage_of(Source(key="a", dataset=Numbered(9))), global_batch_size=4, seed=0, dp_size=3)
    with pytest.raises(DataError, match="needs a set with an end"):
        ValidationSet([Source(key="c", dataset=Counting())], seq_len=4, global_batch_size=4)


def test_shards_that_do_not_fit_their_header_are_refused(tmp_path):
    folder = write(tmp_path / "data", some_documents())
    text = (folder / HEADER).read_text()
    (folder / HEADER).write_text(text.replace("uint16", "uint32"))
    with pytest.raises(DataError, match=r"shard-00000.bin: \d+ bytes, expected \d+ .*another dtype"):
        open_tokens(folder)
    (folder / HEADER).write_text(text.replace('"version": 1', '"version": 9'))
    with pytest.raises(DataError, match="format version 9"):
        open_tokens(folder)
    (folder / HEADER).write_text(text)
    with pytest.raises(DataError, match="make no sample of seq_len = 5000"):
        open_source(folder, seq_len=5000, vocab_size=VOCAB)
    with pytest.raises(DataError, match="not there"):
        open_source(tmp_path / "nothing", seq_len=8, vocab_size=VOCAB)


def test_65536_ids_fit_two_bytes():
    assert (dtype_name(65_536), dtype_name(65_537)) == ("uint16", "uint32")


def test_a_dataset_may_bring_samples_of_its_own():
    class Masked(Numbered):
        def __getitem__(self, index):
            return Sample(np.full(4, index), np.array([-100, -100, index, index]), np.array([0, 0, 1, 1]))

    stream = TrainStream(stage_of(Source(key="a", dataset=Masked(9))), global_batch_size=4, seed=0)
    batch = stream.batch(0)
    stream.close()
    assert (batch.labels[:, :2] == -100).all()
    assert batch.positions.tolist() == [[0, 1, 0, 1]] * 4
