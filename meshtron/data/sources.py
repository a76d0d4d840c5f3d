"""A path in a recipe to samples: what is there is opened, cut into sequences and checked against the model."""

from pathlib import Path

from meshtron.data.formats import open_tokens
from meshtron.data.loader import Source
from meshtron.data.samples import Windows, scan_ids
from meshtron.errors import DataError


def open_source(
    path: str | Path, *, seq_len: int, vocab_size: int, weight: float = 1.0, packing: str = "concat"
) -> Source:
    """Samples of ``seq_len`` tokens from the token files at a path, checked against the model's vocabulary.

    Raises:
        DataError: unknown format, damaged or empty files, ids outside the vocabulary.
    """
    tokens = open_tokens(path)
    if not tokens.num_tokens:
        raise DataError(f"{path}: no tokens in it")
    scan_ids(tokens, vocab_size)
    dataset = Windows(tokens, seq_len, packing, vocab_size=vocab_size)
    return Source(key=str(path), dataset=dataset, weight=weight)
