"""Prompts to ids and ids to text: special tokens, what ends a completion, and text that is written as it grows."""

import json
from pathlib import Path

import pytest
import transformers
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from meshtron.data.tokenizer import train_tokenizer
from meshtron.errors import CheckpointError, DataError
from meshtron.generate.text import Stream, Text

TEXT = "naïve 👩‍🚀 日本 text"


def _folder(folder: Path, template: str | None = None, **described: str) -> Path:
    """A tokenizer of bytes with three special tokens and truncation and padding that nobody wants here."""
    folder.mkdir(exist_ok=True)
    tokenizer = train_tokenizer(["for x in y: return x\n" * 5], 258)
    tokenizer.add_special_tokens(["<s>", "</s>", "<|turn|>"])
    if template is not None:
        named = [(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>")]
        tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=named)
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=20)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", **described}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("template", [None, "<s> $A", "<s> $A </s>"])
def test_a_prompt_gets_the_ids_that_transformers_gives_it(template: str | None, tmp_path: Path) -> None:
    text = Text.load(_folder(tmp_path / "a", template), 300)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "a")
    for prompt in ("for x in y", "", " two  spaces ", f"<|turn|>{TEXT}</s>"):
        assert text.encode(prompt) == theirs(prompt)["input_ids"]


def test_what_ends_a_completion_is_in_the_files(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "a")
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id
    assert Text.load(folder, 300).stop_ids == {ids("</s>")}
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert Text.load(folder, 300).stop_ids == {7}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [8, 9]}))
    text = Text.load(folder, 300)
    assert text.stop_ids == {8, 9}
    new = text.encode("ab")
    assert not text.finished([], new)
    assert text.finished([], [*new, 9])
    assert text.completion([], [*new, 9]) == "ab"
    with pytest.raises(DataError, match=r"the tokenizer has 261 ids, but the model's vocabulary has 260"):
        Text.load(folder, 260)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": "</s>"}))
    with pytest.raises(CheckpointError, match=r"eos_token_id = '</s>': expected an id or a list of ids"):
        Text.load(folder, 300)
    (folder / "generation_config.json").unlink()
    (folder / "config.json").unlink()
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config\.json: not a JSON object"):
        Text.load(folder, 300)


def _streamed(text: Text, prompt: list[int], new: list[int]) -> list[str]:
    """The pieces that are written while ``new`` grows by a token at a time."""
    pieces: list[str] = []
    stream = Stream(pieces.append)
    for count in range(1, len(new) + 1):
        stream.update(text.settled(prompt, new[:count]))
        if text.finished(prompt, new[:count]):
            break
    stream.update(text.completion(prompt, new[:count]))
    return pieces


def test_characters_of_several_tokens_are_written_whole(tmp_path: Path) -> None:
    text = Text.load(_folder(tmp_path / "a"), 300)
    new = text.encode(TEXT)
    assert len(new) > len(TEXT)  # a token a byte
    for split in range(len(new)):  # a prompt may end within a character
        prompt, rest = new[:split], new[split:]
        pieces = _streamed(text, prompt, rest)
        assert "".join(pieces) == text.completion(prompt, rest)
        if not text.tokenizer.decode(prompt).endswith("\ufffd"):
            assert "".join(pieces) == TEXT[len(text.tokenizer.decode(prompt)) :]
            assert all("\ufffd" not in piece for piece in pieces)
    assert "".join(_streamed(text, [], new[:-6])) == text.tokenizer.decode(new[:-6])


def test_a_stop_text_that_spans_tokens_is_never_written(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "a")
    for stop, expected in [("日本", "naïve 👩‍🚀 "), ("e 👩", "naïv"), ("none", TEXT), ("t", "naïve 👩‍🚀 日本 ")]:
        text = Text.load(folder, 300, ["absent", stop])
        new = text.encode(TEXT)
        ends = [count for count in range(1, len(new) + 1) if text.finished([], new[:count])]
        assert text.completion([], new[: ends[0]] if ends else new) == expected
        assert "".join(_streamed(text, [], new)) == expected
    with pytest.raises(DataError, match="--stop needs some text"):
        Text.load(folder, 300, [""])
