"""meshtron prepare: text in, exactly those tokens out."""

import dataclasses
import gzip
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import zstandard

from meshtron.data import PrepareOptions, Windows, load_tokenizer, open_tokens, prepare_corpus
from meshtron.data.documents import Selection
from meshtron.data.shards import Header
from meshtron.data.tokenizer import train_tokenizer
from meshtron.errors import DataError

ROOT = Path(__file__).parent.parent

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


def compressed(path, kind):
    """A copy of a file in two members or frames, plus an empty one."""
    content = path.read_bytes()
    half = len(content) // 2
    packed = path.with_name(path.name + kind)
    if kind == ".gz":
        packed.write_bytes(b"".join(map(gzip.compress, (content[:half], b"", content[half:]))))
    else:
        pack = zstandard.ZstdCompressor().compress
        packed.write_bytes(pack(content[:half]) + pack(b"") + pack(content[half:]))
    return packed


@pytest.mark.parametrize("kind", ["", ".gz", ".zst"])
@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".json"])
def test_every_kind_of_file_plain_and_compressed(tmp_path, tokenizer, suffix, kind):
    path = tmp_path / f"source{suffix}"
    want = TEXTS
    if suffix == ".txt":
        want = ["".join(TEXTS)]
        path.write_bytes(want[0].encode())
    elif suffix == ".jsonl":
        write_jsonl(path, TEXTS)
    else:
        path.write_text(
            json.dumps([{"text": text, "other": [1, "]"]} for text in TEXTS], ensure_ascii=False, indent=1)
        )
    source = compressed(path, kind) if kind else path
    prepare_corpus([str(source)], tmp_path / "out", PrepareOptions(tokenizer=tokenizer, workers=1))
    assert texts(tmp_path / "out") == want


def test_arrays_behind_one_another_are_all_read(tmp_path, tokenizer):
    arrays = [json.dumps([{"text": text} for text in part]).encode() for part in (TEXTS[:3], [], TEXTS[3:])]
    (tmp_path / "arrays.json.gz").write_bytes(b"".join(map(gzip.compress, arrays)))
    prepare_corpus(
        [str(tmp_path / "arrays.json.gz")], tmp_path / "out", PrepareOptions(tokenizer=tokenizer, workers=1)
    )
    assert texts(tmp_path / "out") == TEXTS


def test_parquet_datasets_and_streams(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    table = pyarrow.table({"text": [*TEXTS, None, ""], "number": range(len(TEXTS) + 2)})
    (tmp_path / "parquet").mkdir()
    pyarrow.parquet.write_table(table, tmp_path / "parquet" / "part.parquet", row_group_size=3)
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(str(tmp_path / "saved"))
    sources = [str(tmp_path / "parquet"), str(tmp_path / "saved"), f"hf:{tmp_path / 'parquet'}:train"]
    header = prepare_corpus(sources, tmp_path / "out", PrepareOptions(tokenizer=tokenizer, workers=1))
    assert texts(tmp_path / "out") == TEXTS * 3
    assert (header.counts["empty"], header.counts["missing"]) == (2, 2)


def test_a_dataset_that_cannot_be_opened_is_one_line(tmp_path, tokenizer):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "dataset_info.json").write_text("{}")
    for source, reason in (
        (f"hf:{tmp_path}/nowhere", "cannot be opened by the datasets library"),
        (str(tmp_path / "broken"), "cannot be read by the datasets library"),
    ):
        with pytest.raises(DataError, match=f"{source}: {reason}"):
            prepare_corpus([source], tmp_path / "out", PrepareOptions(tokenizer=tokenizer, workers=1))


def test_folders_and_globs(tmp_path, tokenizer):
    folder = tmp_path / "tree"
    for name in ("b.py", "a/c.md", "a/d.bin", ".hidden/e.py", "tests/f.py", "g.py.gz"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        content = name.encode()
        (folder / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    selection = Selection()
    options = PrepareOptions(tokenizer=tokenizer, workers=1, selection=selection)
    prepare_corpus([str(folder)], tmp_path / "all", options)
    assert texts(tmp_path / "all") == ["a/c.md", "b.py", "g.py.gz"]
    assert len(selection.left_out) == 2
    selection = Selection(include=("*.bin", "*.py"), exclude=())
    prepare_corpus(
        [str(folder)], tmp_path / "some", PrepareOptions(tokenizer=tokenizer, workers=1, selection=selection)
    )
    assert texts(tmp_path / "some") == [".hidden/e.py", "a/d.bin", "b.py", "g.py.gz", "tests/f.py"]
    prepare_corpus([f"{folder}/**/*.md"], tmp_path / "glob", PrepareOptions(tokenizer=tokenizer, workers=1))
    assert texts(tmp_path / "glob") == ["a/c.md"]


def test_the_kind_of_a_file_does_not_depend_on_the_case_of_its_ending(tmp_path, tokenizer):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "A.JSONL.GZ").write_bytes(gzip.compress(b'{"text": "one"}\n'))
    (tmp_path / "in" / "B.TXT").write_text("two")
    (tmp_path / "in" / "notes.MD").write_text("three")
    selection = Selection(include=("*.JSONL", "*.txt", "*.Md"))
    options = PrepareOptions(tokenizer=tokenizer, workers=1, selection=selection)
    prepare_corpus([str(tmp_path / "in")], tmp_path / "out", options)
    assert texts(tmp_path / "out") == ["one", "two", "three"]


def bad_sources(folder):
    """Name of a damaged source -> its path, and how the error ends."""
    good = json.dumps({"text": "fine"}).encode() + b"\n"
    lines = good * 300
    files = {
        "json.jsonl": (good + b'{"text": \n' + good, "line 2: bad JSON"),
        "number.jsonl": (good + b'{"text": 5}\n' + good, "line 2: 'text' is int, expected a string"),
        "list.jsonl": (good + b"[1]\n", "line 2: not a JSON object"),
        "behind.json": (b'[{"text": "fine"}] {', "element 2: bad JSON"),
        "deep.jsonl": (b'{"text": "a", "x": ' + b"[" * 100_000 + b"\n", "line 1: bad JSON .*recursion"),
        "deep.json": (b'[{"text": "a", "x": ' + b"[" * 100_000, "element 1: bad JSON .*recursion"),
        "digits.json": (b'[{"text": "a", "x": ' + b"9" * 10_000 + b"}]", "element 1: bad JSON .*digits"),
        "utf8.jsonl": (good + good + b'{"text": "\xff"}\n', "line 3: not UTF-8"),
        "surrogate.jsonl": (b'{"text": "\\ud800"}\n', "line 1: 'text' has a lone surrogate"),
        "utf8.txt": (b"one\ntwo\nthree \xe9\n", "not UTF-8 .*line 3"),
        "cut.jsonl.gz": (gzip.compress(lines, mtime=0)[:-20], "line [0-9]+: damaged or cut short"),
        "cut.jsonl.zst": (zstandard.ZstdCompressor().compress(lines)[:-4], "line 1: damaged or cut short"),
        "noise.jsonl.gz": (b"no gzip at all", "damaged or cut short"),
        "cut.json": (b'[{"text": "fine"}, {"text": "fi', "element 2: bad JSON"),
        "open.json": (b'[{"text": "fine"}', "element 2: the array is cut short"),
        "cut.parquet": (b"PAR1 and nothing else", "row 1: damaged or cut short"),
    }
    folder.mkdir()
    for name, (content, reason) in files.items():
        (folder / name).write_bytes(content)
        yield folder / name, reason


def test_bad_input_is_named_or_skipped_and_counted(tmp_path, tokenizer):
    cases = list(bad_sources(tmp_path / "bad"))
    good = write_jsonl(tmp_path / "good.jsonl", ["good"])
    strict = PrepareOptions(tokenizer=tokenizer, workers=1)
    for path, reason in cases:
        with pytest.raises(DataError, match=f"{path.name}.*{reason}") as raised:
            prepare_corpus([str(path), good], tmp_path / "strict", strict)
        assert str(raised.value).count("element") <= 1  # the place is said once
    lenient = dataclasses.replace(strict, skip_bad=len(cases))
    sources = [str(path) for path, _ in cases]
    header = prepare_corpus([*sources, good], tmp_path / "lenient", lenient)
    assert header.counts["bad"] == len(cases)
    assert set(texts(tmp_path / "lenient")) == {"fine", "good"}
    assert texts(tmp_path / "lenient")[-1] == "good"
    with pytest.raises(DataError, match=f"--skip-bad allows {len(cases) - 1}"):
        prepare_corpus(sources, tmp_path / "fewer", dataclasses.replace(strict, skip_bad=len(cases) - 1))


def test_archives_that_are_not_read_are_refused_rather_than_read_as_text(tmp_path, tokenizer):
    (tmp_path / "a.jsonl.BZ2").write_bytes(b"BZh9")
    with pytest.raises(
        DataError, match=r"a\.jsonl\.BZ2: \.BZ2 files are not read; expected plain files, \.gz or \.zst"
    ):
        prepare_corpus([str(tmp_path / "a.jsonl.BZ2")], tmp_path / "out", PrepareOptions(tokenizer=tokenizer))


def test_the_tokenizers_own_separators_do_not_double_ours(tmp_path, tokenizer):
    from tokenizers import Tokenizer, processors

    own = Tokenizer.from_file(f"{tokenizer}/tokenizer.json")
    own.add_special_tokens(["<s>", "</s>"])
    ids = [(name, own.token_to_id(name)) for name in ("<s>", "</s>")]
    own.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ids)
    own.enable_truncation(3)
    own.enable_padding(length=16)
    (tmp_path / "own").mkdir()
    own.save(str(tmp_path / "own" / "tokenizer.json"))
    (tmp_path / "own" / "tokenizer_config.json").write_text('{"eos_token": {"content": "</s>"}}')
    lines = write_jsonl(tmp_path / "lines.jsonl", TEXTS)
    options = PrepareOptions(tokenizer=str(tmp_path / "own"), bos_token="<s>", workers=1)
    prepare_corpus([lines], tmp_path / "out", options)
    bos, eos = ids[0][1], ids[1][1]
    for text, document in zip(TEXTS, documents(tmp_path / "out"), strict=True):
        assert (document[0], document[-1]) == (bos, eos)
        assert not {bos, eos} & set(document[1:-1])
        assert own.decode(document[1:-1], skip_special_tokens=False) == text


def test_prompts_carry_no_loss(tmp_path, tokenizer):
    pairs = [("what is\n", "an answer"), ("", "no prompt"), ("a long prompt " * 5, "x")]
    rows = b"".join(json.dumps({"prompt": p, "completion": c}).encode() + b"\n" for p, c in pairs)
    (tmp_path / "sft.jsonl").write_bytes(rows)
    options = PrepareOptions(tokenizer=tokenizer, prompt_key="prompt", completion_key="completion", workers=1)
    prepare_corpus([str(tmp_path / "sft.jsonl")], tmp_path / "out", options)
    assert texts(tmp_path / "out") == [prompt + completion for prompt, completion in pairs]
    own = load_tokenizer(tmp_path / "out")
    samples = Windows(open_tokens(tmp_path / "out"), 128, "pad", vocab_size=400)
    for index, (prompt, completion) in enumerate(pairs):
        labels = samples[index].labels
        wanted = [*own.encode(completion).ids, Header.read(tmp_path / "out").eos_id]
        assert labels[labels != -100].tolist() == wanted[0 if prompt else 1 :]  # nothing comes before the very first


def corpus(folder, count=900):
    """Several files of random words, with duplicates within and between them."""
    random = np.random.default_rng(0)
    words = [f"word{number}" for number in range(300)]
    lines = [" ".join(random.choice(words, random.integers(1, 60))) for _ in range(count)]
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", lines)
    write_jsonl(folder / "b.jsonl", lines[::3])
    (folder / "c.txt").write_text(lines[5])
    return lines


def content(folder):
    """Bytes of every file in a folder, by name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_output_is_the_same_for_any_number_of_workers(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr("meshtron.data.chunks.CHUNK_BYTES", 20_000)
    corpus(tmp_path / "in")
    for workers in (1, 3):
        options = PrepareOptions(tokenizer=tokenizer, workers=workers, val_fraction=0.1, max_shard_tokens=20_000)
        prepare_corpus([str(tmp_path / "in")], tmp_path / str(workers), options)
    assert content(tmp_path / "1") == content(tmp_path / "3")
    assert len(list((tmp_path / "1").glob("*.bin"))) > 2


def test_validation_never_meets_training(tmp_path, tokenizer):
    lines = corpus(tmp_path / "in")
    options = PrepareOptions(tokenizer=tokenizer, workers=1, val_fraction=0.1)
    prepare_corpus([str(tmp_path / "in")], tmp_path / "out", options)
    train, validation = texts(tmp_path / "out"), texts(tmp_path / "out" / "validation")
    assert not set(train) & set(validation)
    assert sorted(train + validation) == sorted([*lines, *lines[::3], lines[5]])
    assert 50 < len(set(validation)) < 150


PREPARE = """
import sys
import meshtron.data.chunks as c
import meshtron.data.prepare as p
c.CHUNK_BYTES, p._JOURNAL_INTERVAL_S = 20_000, 0.0
p.prepare_corpus([sys.argv[1]], sys.argv[2], p.PrepareOptions(
    tokenizer=sys.argv[3], workers=int(sys.argv[4]), val_fraction=0.1, max_shard_tokens=20_000))
"""


@pytest.mark.parametrize("chunks", [1, 4, 9])
def test_a_kill_leaves_nothing_readable_and_the_next_run_goes_on(tmp_path, tokenizer, monkeypatch, chunks):
    """Killed inside a write, after so many chunks, with half of its bytes on the disk."""
    monkeypatch.setattr("meshtron.data.chunks.CHUNK_BYTES", 20_000)
    monkeypatch.setattr("meshtron.data.prepare._JOURNAL_INTERVAL_S", 0.0)
    corpus(tmp_path / "in")
    options = PrepareOptions(tokenizer=tokenizer, workers=1, val_fraction=0.1, max_shard_tokens=20_000)
    prepare_corpus([str(tmp_path / "in")], tmp_path / "whole", options)

    killing = f"""
import os
from meshtron.data.shard_writer import ShardWriter
append, calls = ShardWriter.append, []
def killing(self, tokens, lengths, prompts=None):
    calls.append(1)
    if len(calls) == {2 * chunks}:
        append(self, tokens[:len(tokens) // 2], lengths[:len(lengths) // 2])
        for file in self._files.values():
            file.flush()
        os.kill(os.getpid(), 9)
    append(self, tokens, lengths, prompts)
ShardWriter.append = killing
"""
    command = [sys.executable, "-c", killing + PREPARE]
    arguments = [str(tmp_path / "in"), str(tmp_path / "out"), tokenizer, "1"]
    assert subprocess.run(command + arguments, cwd=ROOT).returncode == -9
    assert not (tmp_path / "out").exists()
    with pytest.raises(DataError, match="not a folder made by"):
        Header.read(tmp_path / "out.partial")

    seen = []
    monkeypatch.setattr("meshtron.data.prepare.cut_chunks", recorded(seen))
    prepare_corpus([str(tmp_path / "in")], tmp_path / "out", options)
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert seen[0] > (0, 0) or chunks == 1  # it did go on, not start again
    assert not list(tmp_path.glob("out.partial*"))


def recorded(seen):
    from meshtron.data.chunks import cut_chunks

    def chunks(files, keys, after):
        seen.append(after)
        return cut_chunks(files, keys, after)

    return chunks


def test_another_command_does_not_go_on_with_what_was_left(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr("meshtron.data.prepare._JOURNAL_INTERVAL_S", 0.0)
    monkeypatch.setattr("meshtron.data.prepare.publish", lambda folder, place: None)
    lines = write_jsonl(tmp_path / "lines.jsonl", TEXTS)
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "journal.json").write_text('{"fingerprint": "of another command"}')
    (tmp_path / "out.partial" / "shard-00007.bin").write_bytes(b"left")
    prepare_corpus([lines], tmp_path / "out", PrepareOptions(tokenizer=tokenizer, workers=1))
    assert texts(tmp_path / "out.partial") == TEXTS
    assert not (tmp_path / "out.partial" / "shard-00007.bin").exists()


# Not getrusage: a process starts with the peak of the one that spawned it, here pytest with torch loaded.
MEMORY = """
import re, sys
from pathlib import Path
from meshtron.data.prepare import PrepareOptions, prepare_corpus
header = prepare_corpus([sys.argv[1]], sys.argv[2], PrepareOptions(tokenizer=sys.argv[3], workers=1))
peak_kib = int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text()).group(1))
print(header.num_documents, header.num_tokens, peak_kib // 1024)
"""


def test_memory_stays_bounded(tmp_path, tokenizer):
    """A line of 8 MB, and 150,000 documents of a word; benchmarks/data_speed.py measures 50 MB and two millions."""
    line = "some words in a row, " * 20 + "\\n"
    (tmp_path / "long.jsonl").write_text('{"text": "' + line * (8_000_000 // len(line)) + '"}\n')
    (tmp_path / "many.jsonl").write_text("".join(f'{{"text": "word{n % 977}"}}\n' for n in range(150_000)))
    for name, count in (("long", 1), ("many", 150_000)):
        arguments = [str(tmp_path / f"{name}.jsonl"), str(tmp_path / name), tokenizer]
        done = subprocess.run(
            [sys.executable, "-c", MEMORY, *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        )
        documents, tokens, peak_mib = map(int, done.stdout.split())
        assert documents == count
        assert tokens > 600_000
        assert peak_mib < 200
