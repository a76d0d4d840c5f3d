"""meshtron prepare: text in, exactly those tokens out."""

import json

import numpy as np
import pytest

from meshtron.data import PrepareOptions, load_tokenizer, open_tokens, prepare_corpus
from meshtron.data.shards import Header
from meshtron.data.tokenizer import train_tokenizer

TEXTS = [
    "plain words, and some more of them",
    "line\r\nends\rof\neach kind\u2028and\u2029more\x85",
    "\ufeffa byte-order mark first",
    "nul \x00 inside",
    "emoji 👩‍👩‍👧‍👦 and 🏳️‍🌈, größer, 漢字, ελληνικά",
    "<|endoftext|> is a name here, not a separator",
    "   spaces   around   \t\t  \n\n\n",
    " ",
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(TEXTS * 3, 400).save(str(folder / "tokenizer.json"))
    return str(folder)


def documents(folder):
    """Ids of every document in a folder of shards."""
    tokens = open_tokens(folder)
    starts = np.concatenate([[0], tokens.document_ends[:-1]]).astype(int)
    return [
        tokens.read(start, end - start).tolist()
        for start, end in zip(starts, tokens.document_ends.astype(int), strict=True)
    ]


def texts(folder):
    """Text of every document, which must end with the one separator it has."""
    tokenizer, eos = load_tokenizer(folder), Header.read(folder).eos_id
    found = []
    for ids in documents(folder):
        assert ids.count(eos) == 1
        assert ids[-1] == eos
        found.append(tokenizer.decode(ids[:-1], skip_special_tokens=False))
    return found


def write_jsonl(path, values, key="text"):
    path.write_bytes(b"".join(json.dumps({key: value}).encode() + b"\n" for value in values))
    return str(path)


def test_text_comes_back_exactly_from_lines_and_from_files(tmp_path, tokenizer):
    lines = write_jsonl(tmp_path / "lines.jsonl", TEXTS)
    folder = tmp_path / "files"
    folder.mkdir()
    for number, text in enumerate(TEXTS):
        (folder / f"{number}.txt").write_bytes(text.encode())
    options = PrepareOptions(tokenizer=tokenizer, workers=1)
    header = prepare_corpus([lines, str(folder)], tmp_path / "out", options)
    assert texts(tmp_path / "out") == TEXTS + TEXTS
    assert header.num_documents == 2 * len(TEXTS)
    assert header.vocab_size == 400


def test_a_trained_tokenizer_serves_as_data_and_tokenizer_path(tmp_path):
    lines = write_jsonl(tmp_path / "lines.jsonl", TEXTS * 3, key="content")
    options = PrepareOptions(train_tokenizer=300, text_key="content", workers=1)
    prepare_corpus([lines], tmp_path / "out", options)
    assert texts(tmp_path / "out") == TEXTS * 3
    assert load_tokenizer(tmp_path / "out").get_vocab_size() == 300
