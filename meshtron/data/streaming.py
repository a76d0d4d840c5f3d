"""Samples straight from a Hugging Face dataset, tokenized on the way, with exact resume.

``HubTokens`` reads rows in their own order, over and over, and tokenizes them as ``meshtron prepare`` does;
``PackedStream`` cuts the row of tokens into samples as ``Windows`` does, so both give the samples of the prepared
corpus in file order. Every dp rank reads and tokenizes the whole stream and skips the rows of others, for nothing but
the text says where a sample begins: past a few dp ranks or a few epochs, prepare the corpus once instead.
"""

import itertools
import threading
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshtron.data.encode import EncodeOptions, Encoder, Segment, text_keys
from meshtron.data.readers import open_hub
from meshtron.data.samples import Sample, Windows
from meshtron.data.tokenizer import end_of_text_id, load_tokenizer, vocabulary_size
from meshtron.errors import DataError

_CHUNK_ROWS = 64
_MARK_SAMPLES = 64  # least distance between places that a resume can go to directly
_MAX_MARKS = 1024


class MemoryTokens:
    """A row of whole or cut documents in memory (a TokenSource).

    Args:
        name: what error messages call it.
        ids: the tokens.
        document_ends: where each document ends, the last one at the end of ``ids``.
        prompt_lengths: leading tokens of each document without loss, or None.
    """

    def __init__(self, name: str, ids: np.ndarray, document_ends: np.ndarray, prompt_lengths: np.ndarray | None):
        self.name = name
        self.ids = ids
        self.num_tokens = len(ids)
        self.document_ends = document_ends.astype(np.uint64)
        self.prompt_lengths = prompt_lengths

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens [start, start + count)."""
        return self.ids[start : start + count]

    def locate(self, position: int) -> str:
        """The stream; where the text of a token lies is not known."""
        return f"{self.name}, token {position} of what was read last"

    def behind(self, start: int) -> "MemoryTokens":
        """What is left from token ``start`` on."""
        ends = self.document_ends.astype(np.int64) - start
        kept = ends > 0
        prompts = self.prompt_lengths
        if prompts is not None:
            begins = np.concatenate([[0], self.document_ends[:-1].astype(np.int64)]) - start
            prompts = np.maximum(0, prompts + np.minimum(0, begins))[kept]
        return MemoryTokens(self.name, self.ids[start:], ends[kept], prompts)

    def followed_by(self, other: "MemoryTokens") -> "MemoryTokens":
        """Both in one row."""
        ends = np.concatenate([self.document_ends, other.document_ends + np.uint64(self.num_tokens)])
        prompts = None
        if self.prompt_lengths is not None and other.prompt_lengths is not None:
            prompts = np.concatenate([self.prompt_lengths, other.prompt_lengths])
        return MemoryTokens(self.name, np.concatenate([self.ids, other.ids]), ends, prompts)


class HubTokens:
    """Rows of a Hugging Face dataset, tokenized in groups; at the end it begins again.

    Args:
        name: ``NAME[:SPLIT]``; a name is what ``datasets.load_dataset`` takes, local folders included.
        tokenizer: a tokenizer.json or a folder with one.
        text_key, prompt_key, completion_key: where a row has its text, or its prompt and completion.
        options: further arguments of ``load_dataset``.

    Raises:
        DataError: no such dataset, or none of the columns.
    """

    def __init__(
        self,
        name: str,
        tokenizer: str,
        *,
        text_key: str = "text",
        prompt_key: str | None = None,
        completion_key: str | None = None,
        **options: Any,
    ) -> None:
        self.name = f"hf:{name}"
        loaded = load_tokenizer(tokenizer)
        self.encoding = EncodeOptions(
            keys=text_keys(text_key, prompt_key, completion_key),
            eos_id=end_of_text_id(loaded, tokenizer),
            vocab_size=vocabulary_size(loaded),
        )
        self._encoder = Encoder(loaded.to_str(), self.encoding)
        self._rows = _select(self.name, open_hub(name, **options), self.encoding.keys)
        self._row = 0
        self._iterator = iter(self._rows)
        self._begin = self.state()

    def state(self) -> dict[str, Any]:
        """The place in the dataset, as plain values."""
        return {"row": self._row, "dataset": self._rows.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on at a place that ``state`` has said."""
        self._row = state["row"]
        self._rows.load_state_dict(state["dataset"])
        self._iterator = iter(self._rows)

    def read(self) -> MemoryTokens:
        """The tokens of the next rows; never none.

        Raises:
            DataError: a row that is no text, or a dataset without any text.
        """
        starts_at = self._row
        while True:
            first, rows = self._row, self._next_rows()
            self._row += len(rows)
            if rows:
                encoded = self._encoder.encode([Segment(file=0, kind="rows", first=first, records=rows)])
                for _, number, reason in encoded.bad:
                    raise DataError(f"{self.name}, row {number + 1}: {reason}")
                part = encoded.train
                if len(part.tokens):
                    return MemoryTokens(self.name, part.tokens, part.lengths.cumsum(), part.prompts)
            if len(rows) < _CHUNK_ROWS:
                if starts_at == 0:
                    raise DataError(f"{self.name}: no text in any of {self._row} rows")
                starts_at = 0
                self.restore(self._begin)

    def _next_rows(self) -> list[Any]:
        try:
            return list(itertools.islice(self._iterator, _CHUNK_ROWS))
        except Exception as error:  # the library raises whatever its readers and the network do
            raise DataError(f"{self.name}: cannot be read behind row {self._row} ({error})") from error


def _select(name: str, rows: Any, keys: tuple[str, ...]) -> Any:
    if not rows.column_names:  # a stream may not know them
        return rows
    missing = [key for key in keys if key not in rows.column_names]
    if missing:
        raise DataError(f"{name}: no column {missing[0]!r}; there are {', '.join(rows.column_names)}")
    return rows.select_columns(list(keys))


@dataclass(frozen=True, kw_only=True)
class _Mark:
    """A place from which the samples that follow can be made again."""

    position: int
    state: dict[str, Any]
    """Of the tokens, before the chunk in which the sample begins."""
    skip: int
    """Tokens of that chunk before the sample."""


class PackedStream:
    """Samples cut from tokens that are read on the way (a ResumableStream).

    Args:
        tokens: what is read.
        seq_len, packing: as for ``Windows``.
        vocab_size: every id must be below it.
    """

    def __init__(self, tokens: HubTokens, seq_len: int, packing: str = "concat", *, vocab_size: int) -> None:
        self.tokens = tokens
        self.seq_len = seq_len
        self.packing = packing
        self.vocab_size = vocab_size
        self._marks = [_Mark(position=0, state=tokens.state(), skip=0)]
        self._lock = threading.Lock()  # batches are built in a thread, checkpoints are not
        self._start_at(self._marks[0])

    def __next__(self) -> Sample:
        self._fill()
        assert self._windows is not None
        sample = self._windows[self._next]
        self._next += 1
        self.position += 1
        return sample

    def seek(self, position: int) -> None:
        """Make sample ``position`` the next one; going back means reading from the mark before it."""
        mark = self._mark_before(position)
        if position < self.position or mark.position > self.position:
            self._start_at(mark)
        while self.position < position:
            self._fill()
            assert self._windows is not None
            skipped = min(position - self.position, len(self._windows) - self._next)
            self._next += skipped
            self.position += skipped

    def state(self, position: int) -> dict[str, Any]:
        """Plain values with which ``restore`` goes to ``position``, which has been reached, without reading all."""
        with self._lock:
            mark = self._mark_before(position)
            self._marks = [mark, *(later for later in self._marks if later.position > mark.position)]
            return dict(vars(mark))

    def restore(self, state: dict[str, Any]) -> None:
        """Know the place that ``state`` has told, in this run or an earlier one."""
        with self._lock:
            self._marks = sorted([*self._marks, _Mark(**state)], key=lambda mark: mark.position)

    def _mark_before(self, position: int) -> _Mark:
        return max((mark for mark in self._marks if mark.position <= position), key=lambda mark: mark.position)

    def _start_at(self, mark: _Mark) -> None:
        self.tokens.restore(mark.state)
        self.position = mark.position
        self._row: MemoryTokens | None = None
        self._windows: Windows | None = None
        self._next = 0
        # Chunks in the row: state before each, and how many of its tokens are in the row and were dropped before.
        self._chunks: deque[tuple[dict[str, Any], int, int]] = deque()
        self._read(skip=mark.skip)

    def _fill(self) -> None:
        """Read until there is a sample to give."""
        while self._windows is None or self._next == len(self._windows):
            if self._windows is not None:
                self._drop_used()
            self._read()

    def _drop_used(self) -> None:
        """Keep the tokens behind the last sample, of which the next begins with its last one, and mark the place."""
        assert self._row is not None
        used = self._row.num_tokens if self.packing == "pad" else self._next * self.seq_len
        self._row = self._row.behind(used) if used < self._row.num_tokens else None
        while used:
            state, held, dropped = self._chunks.popleft()
            if used < held:
                self._chunks.appendleft((state, held - used, dropped + used))
            used -= min(used, held)
        self._windows, self._next = None, 0
        if self._chunks:
            state, _, dropped = self._chunks[0]
            self._mark(_Mark(position=self.position, state=state, skip=dropped))
        else:
            self._mark(_Mark(position=self.position, state=self.tokens.state(), skip=0))

    def _mark(self, mark: _Mark) -> None:
        with self._lock:
            if mark.position < self._marks[-1].position + _MARK_SAMPLES:
                return
            self._marks.append(mark)
            if len(self._marks) > _MAX_MARKS:
                del self._marks[1::2]

    def _read(self, skip: int = 0) -> None:
        state = self.tokens.state()
        chunk = self.tokens.read()
        if skip:
            chunk = chunk.behind(skip)
        self._chunks.append((state, chunk.num_tokens, skip))
        self._row = chunk if self._row is None else self._row.followed_by(chunk)
        if self.packing != "pad" and self._row.num_tokens <= self.seq_len:
            return
        if self.packing == "pad" and not (np.diff(self._row.document_ends.astype(np.int64), prepend=0) > 1).any():
            return
        self._windows = Windows(self._row, self.seq_len, self.packing, vocab_size=self.vocab_size)
