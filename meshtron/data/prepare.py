"""``meshtron prepare``: files of text to a folder of token shards, in parallel, exactly once.

One process reads records and cuts them into chunks; where a chunk ends depends on the input alone. Workers
turn chunks into ids; their results are written in the order of the chunks. So the output does not depend on
the number of workers. Every few seconds what was written is synced and a journal says how far the input has
come; after a kill the same command cuts off what the journal does not know and goes on there.
"""

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from meshtron.data.chunks import cut_chunks, encode_chunks
from meshtron.data.documents import Selection, TextFile, find_files
from meshtron.data.encode import Encoded, EncodeOptions, text_keys
from meshtron.data.shard_writer import ShardWriter, publish, write_synced
from meshtron.data.shards import HEADER, Header, dtype_name
from meshtron.data.tokenizer import (
    copy_companions,
    end_of_text_id,
    load_tokenizer,
    special_id,
    tokenizer_hash,
    train_tokenizer,
    vocabulary_size,
)
from meshtron.data.tokenizer_sample import sample_texts
from meshtron.errors import DataError

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

    @property
    def keys(self) -> tuple[str, ...]:
        """What is read of a row."""
        return text_keys(self.text_key, self.prompt_key, self.completion_key)


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
    text_keys(options.text_key, options.prompt_key, options.completion_key)
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
            texts = sample_texts(self.files, self.options.keys)
            tokenizer = train_tokenizer(texts, self.options.train_tokenizer)
            self.progress.phase = "tokenizing"
        temporary = self.folder / "tokenizer.json.new"
        write_synced(temporary, tokenizer.to_str(pretty=True).encode())
        os.rename(temporary, place)
        return load_tokenizer(place)

    def _encode_options(self, tokenizer: Tokenizer) -> EncodeOptions:
        options = self.options
        where = options.tokenizer
        return EncodeOptions(
            keys=options.keys,
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
        chunks = cut_chunks(self.files, self.encoding.keys, after)
        for position, encoded in encode_chunks(chunks, tokenizer.to_str(), self.encoding, self.options.workers):
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
