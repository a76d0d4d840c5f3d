"""From a row of tokens to samples: what one line of a batch holds.

Three ways to cut a TokenSource into samples of ``seq_len`` tokens:

``packing = "concat"``     documents one behind the other, cut every ``seq_len`` tokens; attention sees all of
it ``packing = "documents"``  cut the same way, but document ids come along, attention and positions stay
                           inside a document, and no token has to predict the next document's first
``packing = "pad"``        every document begins a sample; what is left of its last sample is padding

A user's own data needs none of this: anything that fits ``Dataset`` or ``StreamDataset`` can be a source.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import xxhash

from meshtron.data.shards import TokenSource
from meshtron.errors import DataError

IGNORE = -100
PACKINGS = ("concat", "documents", "pad")


class Sample(NamedTuple):
    """One sequence."""

    tokens: np.ndarray
    """Ids, (seq_len,)."""
    labels: np.ndarray
    """The id that each token has to predict, (seq_len,); -100 where there is no loss."""
    document_ids: np.ndarray | None = None
    """Number of each token's document inside the sample, (seq_len,), from 0 and ascending."""


@runtime_checkable
class Dataset(Protocol):
    """Samples with random access; meshtron shuffles them anew every epoch."""

    def __len__(self) -> int:
        """Samples in one epoch."""

    def __getitem__(self, index: int) -> "Sample | np.ndarray":
        """A Sample, or ``seq_len + 1`` token ids, for ``index`` in 0 .. len - 1; the same whenever it is
        asked."""


@runtime_checkable
class StreamDataset(Protocol):
    """Samples in an order of their own, with no known end."""

    position: int
    """How many samples come before the next one."""

    def seek(self, position: int) -> None:
        """Make sample ``position`` the next one; what follows must not depend on what was read before."""

    def __next__(self) -> "Sample | np.ndarray":
        """The next Sample, or ``seq_len + 1`` token ids."""


@runtime_checkable
class ResumableStream(StreamDataset, Protocol):
    """A StreamDataset whose ``seek`` would be slow: it says with each checkpoint what makes it fast."""

    def state(self, position: int) -> dict[str, Any]:
        """Plain values (for JSON) about ``position``, which is not far from what was given last."""

    def restore(self, state: dict[str, Any]) -> None:
        """Take up what ``state`` said in an earlier run; a ``seek`` to that position or a later one follows."""


class Windows:
    """Samples cut from a row of tokens by ``packing`` (a Dataset).

    Args:
        source: the tokens.
        seq_len: tokens a sample.
        packing: one of ``PACKINGS``; see the head of this file.
        vocab_size: every id read must be below this.
        pad_id: fills the rest of a padded sample; it carries no loss.

    Raises:
        DataError: an unknown packing, or no whole sample in the source.
    """

    def __init__(
        self, source: TokenSource, seq_len: int, packing: str = "concat", *, vocab_size: int, pad_id: int = 0
    ) -> None:
        if packing not in PACKINGS:
            raise DataError(f"packing {packing!r}: expected one of {', '.join(PACKINGS)}")
        self.source = source
        self.seq_len = seq_len
        self.packing = packing
        self.vocab_size = vocab_size
        self.pad_id = pad_id
        if packing != "concat" and not len(source.document_ends):
            raise DataError(f'{source.name}: packing = "{packing}" needs a document index, and there is none')
        # Of n tokens in a row, n - 1 have a next token to predict; neighbouring windows share one token.
        self._length = max(0, source.num_tokens - 1) // seq_len
        if packing == "pad":
            lengths = np.diff(source.document_ends.astype(np.int64), prepend=0)
            self._sample_ends = np.cumsum(np.maximum(0, lengths - 1 + seq_len - 1) // seq_len)
            self._length = int(self._sample_ends[-1])
        if not self._length:
            raise DataError(
                f"{source.name}: {source.num_tokens} tokens make no sample of seq_len = {seq_len}, which "
                "takes "
                f'{seq_len + 1}; use a shorter seq_len, more data or packing = "pad"'
            )

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Sample:
        if self.packing == "pad":
            return self._padded(index)
        start = index * self.seq_len
        ids = self._read(start, self.seq_len + 1)
        tokens, labels = ids[:-1], ids[1:]
        if self.packing == "concat" and self.source.prompt_lengths is None:
            return Sample(tokens, labels)
        labels = labels.copy()
        first, cuts = self._documents(start, self.seq_len + 1)
        if self.source.prompt_lengths is not None:
            self._mask_prompts(labels, start, first, len(cuts))
        if self.packing == "concat":
            return Sample(tokens, labels)
        labels[cuts - 1] = IGNORE
        document_ids = np.zeros(self.seq_len, dtype=np.int64)
        document_ids[cuts[cuts < self.seq_len]] = 1
        return Sample(tokens, labels, np.cumsum(document_ids))

    def _documents(self, start: int, count: int) -> tuple[int, np.ndarray]:
        """Number of the first document in [start, start + count), and where later ones begin, from
        ``start``."""
        ends = self.source.document_ends
        first, last = np.searchsorted(ends, np.array([start, start + count - 1], dtype=np.uint64), side="right")
        return int(first), ends[first:last].astype(np.int64) - start

    def _mask_prompts(self, labels: np.ndarray, start: int, first: int, more: int) -> None:
        """No loss where the token to be predicted is part of a prompt; ``labels[i]`` is token start + 1 +
        i."""
        prompts, ends = self.source.prompt_lengths, self.source.document_ends
        assert prompts is not None
        for document in range(first, first + more + 1):
            begin = (int(ends[document - 1]) if document else 0) - start - 1
            labels[max(0, begin) : max(0, begin + int(prompts[document]))] = IGNORE

    def _padded(self, index: int) -> Sample:
        document = int(np.searchsorted(self._sample_ends, index, side="right"))
        ends = self.source.document_ends
        begin, end = (int(ends[document - 1]) if document else 0), int(ends[document])
        piece = index - (int(self._sample_ends[document - 1]) if document else 0)
        start = begin + piece * self.seq_len
        ids = self._read(start, min(self.seq_len + 1, end - start))
        filled = len(ids) - 1
        tokens = np.full(self.seq_len, self.pad_id, dtype=np.int64)
        labels = np.full(self.seq_len, IGNORE, dtype=np.int64)
        tokens[:filled], labels[:filled] = ids[:-1], ids[1:]
        if self.source.prompt_lengths is not None:
            labels[: max(0, begin + int(self.source.prompt_lengths[document]) - start - 1)] = IGNORE
        return Sample(tokens, labels)

    def _read(self, start: int, count: int) -> np.ndarray:
        ids = self.source.read(start, count).astype(np.int64)
        check_ids(self.source, ids, start, self.vocab_size)
        return ids


def check_ids(source: TokenSource, ids: np.ndarray, start: int, vocab_size: int) -> None:
    """Raise DataError naming file and offset when one of ``ids``, which begin at ``start``, is not below
    ``vocab_size`` (a device would only report an assertion)."""
    if ids.size and (int(ids.max()) >= vocab_size or int(ids.min()) < 0):
        at = int(np.flatnonzero((ids >= vocab_size) | (ids < 0))[0])
        raise DataError(
            f"{source.locate(start + at)}: id {int(ids[at])} is outside the vocabulary of {vocab_size}: the "
            "file was "
            "made with another tokenizer or has another dtype"
        )


_SCANNED = 1 << 28
_BLOCK = 1 << 22


def scan_ids(source: TokenSource, vocab_size: int) -> str:
    """Check the ids of a source before training: all up to 268M tokens, of more an even sample of blocks that
    large in all (every window is checked again when it is read).

    Returns:
        A hash of what was read, of where documents end and of their prompts: other content has another one.

    Raises:
        DataError: an id is not below ``vocab_size``; the message names file and offset.
    """
    digest = xxhash.xxh3_128()
    for start, count in _even_blocks(source.num_tokens):
        ids = source.read(start, count)
        check_ids(source, ids, start, vocab_size)
        digest.update(np.ascontiguousarray(ids).data)
    for index in (source.document_ends, source.prompt_lengths):
        if index is not None:
            for start, count in _even_blocks(len(index)):
                digest.update(np.ascontiguousarray(index[start : start + count]).data)
    return digest.hexdigest()


def _even_blocks(size: int) -> Iterator[tuple[int, int]]:
    """Start and length of blocks of a row: all of it, or a sample spread evenly over it."""
    blocks = -(-size // _BLOCK)
    chosen = min(blocks, _SCANNED // _BLOCK)
    for number in range(chosen):
        start = (number * blocks // chosen) * _BLOCK
        yield start, min(_BLOCK, size - start)
