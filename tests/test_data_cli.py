"""meshtron prepare, data show and data verify, as a user types them."""

import json
import re

import pytest
from tokenizers import normalizers

from meshtron import cli
from meshtron.data import load_tokenizer
from meshtron.data.shards import Header


@pytest.fixture
def meshtron(monkeypatch, capsys):
    """Runs ``meshtron ARGUMENTS``; returns its status and what it printed to stdout and stderr."""

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["meshtron", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed = capsys.readouterr()
        return ended.value.code or 0, printed.out, printed.err

    return run


@pytest.fixture
def folder(tmp_path, meshtron):
    texts = [f"document number {number}, " * (number % 7 + 1) for number in range(200)]
    rows = [json.dumps({"body": text}) for text in texts] + ['{"body": ""}', '{"title": "x"}', "no JSON"]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    status, _, printed = meshtron(
        *("prepare", tmp_path / "rows.jsonl", "--out", tmp_path / "tokens", "--train-tokenizer", 300),
        *("--text-key", "body", "--val-fraction", "0.2", "--workers", 1, "--skip-bad", 1),
    )
    assert status == 0
    for line in ("1 without text", "1 without the key", "1 skipped as unreadable", "tokens/validation: "):
        assert line in printed
    return tmp_path / "tokens"


def test_show_prints_counts_lengths_and_documents(folder, meshtron):
    status, printed, _ = meshtron("data", "show", folder, "--samples", 2)
    header = Header.read(folder)
    assert status == 0
    assert f"{header.num_tokens:,} tokens, {header.num_documents} documents, uint16" in printed
    assert "vocabulary 300, separator 0" in printed
    assert printed.count("--- document") == 2
    assert "document number" in printed
    histogram = [line.split() for line in printed.splitlines() if " to " in line]
    assert sum(int(words[3].replace(",", "")) for words in histogram) == header.num_documents


def test_verify_accepts_a_sound_folder(folder, meshtron):
    status, printed, _ = meshtron("data", "verify", folder)
    assert status == 0
    assert "one separator a document" in printed
    assert f"{folder}/validation: " in printed


def overwrite(path, offset, value):
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(value)


def changed(tokenizer):
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


DAMAGE = {
    "cut": (lambda f: (f / "shard-00000.bin").write_bytes(b"\x01\x00"), r"2 bytes, expected"),
    "id": (lambda f: overwrite(f / "shard-00000.bin", 4, b"\xff\xff"), r"token 2 \(byte 4\): id 65535 is outside"),
    "separator": (lambda f: overwrite(f / "shard-00000.bin", 0, b"\0\0"), "separators in"),
    "index": (lambda f: overwrite(f / "shard-00000.ends", 8, b"\0" * 8), "index is damaged at document 1"),
    "tokenizer": (lambda f: load_tokenizer(f / "validation").save(str(f / "tokenizer.json")), None),
    "other tokenizer": (
        lambda f: changed(load_tokenizer(f)).save(str(f / "tokenizer.json")),
        "not the tokenizer that made the ids",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_verify_names_what_is_damaged(folder, meshtron, kind):
    damage, message = DAMAGE[kind]
    damage(folder)
    status, _, printed = meshtron("data", "verify", folder)
    assert (status == 0) == (message is None)
    if message is not None:
        assert printed.startswith("error: ")
        assert re.search(message, printed)
        assert len(printed.strip().splitlines()) == 1


def test_a_mistake_is_one_line(tmp_path, meshtron):
    cases = [
        (
            ("prepare", tmp_path / "none", "--out", tmp_path / "out", "--train-tokenizer", 300),
            "nothing to read there",
        ),
        (("prepare", tmp_path, "--out", tmp_path / "out"), "either --tokenizer or --train-tokenizer"),
        (("data", "show", tmp_path), "no tokens that meshtron knows"),
    ]
    for arguments, message in cases:
        status, _, printed = meshtron(*arguments)
        assert status != 0
        assert printed.startswith("error: ")
        assert message in printed
