"""Data that is not shards: datasets tokenized while they are read, and datasets of one's own."""

import json
from pathlib import Path

import numpy as np
import pytest

from meshtron.data import PrepareOptions, Sample, Windows, open_source, open_tokens, prepare_corpus
from meshtron.data.streaming import HubTokens, PackedStream
from meshtron.data.tokenizer import train_tokenizer
from meshtron.errors import DataError, LayoutError
from meshtron.loop import train
from meshtron.testing import run_ranks
from tests.runs import small_recipe
from tests.test_data_stages import train_recording

WORDS = ["a", "few", "words", "without", "meaning", "make", "documents", "of", "many", "lengths,", "größer", "漢字"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """Two files of rows with a text (some empty or null), a prompt and a completion; and their tokenizer."""
    folder = tmp_path_factory.mktemp("hub")
    (folder / "rows").mkdir()
    random = np.random.default_rng(0)
    for part in range(2):
        rows = []
        for number in range(150):
            text = " ".join(random.choice(WORDS, random.integers(1, 30)))
            rows.append({"text": [text, "", None][max(0, number % 10 - 7)], "ask": text[:9], "answer": text})
        lines = [json.dumps(row) + "\n" for row in rows]
        (folder / "rows" / f"part-{part}.jsonl").write_text("".join(lines))
    train_tokenizer(WORDS * 3, 300).save(str(folder / "tokenizer.json"))
    return folder


def tokens_of(corpus: Path, **keys: str) -> HubTokens:
    return HubTokens(str(corpus / "rows"), str(corpus), **keys)


def stream_of(corpus: Path, seq_len: int = 8, packing: str = "concat", **keys: str) -> PackedStream:
    return PackedStream(tokens_of(corpus, **keys), seq_len, packing, vocab_size=300)


def plain(sample: Sample) -> list[list[int]]:
    return [part.tolist() for part in sample if part is not None]


PROMPTS = {"prompt_key": "ask", "completion_key": "answer"}


@pytest.mark.parametrize("keys", [{}, PROMPTS], ids=["text", "prompts"])
@pytest.mark.parametrize(("seq_len", "packing"), [(8, "concat"), (8, "documents"), (8, "pad"), (4000, "documents")])
def test_a_stream_gives_the_samples_of_the_prepared_corpus_in_file_order(corpus, tmp_path, seq_len, packing, keys):
    options = PrepareOptions(tokenizer=str(corpus), workers=1, **keys)
    prepare_corpus([str(corpus / "rows")], tmp_path / "prepared", options)
    prepared = Windows(open_tokens(tmp_path / "prepared"), seq_len, packing, vocab_size=300)
    stream = stream_of(corpus, seq_len, packing, **keys)
    assert len(prepared) > 300 or seq_len == 4000
    for index in range(len(prepared)):
        assert stream.position == index
        assert plain(next(stream)) == plain(prepared[index]), index


@pytest.mark.parametrize("packing", ["concat", "pad"])
def test_a_stream_can_be_taken_up_anywhere_also_behind_its_end(corpus, packing):
    stream = stream_of(corpus, packing=packing)
    whole = [plain(next(stream)) for _ in range(1200)]
    assert stream.tokens._row < 300 * 2  # the dataset has begun again
    random = np.random.default_rng(1)
    for position in random.integers(0, 1190, 12).tolist():
        stream.seek(position)
        assert [plain(next(stream)) for _ in range(5)] == whole[position : position + 5]
    state = json.loads(json.dumps(stream.state(900)))
    later = stream_of(corpus, packing=packing)
    later.restore(state)
    later.seek(901)
    assert plain(next(later)) == whole[901]
    assert 900 - 200 < state["position"] <= 900  # and not from the start


def test_the_end_of_the_dataset_is_followed_by_its_beginning(corpus):
    tokens = tokens_of(corpus)
    chunks = [tokens.read().ids.tolist() for _ in range(10)]  # 300 rows are 5 groups of up to 64
    assert chunks[5:] == chunks[:5]
    assert chunks[0] != chunks[1]


def hub_recipe(corpus: Path, folder: Path, layout: str = "1x1x1", steps: int = 6):
    return small_recipe(
        folder,
        layout,
        model={"vocab_size": 300},
        training={"steps": steps, "global_batch_size": 8, "micro_batch_size": 4},
        tokenizer={"path": str(corpus)},
        data={"train": [{"path": f"hf:{corpus / 'rows'}", "options": {"text_key": "answer"}}]},
        checkpoint={"interval": 3},
    )


def test_training_from_a_stream_resumes_exactly_at_another_dp(corpus, tmp_path):
    straight = train_recording(hub_recipe(corpus, tmp_path / "straight"))
    first = train_recording(hub_recipe(corpus, tmp_path / "parts", steps=3))
    assert {start for start, _ in first} == {0, 8, 16}
    ranks = run_ranks(train_recording, 2, hub_recipe(corpus, tmp_path / "parts", "1x2x1"), timeout_s=280)
    parts = {key: ids for rank in ranks for key, ids in rank.items()}
    for start in (24, 32, 40):
        found = np.concatenate([parts[start, 0], parts[start, 4]])
        assert np.array_equal(found, straight[start, 0])


class Numbers:
    """A dataset of one's own with an end: sample n is the number n, over and over."""

    def __init__(self, seq_len: int, size: int) -> None:
        self.seq_len, self.size = seq_len, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> np.ndarray:
        return np.full(self.seq_len + 1, index % 96)


class Endless:
    """And one without."""

    def __init__(self, seq_len: int, step: int = 1) -> None:
        self.position, self.seq_len, self.step = 0, seq_len, step

    def seek(self, position: int) -> None:
        self.position = position

    def __next__(self) -> Sample:
        ids = np.full(self.seq_len, self.step * self.position % 96)
        self.position += 1
        return Sample(ids, np.where(np.arange(self.seq_len) < 3, -100, ids))


def own_recipe(folder: Path, layout: str = "1x1x1", steps: int = 6):
    sources = [
        {"path": "py:tests.test_data_streaming:Numbers", "options": {"size": 50}},
        {"path": "py:tests.test_data_streaming:Endless", "options": {"step": 3}, "weight": 3.0},
    ]
    training = {"steps": steps, "micro_batch_size": 4}
    return small_recipe(folder, layout, data={"train": sources}, training=training, checkpoint={"interval": 3})


def test_datasets_of_ones_own_in_a_recipe_resume_at_another_dp(tmp_path):
    straight = train_recording(own_recipe(tmp_path / "straight"))
    streamed = [
        ids[0] for start in sorted(straight) for ids in straight[start] if ids[-1] == ids[0] and ids[0] % 3 == 0
    ]
    assert len(streamed) >= 6 * 12
    train(own_recipe(tmp_path / "parts", steps=3))
    ranks = run_ranks(train_recording, 2, own_recipe(tmp_path / "parts", "1x2x1"), timeout_s=280)
    parts = {key: ids for rank in ranks for key, ids in rank.items()}
    for start in (48, 64, 80):
        assert np.array_equal(np.concatenate([parts[start, 0], parts[start, 8]]), straight[start, 0])


def not_a_dataset(seq_len: int) -> list:
    return iter([])


class Ends(Endless):
    def __next__(self) -> Sample:
        raise StopIteration


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("py:tests.test_data_streaming", {}, "expected py:MODULE:NAME"),
        ("py:tests.nothing:Numbers", {}, "No module named 'tests.nothing'; the module must be importable"),
        ("py:tests.test_data_streaming:Nothing", {}, "has no attribute 'Nothing'"),
        ("py:tests.test_data_streaming:not_a_dataset", {}, "list_iterator is no dataset: it needs __len__"),
        ("py:tests.test_data_streaming:Numbers", {"size": 0}, "Numbers.*: empty"),
        ("py:tests.test_data_streaming:Ends", {}, "the stream ended before sample 0"),
        ("somewhere", {"size": 0}, "options size are for hf: and py: sources"),
    ],
)
def test_wrong_datasets_are_refused(tmp_path, path, options, message):
    recipe = small_recipe(tmp_path, data={"train": [{"path": path, "options": options}]})
    with pytest.raises(DataError, match=message):
        train(recipe)


def test_wrong_streams_are_refused(corpus, tmp_path):
    with pytest.raises(LayoutError, match=r"tokenizer.path: missing; hf:rows is tokenized while it is read"):
        small_recipe(tmp_path, data={"train": [{"path": "hf:rows"}]}).resolve(1)
    with pytest.raises(DataError, match="no column 'content'; there are text, ask, answer"):
        tokens_of(corpus, text_key="content")
    with pytest.raises(DataError, match=r"hf:.*nowhere: cannot be opened by the datasets library"):
        HubTokens(str(corpus / "nowhere"), str(corpus))
    with pytest.raises(DataError, match=r"has 300 ids, but model.vocab_size is 96"):
        open_source(f"hf:{corpus / 'rows'}", seq_len=8, vocab_size=96, tokenizer=str(corpus))
    (corpus / "bad").mkdir()
    (corpus / "bad" / "rows.jsonl").write_text('{"text": "fine"}\n{"text": 3}\n'.replace("3", '"\\ud800"'))
    with pytest.raises(DataError, match=r"hf:.*bad: cannot be read behind row 0 \(JSON parse error"):
        HubTokens(str(corpus / "bad"), str(corpus)).read()
