"""What is in a folder of tokens, and whether it is sound: the bodies of ``meshtron data show`` and ``verify``."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from meshtron.data.formats import open_tokens
from meshtron.data.samples import check_ids
from meshtron.data.shards import HEADER, Header, TokenSource
from meshtron.data.tokenizer import load_tokenizer, tokenizer_hash, vocabulary_size
from meshtron.errors import DataError

_BLOCK_TOKENS = 1 << 24


@dataclass(frozen=True, kw_only=True)
class Bin:
    """Documents with lengths in [low, high)."""

    low: int
    high: int
    num_documents: int
    num_tokens: int


def length_histogram(tokens: TokenSource) -> list[Bin]:
    """Documents by length in tokens, separator included, in bins that double."""
    lengths = np.diff(tokens.document_ends.astype(np.int64), prepend=0)
    if not len(lengths):
        return []
    exponents = np.frexp(lengths)[1]  # 1 -> 1, 2..3 -> 2, 4..7 -> 3
    counts = np.bincount(exponents)
    sums = np.bincount(exponents, weights=lengths)
    return [
        Bin(low=int(2.0 ** (e - 1)), high=2**e, num_documents=int(counts[e]), num_tokens=int(sums[e]))
        for e in range(int(exponents.min()), len(counts))
    ]


def sample_documents(folder: Path, count: int, seed: int = 0) -> Iterator[tuple[int, str]]:
    """Number and text of a few documents picked at random; of foreign files, which bring no tokenizer, the ids."""
    tokens = open_tokens(folder)
    ends = tokens.document_ends
    tokenizer = load_tokenizer(folder) if (folder / "tokenizer.json").is_file() else None
    picked = np.random.default_rng(seed).permutation(len(ends))[:count]
    for number in sorted(map(int, picked)):
        start = int(ends[number - 1]) if number else 0
        ids = tokens.read(start, min(256, int(ends[number]) - start)).tolist()
        yield number, str(ids) if tokenizer is None else tokenizer.decode(ids, skip_special_tokens=False)


def verify(path: Path) -> list[str]:
    """Check everything about a folder of tokens that can be checked; returns what was found to hold.

    Raises:
        DataError: the first thing that does not hold, with file and offset.
    """
    tokens = open_tokens(path)
    ends = tokens.document_ends.astype(np.int64)
    found = [f"{tokens.num_tokens:,} tokens in files of the right size"]
    if (ends[1:] <= ends[:-1]).any() or (len(ends) and (ends[0] <= 0 or ends[-1] != tokens.num_tokens)):
        wrong = int(np.flatnonzero(np.diff(ends, prepend=0) <= 0)[0]) if len(ends) else 0
        raise DataError(f"{path}: the document index is damaged at document {wrong}: it ends at token {ends[wrong]}")
    found.append(f"{len(ends):,} documents, none empty, index ascending")
    if not (path / HEADER).is_file():
        return found
    header = Header.read(path)
    tokenizer = load_tokenizer(path)
    if tokenizer_hash(tokenizer) != header.tokenizer_hash:
        raise DataError(f"{path}/tokenizer.json: not the tokenizer that made the ids (its hash differs)")
    if vocabulary_size(tokenizer) != header.vocab_size:
        raise DataError(
            f"{path}: vocabulary of {header.vocab_size} ids, tokenizer.json has {vocabulary_size(tokenizer)}"
        )
    found.append("tokenizer.json is the one that made the ids")
    separators = 0
    for start in range(0, tokens.num_tokens, _BLOCK_TOKENS):
        block = tokens.read(start, min(_BLOCK_TOKENS, tokens.num_tokens - start))
        check_ids(tokens, block, start, header.vocab_size)
        inside = ends[(ends > start) & (ends <= start + len(block))] - start - 1
        missing = np.flatnonzero(block[inside] != header.eos_id)
        if missing.size:
            place = start + int(inside[missing[0]])
            raise DataError(f"{tokens.locate(place)}: a document ends here without the separator {header.eos_id}")
        separators += int(np.count_nonzero(block == header.eos_id))
    if separators != len(ends):
        raise DataError(f"{path}: {separators} separators in {len(ends)} documents; expected one each")
    found.append(f"ids below {header.vocab_size:,}, one separator a document")
    prompts = tokens.prompt_lengths
    if prompts is not None:
        if (prompts >= np.diff(ends, prepend=0)).any():
            raise DataError(f"{path}: a prompt is longer than its document")
        found.append("prompts shorter than their documents")
    return found
