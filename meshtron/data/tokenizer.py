"""The tokenizer beside a corpus: load one, train one, and find the id that ends a document."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from meshtron.errors import DataError

END_OF_TEXT = "<|endoftext|>"
# Names that end a document in well-known vocabularies, tried in this order when nothing else says which it
# is.
_KNOWN_EOS = (END_OF_TEXT, "<|end_of_text|>", "<|im_end|>", "</s>", "<eos>", "<|eos|>", "<|end▁of▁sentence|>")


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load a tokenizer.json, or the one in a folder.

    Truncation and padding that the file may ask for are off, and names of special tokens that occur in a text
    are text, so a document can never contain a separator.

    Raises:
        DataError: no such file, or not a tokenizer.
    """
    path = Path(path)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise DataError(f"{path}: no tokenizer.json there")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for a bad file
        raise DataError(f"{file}: not a tokenizer.json that the tokenizers library can read ({error})") from None
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
    """The id that ends a document: ``token``, or what tokenizer_config.json in the folder ``path`` says, or
    the first well-known name in the vocabulary.

    Raises:
        DataError: none of them is there.
    """
    if token is not None:
        return special_id(tokenizer, token)
    if path is not None:
        folder = Path(path) if Path(path).is_dir() else Path(path).parent
        config = folder / "tokenizer_config.json"
        named = json.loads(config.read_text()).get("eos_token") if config.is_file() else None
        if isinstance(named, dict):
            named = named.get("content")
        if named:
            return special_id(tokenizer, named)
    for name in _KNOWN_EOS:
        found = tokenizer.token_to_id(name)
        if found is not None:
            return found
    raise DataError(
        f"which token ends a document? None of {', '.join(_KNOWN_EOS)} is known; name it with --eos-token"
    )
