"""``meshtron prepare``: files of text to a folder of token shards, in parallel, exactly once.

One process reads records and cuts them into chunks; where a chunk ends depends on the input alone. Workers
turn chunks into ids; their results are written in the order of the chunks. So the output does not depend on
the number of workers. Every few seconds what was written is synced and a journal says how far the input has
come; after a kill the same command cuts off what the journal does not know and goes on there.
"""

import fcntl
import hashlib
import json
import multiprocessing
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import xxhash
from tokenizers import Tokenizer

from meshtron.data.documents import BadRecord, Record, Selection, TextFile, find_files, read_records
from meshtron.data.encode import Encoded, EncodeOptions, Encoder, Segment
from meshtron.data.shards import HEADER, Header, ShardWriter, dtype_name, publish, write_synced
from meshtron.data.tokenizer import (
    copy_companions,
    end_of_text_id,
    load_tokenizer,
    special_id,
    tokenizer_hash,
    train_tokenizer,
    vocabulary_size,
)
from meshtron.errors import DataError

CHUNK_BYTES = 1 << 19
CHUNK_RECORDS = 1 << 12
TOKENIZER_SAMPLE_BYTES = 10_000_000
_JOURNAL = "journal.json"
_JOURNAL_INTERVAL_S = 5.0
_LOCATION = {"jsonl": "line", "json": "element", "text": ""}


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """Everything that ``meshtron prepare`` is told, apart from the sources and the place."""

    tokenizer: str | None = None
    """A tokenizer.json or a folder with one."""
    train_tokenizer: int | None = None
    """Train a byte-level BPE tokenizer with this many ids instead."""
    text_key: str = "text"
    prompt_key: str | None = None
    completion_key: str | None = None
    eos_token: str | None = None
    """Name of the token behind every document; by default the tokenizer's own end-of-text token."""
    bos_token: str | None = None
    """Name of a token before every document; by default none."""
    val_fraction: float = 0.0
    skip_bad: int = 0
    """Unreadable records to skip and count before giving up."""
    workers: int = 0
    """Worker processes; 0 for one a core. 1 works in this process."""
    selection: Selection = field(default_factory=Selection)
    max_shard_tokens: int = 1 << 28


@dataclass(kw_only=True)
class Progress:
    """How far prepare has come, for whoever watches."""

    total_bytes: int
    """Size of all inputs as they lie on disk; 0 where it is not known."""
    done_bytes: int = 0
    """Of inputs that are read to the end."""
    text_bytes: int = 0
    num_documents: int = 0
    num_tokens: int = 0
    phase: str = "tokenizing"


Watch = Callable[[Progress], None]


def prepare_corpus(
    sources: Sequence[str], out: str | Path, options: PrepareOptions, watch: Watch = lambda progress: None
) -> Header:
    """Tokenize ``sources`` into the new folder ``out``; with ``val_fraction`` also into ``out/validation``.

    Args:
        sources: see ``documents.find_files``.
        out: must not exist. ``out.partial`` is used on the way, and found again after a kill.
        options: see PrepareOptions.
        watch: called with the progress now and then.

    Returns:
        The header of ``out``.

    Raises:
        DataError: wrong options, unreadable sources, more bad records than ``skip_bad``, or no text at all.
    """
    out = Path(out)
    _check(options)
    if out.exists():
        raise DataError(f"{out}: there already; remove it or choose another --out")
    files = find_files(sources, options.selection)
    partial = out.with_name(out.name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)
    with open(partial.parent / (partial.name + ".lock"), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise DataError(f"{partial}: another prepare works there") from None
        header = _Preparation(files, sources, partial, options, watch).run()
        publish(partial, out)
        os.unlink(lock.name)
    return header


def _check(options: PrepareOptions) -> None:
    if (options.tokenizer is None) == (options.train_tokenizer is None):
        raise DataError("give either --tokenizer or --train-tokenizer")
    if (options.prompt_key is None) != (options.completion_key is None):
        raise DataError("--prompt-key and --completion-key go together")
    if not 0 <= options.val_fraction < 1:
        raise DataError(f"--val-fraction {options.val_fraction}: expected at least 0 and below 1")


class _Preparation:
    """One run of prepare, in phases: tokenizer, journal, tokens, header."""

    def __init__(
        self,
        files: list[TextFile],
        sources: Sequence[str],
        folder: Path,
        options: PrepareOptions,
        watch: Watch,
    ) -> None:
        self.files = files
        self.sources = tuple(sources)
        self.folder = folder
        self.options = options
        self.watch = watch
        self.progress = Progress(total_bytes=sum(file.size for file in files))
        self.counts = {"read": 0, "empty": 0, "missing": 0, "bad": 0, "text_bytes": 0}

    def run(self) -> Header:
        fingerprint = self._fingerprint()
        journal = self._journal(fingerprint)
        tokenizer = self._tokenizer()
        self.encoding = self._encode_options(tokenizer)
        writers = self._writers(journal)
        after = (0, 0)
        if journal is not None:
            self.counts = journal["counts"]
            after = (journal["after"][0], journal["after"][1])
        self._tokenize(tokenizer, writers, after, fingerprint)
        return self._finish(tokenizer, writers)

    def _fingerprint(self) -> str:
        """What must not have changed for work to be continued."""
        options = asdict(replace(self.options, workers=0, skip_bad=0, selection=Selection()))
        if self.options.tokenizer is not None:
            options["tokenizer"] = tokenizer_hash(load_tokenizer(self.options.tokenizer))
        content = json.dumps([options, [asdict(file) for file in self.files]], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    def _journal(self, fingerprint: str) -> dict[str, Any] | None:
        """What an earlier run of the same command left; anything else there is removed."""
        path = self.folder / _JOURNAL
        journal = json.loads(path.read_text()) if path.exists() else None
        if journal is not None and journal["fingerprint"] == fingerprint:
            return journal
        shutil.rmtree(self.folder)
        self.folder.mkdir()
        return None

    def _tokenizer(self) -> Tokenizer:
        place = self.folder / "tokenizer.json"
        if place.exists():
            return load_tokenizer(place)
        if self.options.tokenizer is not None:
            tokenizer = load_tokenizer(self.options.tokenizer)
            copy_companions(self.options.tokenizer, self.folder)
        else:
            assert self.options.train_tokenizer is not None
            self.progress.phase = "training the tokenizer"
            self.watch(self.progress)
            tokenizer = train_tokenizer(self._sample(), self.options.train_tokenizer)
            self.progress.phase = "tokenizing"
        temporary = self.folder / "tokenizer.json.new"
        write_synced(temporary, tokenizer.to_str(pretty=True).encode())
        os.rename(temporary, place)
        return load_tokenizer(place)

    def _sample(self) -> Iterator[str]:
        """Texts to train the tokenizer on: all of a small corpus, of a large one an even part of about 10
        MB."""
        share = min(1.0, TOKENIZER_SAMPLE_BYTES / max(1, self.progress.total_bytes))
        keys: tuple[str, ...] = (self.options.text_key,)
        if self.options.prompt_key is not None and self.options.completion_key is not None:
            keys = (self.options.prompt_key, self.options.completion_key)
        taken = 0
        for file in self.files:
            for number, record in enumerate(read_records(file, keys)):
                if isinstance(record, BadRecord):
                    continue  # reported when it is tokenized
                if xxhash.xxh3_64_intdigest(f"{file.path}:{number}".encode()) / 2**64 >= share:
                    continue
                for text in _texts(record, file.kind, keys):
                    taken += len(text)
                    yield text
                if taken > 2 * TOKENIZER_SAMPLE_BYTES:  # compressed inputs and streams hide their size
                    return

    def _encode_options(self, tokenizer: Tokenizer) -> EncodeOptions:
        options = self.options
        where = options.tokenizer
        return EncodeOptions(
            text_key=options.text_key,
            prompt_key=options.prompt_key,
            completion_key=options.completion_key,
            eos_id=end_of_text_id(tokenizer, where, options.eos_token),
            bos_id=None if options.bos_token is None else special_id(tokenizer, options.bos_token),
            vocab_size=vocabulary_size(tokenizer),
            val_fraction=options.val_fraction,
        )

    def _writers(self, journal: dict[str, Any] | None) -> dict[str, ShardWriter]:
        sides = {"train": self.folder}
        if self.options.val_fraction:
            sides["validation"] = self.folder / "validation"
        writers = {}
        for side, folder in sides.items():
            folder.mkdir(exist_ok=True)
            writers[side] = ShardWriter(
                folder,
                vocab_size=self.encoding.vocab_size,
                has_prompts=self.options.prompt_key is not None,
                max_shard_tokens=self.options.max_shard_tokens,
                state=journal["writers"][side] if journal else None,
            )
        return writers

    def _tokenize(
        self,
        tokenizer: Tokenizer,
        writers: dict[str, ShardWriter],
        after: tuple[int, int],
        fingerprint: str,
    ) -> None:
        self.progress.done_bytes = sum(file.size for file in self.files[: after[0]])
        last_journal = time.monotonic()
        chunks = _chunks(self.files, self.encoding.keys, after)
        for position, encoded in _encode_all(chunks, tokenizer.to_str(), self.encoding, self.options.workers):
            self._write(encoded, writers)
            self._report(position, writers)
            if time.monotonic() - last_journal > _JOURNAL_INTERVAL_S:
                self._write_journal(position, writers, fingerprint)
                last_journal = time.monotonic()
        for writer in writers.values():
            writer.close()

    def _write(self, encoded: Encoded, writers: dict[str, ShardWriter]) -> None:
        for key, count in encoded.counts.items():
            self.counts[key] += count
        for file, number, reason in encoded.bad:
            self.counts["bad"] += 1
            if self.counts["bad"] > self.options.skip_bad:
                where = _LOCATION.get(self.files[file].kind, "row")
                place = f"{self.files[file].path}, {where} {number + 1}" if where else self.files[file].path
                allowed = f"; --skip-bad allows {self.options.skip_bad}" if self.options.skip_bad else ""
                raise DataError(f"{place}: {reason}{allowed or '; --skip-bad N skips and counts up to N'}")
        for side, writer in writers.items():
            part = encoded.train if side == "train" else encoded.validation
            writer.append(part.tokens, part.lengths, part.prompts)

    def _report(self, position: tuple[int, int], writers: dict[str, ShardWriter]) -> None:
        self.progress.done_bytes = sum(file.size for file in self.files[: position[0]])
        self.progress.text_bytes = self.counts["text_bytes"]
        shards = [shard for writer in writers.values() for shard in writer.shards]
        self.progress.num_tokens = sum(shard.num_tokens for shard in shards)
        self.progress.num_documents = sum(shard.num_documents for shard in shards)
        self.watch(self.progress)

    def _write_journal(self, position: tuple[int, int], writers: dict[str, ShardWriter], fingerprint: str) -> None:
        journal = {
            "fingerprint": fingerprint,
            "after": position,
            "counts": self.counts,
            "writers": {side: writer.state() for side, writer in writers.items()},
        }
        temporary = self.folder / (_JOURNAL + ".new")
        write_synced(temporary, json.dumps(journal).encode())
        os.rename(temporary, self.folder / _JOURNAL)

    def _finish(self, tokenizer: Tokenizer, writers: dict[str, ShardWriter]) -> Header:
        """Write the headers; nothing is readable before them."""
        if not any(writer.shards for writer in writers.values()):
            keys = " and ".join(repr(key) for key in self.encoding.keys)
            raise DataError(
                f"{', '.join(self.sources)}: no text in {self.counts['read']} records "
                f"({self.counts['empty']} empty, "
                f"{self.counts['missing']} without {keys}, {self.counts['bad']} unreadable)"
            )
        headers = {}
        for side, writer in writers.items():
            headers[side] = Header(
                dtype=dtype_name(self.encoding.vocab_size),
                vocab_size=self.encoding.vocab_size,
                eos_id=self.encoding.eos_id,
                tokenizer_hash=tokenizer_hash(tokenizer),
                shards=tuple(writer.shards),
                has_prompts=self.options.prompt_key is not None,
                sources=self.sources,
                counts=self.counts,
            )
            write_synced(writer.folder / HEADER, headers[side].dumps().encode())
            if side != "train":
                shutil.copyfile(self.folder / "tokenizer.json", writer.folder / "tokenizer.json")
        (self.folder / _JOURNAL).unlink(missing_ok=True)
        return headers["train"]


def _texts(record: Record, kind: str, keys: Sequence[str]) -> list[str]:
    """The texts in a record, or none where it is not readable; for the tokenizer's training only."""
    try:
        if isinstance(record, bytes) and kind == "text":
            return [record.decode()]
        row = json.loads(record) if isinstance(record, bytes) else record
        return [row[key] for key in keys if isinstance(row.get(key), str)] if isinstance(row, dict) else []
    except ValueError:
        return []


Position = tuple[int, int]
"""Number of a file, and of the record in it that comes next."""


def _chunks(files: list[TextFile], keys: Sequence[str], after: Position) -> Iterator[tuple[Position, list[Segment]]]:
    """Records of all files from a position on, in chunks of bounded size, each with the position behind
    it."""
    segments: list[Segment] = []
    num_bytes = num_records = 0
    for number in range(after[0], len(files)):
        first = after[1] if number == after[0] else 0
        records: list[Record | BadRecord] = []
        place = 0
        for place, record in enumerate(read_records(files[number], keys), 1):
            if place <= first:
                continue
            records.append(record)
            num_records += 1
            num_bytes += len(record) if isinstance(record, bytes) else _size(record)
            if num_bytes >= CHUNK_BYTES or num_records >= CHUNK_RECORDS:
                segments.append(
                    Segment(file=number, kind=files[number].kind, first=place - len(records), records=records)
                )
                yield (number, place), segments
                segments, records, num_bytes, num_records = [], [], 0, 0
        if records:
            segments.append(
                Segment(file=number, kind=files[number].kind, first=place - len(records), records=records)
            )
    yield (len(files), 0), segments


def _size(record: dict | BadRecord) -> int:
    return sum(len(value) for value in record.values() if isinstance(value, str)) if isinstance(record, dict) else 0


def _encode_all(
    chunks: Iterator[tuple[Position, list[Segment]]],
    tokenizer_json: str,
    options: EncodeOptions,
    workers: int,
) -> Iterator[tuple[Position, Encoded]]:
    """Encode chunks, by several processes, and give the results in the order of the chunks."""
    workers = workers or len(os.sched_getaffinity(0))
    if workers == 1:
        encoder = Encoder(tokenizer_json, options)
        for position, segments in chunks:
            yield position, encoder.encode(segments)
        return
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(tokenizer_json, options),
    )
    waiting: deque[tuple[Position, Future[Encoded]]] = deque()
    try:
        for position, segments in chunks:
            waiting.append((position, pool.submit(_encode, segments)))
            if len(waiting) >= 2 * workers + 2:
                position, future = waiting.popleft()
                yield position, future.result()
        while waiting:
            position, future = waiting.popleft()
            yield position, future.result()
    except BrokenProcessPool:
        raise DataError("a tokenizing process died (out of memory?); the same command goes on where it was") from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_encoder: list[Encoder] = []  # of a worker process


def _start_worker(tokenizer_json: str, options: EncodeOptions) -> None:
    """Set up a worker: one thread, and an end when the parent is gone."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _encoder.append(Encoder(tokenizer_json, options))
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _encode(segments: list[Segment]) -> Encoded:
    return _encoder[0].encode(segments)
