"""From raw records to token ids: the work of one worker process, on one chunk of records at a time.

This module and what it imports stay light (no torch): every worker imports it.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import xxhash
from tokenizers import Tokenizer

from meshtron.data.readers import BadRecord, Record
from meshtron.data.shards import DTYPES, dtype_name
from meshtron.data.tokenizer import plain
from meshtron.errors import DataError

# Longer documents are tokenized in pieces, because an Encoding takes some 200 bytes a token.
PIECE_CHARACTERS = 1 << 16


@dataclass(frozen=True, kw_only=True)
class EncodeOptions:
    """What becomes of a record, apart from the tokenizer."""

    keys: tuple[str, ...] = ("text",)
    """Where the text is in a row; or two, for the prompt and the completion of a document in two parts."""
    eos_id: int
    """Appended to every document, once."""
    bos_id: int | None = None
    """Put before every document, once, when given."""
    vocab_size: int
    val_fraction: float = 0.0
    """Documents whose hash is below this fraction of all hashes are validation."""


def text_keys(text_key: str, prompt_key: str | None, completion_key: str | None) -> tuple[str, ...]:
    """The keys to read: prompt and completion where they are given, else the text.

    Raises:
        DataError: one of prompt and completion without the other.
    """
    if prompt_key is None and completion_key is None:
        return (text_key,)
    if prompt_key is None or completion_key is None:
        raise DataError("the keys of prompt and completion go together: give both or none")
    return (prompt_key, completion_key)


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Records of one file that follow one another."""

    file: int
    """Number of the file among the inputs."""
    kind: str
    """TextFile.kind."""
    first: int
    """Number of the first record in the file, from 0."""
    records: list[Record | BadRecord]


@dataclass(kw_only=True)
class Part:
    """Tokens of one side (training or validation) of a chunk."""

    tokens: np.ndarray
    lengths: np.ndarray
    prompts: np.ndarray | None = None


@dataclass(kw_only=True)
class Encoded:
    """What a chunk has become."""

    train: Part
    validation: Part
    counts: dict[str, int] = field(default_factory=dict)
    bad: list[tuple[int, int, str]] = field(default_factory=list)
    """File, record and reason of what could not be read."""


class Encoder:
    """Tokenizes chunks.

    Args:
        tokenizer_json: the tokenizer, as the text of its file.
        options: see EncodeOptions.
    """

    def __init__(self, tokenizer_json: str, options: EncodeOptions) -> None:
        self.tokenizer = plain(Tokenizer.from_str(tokenizer_json))
        self.options = options
        self.dtype = DTYPES[dtype_name(options.vocab_size)]
        self.cuts_are_safe = _cuts_are_safe(self.tokenizer)

    def encode(self, segments: list[Segment]) -> Encoded:
        """Tokens of a chunk, in the order of its records."""
        counts = {"read": 0, "empty": 0, "missing": 0, "text_bytes": 0}
        bad: list[tuple[int, int, str]] = []
        documents: list[tuple[str, ...]] = []
        is_validation: list[bool] = []
        for segment in segments:
            for number, record in enumerate(segment.records, segment.first):
                counts["read"] += 1
                try:
                    document = self._document(record, segment.kind)
                except BadRecord as error:
                    bad.append((segment.file, number, str(error)))
                    continue
                if document is None or not any(document):
                    counts["missing" if document is None else "empty"] += 1
                    continue
                content = [part.encode() for part in document]
                counts["text_bytes"] += sum(map(len, content))
                documents.append(document)
                is_validation.append(_fraction(content) < self.options.val_fraction)
        train, validation = self._tokenize(documents, np.array(is_validation, dtype=bool))
        return Encoded(train=train, validation=validation, counts=counts, bad=bad)

    def _document(self, record: Record | BadRecord, kind: str) -> tuple[str, ...] | None:
        """The text of a record, or its prompt and completion; None where there is none.

        Raises:
            BadRecord: not UTF-8, not JSON, or not text.
        """
        if isinstance(record, BadRecord):
            raise record
        if isinstance(record, bytes):
            try:
                text = record.decode()
            except UnicodeDecodeError as error:
                line = record.count(b"\n", 0, error.start) + 1
                where = f"line {line}" if kind == "text" else f"byte {error.start} of the line"
                raise BadRecord(f"not UTF-8 ({error.reason}, {where})") from None
            if kind == "text":
                return (text,)
            if not text.strip():
                return ("",)
            try:
                record = json.loads(text)
            except (ValueError, RecursionError) as error:  # the latter: lists within lists within lists
                raise BadRecord(f"bad JSON ({error})") from None
            if not isinstance(record, dict):
                raise BadRecord("not a JSON object")
        parts: list[str] = []
        for key in self.options.keys:
            part = record.get(key)
            if part is None:
                return None
            if not isinstance(part, str):
                raise BadRecord(f"{key!r} is {type(part).__name__}, expected a string")
            if not part.isascii() and _SURROGATE.search(part):
                raise BadRecord(f"{key!r} has a lone surrogate, which is no character")
            parts.append(part)
        return tuple(parts)

    def _tokenize(self, documents: list[tuple[str, ...]], is_validation: np.ndarray) -> tuple[Part, Part]:
        pieces: list[str] = []
        owners: list[int] = []  # number of the part (a document's text, or its prompt, or its completion)
        width = len(self.options.keys)
        for number, document in enumerate(documents):
            for offset, part in enumerate(document):
                for piece in self._pieces(part):
                    pieces.append(piece)
                    owners.append(number * width + offset)
        ids, lengths = self._ids(pieces)
        part_lengths = np.zeros(len(documents) * width, dtype=np.int64)
        np.add.at(part_lengths, owners, lengths)
        starts = part_lengths[::width].cumsum() if width == 1 else part_lengths.reshape(-1, width).sum(1).cumsum()
        # One separator behind every document, and one begin before it where asked for.
        has_bos = self.options.bos_id is not None
        text_lengths = np.diff(starts, prepend=0)
        lengths = text_lengths + 1 + has_bos
        ends = lengths.cumsum()
        tokens = np.empty(int(ends[-1]) if len(ends) else 0, dtype=self.dtype)
        is_text = np.ones(len(tokens), dtype=bool)
        is_text[ends - 1] = False
        tokens[ends - 1] = self.options.eos_id
        if has_bos:
            is_text[ends - lengths] = False
            tokens[ends - lengths] = self.options.bos_id
        tokens[is_text] = ids
        prompts = part_lengths[::2] + has_bos if width == 2 else None
        if not is_validation.any():
            nothing = slice(0, 0)
            return (
                Part(tokens=tokens, lengths=lengths, prompts=prompts),
                Part(tokens=tokens[nothing], lengths=lengths[nothing], prompts=prompts),
            )
        side = np.repeat(is_validation, lengths)
        train, validation = (
            Part(
                tokens=tokens[side == wanted],
                lengths=lengths[is_validation == wanted],
                prompts=None if prompts is None else prompts[is_validation == wanted],
            )
            for wanted in (False, True)
        )
        return train, validation

    def _ids(self, pieces: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Ids of all pieces in one row, and how many each has."""
        rows: list[np.ndarray] = []
        lengths: list[int] = []
        for batch in _batches(pieces):
            encodings = self.tokenizer.encode_batch_fast(batch, add_special_tokens=False)
            flat: list[int] = []
            for encoding in encodings:
                before = len(flat)
                flat += encoding.ids
                lengths.append(len(flat) - before)
            rows.append(np.array(flat, dtype=self.dtype))
        ids = np.concatenate(rows) if rows else np.empty(0, self.dtype)
        return ids, np.array(lengths, dtype=np.int64)

    def _pieces(self, text: str) -> Iterator[str]:
        if len(text) <= PIECE_CHARACTERS or not self.cuts_are_safe:
            yield text
            return
        start = 0
        while start < len(text):
            stop = _cut(text, start + PIECE_CHARACTERS)
            yield text[start:stop]
            start = stop


_SURROGATE = re.compile("[\ud800-\udfff]")
# A line feed, or the place before a space, with letters around it: no known pre-tokenizer joins across it.
_CUT = re.compile(r"(?<=[^\W\d_]\n)(?=[^\W\d_])|(?<=[^\W\d_])(?= [^\W\d_])")


def _cut(text: str, wanted: int) -> int:
    """The first good place to cut at or behind ``wanted``; the end of the text where there is none in
    reach."""
    if wanted >= len(text):
        return len(text)
    found = _CUT.search(text, wanted, min(len(text), wanted + PIECE_CHARACTERS))
    return found.start() if found else wanted


def _cuts_are_safe(tokenizer: Tokenizer) -> bool:
    """Whether a text's ids are those of its pieces one after the other; not so where a prefix is added to
    each."""
    for left, right in (
        ("a line\n", "another line"),
        ("some", " words"),
        ("Ünder", " größe"),
        ("one", " two three"),
    ):
        pieces = tokenizer.encode_batch_fast([left, right, left + right], add_special_tokens=False)
        if pieces[0].ids + pieces[1].ids != pieces[2].ids:
            return False
    return True


def _batches(pieces: list[str]) -> Iterator[list[str]]:
    """Pieces in groups of bounded size."""
    batch: list[str] = []
    size = 0
    for piece in pieces:
        if batch and size + len(piece) > PIECE_CHARACTERS:
            yield batch
            batch, size = [], 0
        batch.append(piece)
        size += len(piece)
    if batch:
        yield batch


def _fraction(content: list[bytes]) -> float:
    """A document's hash as a number in [0, 1): equal documents are equal, wherever they come from."""
    digest = xxhash.xxh3_64()
    for part in content:
        digest.update(part)
        digest.update(b"\0")
    return digest.intdigest() / 2**64
