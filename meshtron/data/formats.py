"""A path in a recipe to samples: which format lies there, and how it is opened."""

from pathlib import Path

from meshtron.data.loader import Source
from meshtron.data.samples import Windows, scan_ids
from meshtron.data.shards import HEADER, TokenSource, open_shards
from meshtron.errors import DataError


def open_tokens(path: str | Path) -> TokenSource:
    """Map the token files at a path.

    Raises:
        DataError: nothing there that is known.
    """
    path = Path(path)
    if (path / HEADER).is_file():
        return open_shards(path)
    if not path.exists():
        raise DataError(f"{path}: not there; make it with `meshtron prepare SOURCE... --out {path}`")
    raise DataError(f"{path}: no {HEADER} in it; expected a folder made by `meshtron prepare`")


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
