"""A path in a recipe to samples: what is there is opened, cut into sequences and checked against the model."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshtron.data.formats import open_tokens
from meshtron.data.loader import Source
from meshtron.data.samples import Dataset, StreamDataset, Windows, scan_ids
from meshtron.errors import DataError


def open_source(
    path: str | Path,
    *,
    seq_len: int,
    vocab_size: int,
    weight: float = 1.0,
    packing: str = "concat",
    options: Mapping[str, Any] | None = None,
    tokenizer: str = "",
) -> Source:
    """Samples of ``seq_len`` tokens, checked against the model's vocabulary.

    Args:
        path: token files of any known format; ``hf:NAME[:SPLIT]``; or ``py:MODULE:NAME``.
        seq_len, packing: as for ``Windows``; a dataset of one's own packs as it likes.
        vocab_size: of the model.
        weight: of the source in its mixture.
        options: keyword arguments for ``hf:`` (see ``HubTokens``) and ``py:``.
        tokenizer: for ``hf:``, a tokenizer.json or a folder with one.

    Raises:
        DataError: unknown format, damaged or empty files, ids outside the vocabulary.
    """
    kind, _, name = str(path).partition(":")
    content = ""
    if kind == "py":
        dataset = _own_dataset(str(path), name, seq_len, options or {})
    elif kind == "hf":
        dataset = _hub_dataset(str(path), name, tokenizer, seq_len, packing, vocab_size, options or {})
    else:
        if options:
            raise DataError(f"{path}: options {', '.join(options)} are for hf: and py: sources, this is a path")
        dataset, content = _windows(path, seq_len, packing, vocab_size)
    return Source(key=str(path), dataset=dataset, weight=weight, content=content)


def _windows(path: str | Path, seq_len: int, packing: str, vocab_size: int) -> tuple[Windows, str]:
    """Samples of token files, and a hash of the files' content."""
    tokens = open_tokens(path)
    if not tokens.num_tokens:
        raise DataError(f"{path}: no tokens in it")
    content = scan_ids(tokens, vocab_size)
    return Windows(tokens, seq_len, packing, vocab_size=vocab_size), content


def _hub_dataset(
    path: str, name: str, tokenizer: str, seq_len: int, packing: str, vocab_size: int, options: Mapping[str, Any]
) -> StreamDataset:
    from meshtron.data.streaming import HubTokens, PackedStream

    tokens = HubTokens(name, tokenizer, **options)
    if tokens.encoding.vocab_size > vocab_size:
        raise DataError(
            f"{path}: {tokenizer} has {tokens.encoding.vocab_size} ids, but model.vocab_size is {vocab_size}"
        )
    return PackedStream(tokens, seq_len, packing, vocab_size=vocab_size)


def _own_dataset(path: str, name: str, seq_len: int, options: Mapping[str, Any]) -> Dataset | StreamDataset:
    """What ``py:MODULE:NAME`` makes when it is called with ``seq_len`` and the options."""
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise DataError(f"{path}: expected py:MODULE:NAME, as in py:my_package.my_data:MyDataset")
    try:
        make = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise DataError(f"{path}: {error}; the module must be importable from where training is started") from error
    dataset = make(seq_len=seq_len, **options)
    if not isinstance(dataset, Dataset | StreamDataset):
        raise DataError(
            f"{path}: {type(dataset).__name__} is no dataset: it needs __len__ and __getitem__, or position, seek "
            "and __next__ (meshtron.data.Dataset and StreamDataset say more)"
        )
    return dataset
