"""The tokenizer beside a corpus: load one, train one, and find the id that ends a document."""

import hashlib
import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from meshtron.data.shards import HEADER, Header
from meshtron.errors import DataError

END_OF_TEXT = "<|endoftext|>"
# Names that end a document in well-known vocabularies, tried in this order when nothing else says which it
# is.
_KNOWN_EOS = (END_OF_TEXT, "<|end_of_text|>", "<|im_end|>", "</s>", "<eos>", "<|eos|>", "<|end▁of▁sentence|>")

# What a folder may hold beside tokenizer.json: names of special tokens, chat templates, the older formats.
COMPANIONS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)


def tokenizer_file(path: str | Path) -> Path | None:
    """The tokenizer.json that a path means: the file itself or the one in a folder; None where there is none."""
    file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
    return file if file.suffix == ".json" and file.is_file() else None


def load_tokenizer(path: str | Path, vocab_size: int | None = None) -> Tokenizer:
    """Load a tokenizer.json, or the one in a folder.

    Truncation and padding that the file may ask for are off, and names of special tokens that occur in a text
    are text, so a document can never contain a separator.

    Args:
        path: the file or its folder.
        vocab_size: of the model that the tokenizer is to fit; by default any.

    Raises:
        DataError: no such file, not a tokenizer, or one with more ids than the model.
    """
    file = tokenizer_file(path)
    if file is None:
        raise DataError(f"{path}: no tokenizer.json there")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for a bad file
        raise DataError(f"{file}: not a tokenizer.json that the tokenizers library can read ({error})") from None
    size = vocabulary_size(tokenizer)
    if vocab_size is not None and size > vocab_size:
        raise DataError(
            f"{path}: the tokenizer has {size} ids, but the model's vocabulary has {vocab_size}: "
            "it belongs to another model"
        )
    return plain(tokenizer)


def plain(tokenizer: Tokenizer) -> Tokenizer:
    """Switch off truncation, padding and special tokens inside texts."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer (Sennrich et al., 2016, on bytes as in GPT-2) with an end-of-text
    token.

    Args:
        texts: what it learns from.
        vocab_size: ids in all: 256 bytes, the end-of-text token, and merges.

    Raises:
        DataError: a vocabulary too small for the bytes.
    """
    if vocab_size < 257:
        raise DataError(f"--train-tokenizer {vocab_size}: expected at least 257 (256 bytes and {END_OF_TEXT})")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return plain(tokenizer)


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """One more than the largest id, added tokens included (ids may have gaps)."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def copy_companions(path: str | Path, out: Path) -> None:
    """Copy to the folder ``out`` what lies beside a tokenizer.json, given by its own path or its folder's."""
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    for name in COMPANIONS:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, out / name)


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """SHA-256 of the tokenizer as JSON, in hex."""
    return hashlib.sha256(tokenizer.to_str().encode()).hexdigest()


def special_id(tokenizer: Tokenizer, token: str) -> int:
    """Id of a token given by name.

    Raises:
        DataError: the vocabulary has no such token.
    """
    found = tokenizer.token_to_id(token)
    if found is None:
        raise DataError(f"the tokenizer has no token {token!r}")
    return found


def end_of_text_id(tokenizer: Tokenizer, path: str | Path | None = None, token: str | None = None) -> int:
    """The id that ends a document: that of ``token``, or what ``find_end_of_text`` finds.

    Raises:
        DataError: there is none.
    """
    found = special_id(tokenizer, token) if token is not None else find_end_of_text(tokenizer, path)
    if found is None:
        raise DataError(
            f"which token ends a document? None of {', '.join(_KNOWN_EOS)} is known; name it with --eos-token"
        )
    return found


def find_end_of_text(tokenizer: Tokenizer, path: str | Path | None = None) -> int | None:
    """The id that ends a document, from the tokenizer's folder ``path`` (the header of a prepared corpus, else
    tokenizer_config.json) or the first well-known name in the vocabulary; None where nothing says which.

    Raises:
        DataError: a file of the folder is damaged, or names a token that the vocabulary lacks.
    """
    if path is not None:
        folder = Path(path) if Path(path).is_dir() else Path(path).parent
        if (folder / HEADER).is_file():
            return Header.read(folder).eos_id
        config = folder / "tokenizer_config.json"
        try:
            named = json.loads(config.read_text(encoding="utf-8")).get("eos_token") if config.is_file() else None
        except (ValueError, AttributeError) as error:
            raise DataError(f"{config}: not a JSON object ({error})") from None
        if isinstance(named, dict):
            named = named.get("content")
        if named:
            return special_id(tokenizer, named)
    return next((found for name in _KNOWN_EOS if (found := tokenizer.token_to_id(name)) is not None), None)
