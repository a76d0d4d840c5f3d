"""Texts to train a tokenizer on: an even part of a corpus, the same whenever it is drawn."""

import json
from collections.abc import Iterator, Sequence

import xxhash

from meshtron.data.documents import TextFile
from meshtron.data.readers import BadRecord, Record, read_records

SAMPLE_BYTES = 10_000_000


def sample_texts(files: Sequence[TextFile], keys: Sequence[str]) -> Iterator[str]:
    """All texts of a small corpus, of a large one about 10 MB chosen by a hash of their place.

    Args:
        files: the corpus.
        keys: where rows have their texts.
    """
    share = min(1.0, SAMPLE_BYTES / max(1, sum(file.size for file in files)))
    taken = 0
    for file in files:
        for number, record in enumerate(read_records(file, keys)):
            if isinstance(record, BadRecord):
                continue  # reported when it is tokenized
            if xxhash.xxh3_64_intdigest(f"{file.path}:{number}".encode()) / 2**64 >= share:
                continue
            for text in _texts(record, file.kind, keys):
                taken += len(text)
                yield text
            if taken > 2 * SAMPLE_BYTES:  # compressed inputs and streams hide their size
                return


def _texts(record: Record, kind: str, keys: Sequence[str]) -> list[str]:
    """The texts in a record, or none where it is not readable."""
    try:
        if isinstance(record, bytes) and kind == "text":
            return [record.decode()]
        row = json.loads(record) if isinstance(record, bytes) else record
        return [row[key] for key in keys if isinstance(row.get(key), str)] if isinstance(row, dict) else []
    except (ValueError, RecursionError):
        return []
