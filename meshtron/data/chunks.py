"""Records in chunks of bounded size, and the processes that tokenize them.

Where a chunk ends depends on the input alone, and results come in the order of the chunks: so what is made of them
does not depend on the number of workers.
"""

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from meshtron.data.documents import TextFile
from meshtron.data.encode import Encoded, EncodeOptions, Encoder, Segment
from meshtron.data.readers import BadRecord, Record, read_records
from meshtron.errors import DataError

CHUNK_BYTES = 1 << 19
CHUNK_RECORDS = 1 << 12

Position = tuple[int, int]
"""Number of a file, and of the record in it that comes next."""


def cut_chunks(
    files: list[TextFile], keys: Sequence[str], after: Position
) -> Iterator[tuple[Position, list[Segment]]]:
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


def encode_chunks(
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
