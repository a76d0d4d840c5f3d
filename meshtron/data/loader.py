"""The batch that starts at sample n, for one dp rank, prepared ahead of its use.

``TrainStream`` covers a whole run, with all its data stages; ``ValidationSet`` covers a finite set exactly
once. Both answer ``batch(samples)``. Ranks that share a dp rank (tp and pp peers) get the same batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from meshtron.data.batch import Batch, collate
from meshtron.data.prefetch import Prefetcher
from meshtron.data.sampler import Cursor, Order, StageSources
from meshtron.data.samples import IGNORE, Dataset, ResumableStream, Sample, StreamDataset
from meshtron.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Source:
    """Samples and how often they are drawn."""

    key: str
    """Names the source: in messages, and to go on where it was when a later stage has it too."""
    dataset: Dataset | StreamDataset
    weight: float = 1.0
    content: str = ""
    """A hash of the content, by which a resume knows the source again; empty where it is not known."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The sources from a given sample on."""

    start: int = 0
    """Sample at which the stage begins, a whole number of global batches after the first stage."""
    seq_len: int
    """Tokens a sample."""
    sources: tuple[Source, ...]


def _local_rows(global_batch_size: int, dp_rank: int, dp_size: int) -> tuple[int, int]:
    if global_batch_size % dp_size:
        raise DataError(f"global_batch_size = {global_batch_size} is not a multiple of dp = {dp_size}")
    local = global_batch_size // dp_size
    return dp_rank * local, local


class TrainStream:
    """Batches of a run, by the sample they start at.

    A background thread prepares the batches that follow the one asked for last. Asking for any other restarts
    it there, so resuming needs nothing but the number of samples.

    Args:
        stages: what is read from which sample on.
        global_batch_size: samples a step, over all dp ranks.
        seed: of the order.
        dp_rank: which part of each global batch this rank gets.
        dp_size: in how many equal parts a global batch is divided.
        prefetch: batches kept ready, or being built.
        workers: threads that build them; more than one calls datasets from several threads, 0 builds each batch
            when it is asked for.
        cursors: where sources stand when the first stage begins (``state``); by default all at their beginning.
        pin_memory: whether batches lie in page-locked memory, for copies to a GPU that overlap with
        computation.

    Raises:
        DataError: sizes that do not divide, a weight that is not positive, a source too small for a global
        batch.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        *,
        global_batch_size: int,
        seed: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        prefetch: int = 4,
        workers: int = 1,
        cursors: Mapping[str, Cursor] | None = None,
        pin_memory: bool = False,
    ) -> None:
        check_stages(stages, global_batch_size)
        self.stages = tuple(stages)
        self.global_batch_size = global_batch_size
        self._offset, self._local = _local_rows(global_batch_size, dp_rank, dp_size)
        self.order = Order(
            [_stage_sources(stage) for stage in stages],
            global_batch_size=global_batch_size,
            seed=seed,
            cursors=cursors,
        )
        is_stream = any(not isinstance(source.dataset, Dataset) for stage in stages for source in stage.sources)
        self._prefetcher = Prefetcher(
            self._build,
            step=global_batch_size,
            depth=prefetch,
            workers=min(workers, 1) if is_stream else workers,  # a stream has one position
            pin_memory=pin_memory,
            end=None,
        )

    def stage(self, samples: int) -> Stage:
        """The stage that the batch starting at ``samples`` belongs to."""
        return self.stages[self.order.stage(samples)]

    def batch(self, samples: int) -> Batch:
        """This rank's part of the global batch [samples, samples + global_batch_size)."""
        return self._prefetcher.get(samples)

    def stream_states(self, samples: int) -> dict[str, dict[str, Any]]:
        """What resumable streams want a checkpoint after ``samples`` to hold, by their key in the order."""
        cursors, streams = self.order.cursors(samples), self._resumable_streams()
        return {key: stream.state(cursors[key].used) for key, stream in streams.items() if key in cursors}

    def restore_streams(self, states: Mapping[str, dict[str, Any]]) -> None:
        """Give each stream what it said for a checkpoint."""
        for key, stream in self._resumable_streams().items():
            if key in states:
                stream.restore(states[key])

    def _resumable_streams(self) -> dict[str, ResumableStream]:
        named = [
            (key, source.dataset)
            for stage, names in zip(self.stages, self.order.stages, strict=True)
            for source, key in zip(stage.sources, names.keys, strict=True)
        ]
        return {key: dataset for key, dataset in named if isinstance(dataset, ResumableStream)}

    @property
    def wait_s(self) -> float:
        """Seconds that the last call of ``batch`` waited."""
        return self._prefetcher.wait_s

    def close(self) -> None:
        """End the background threads."""
        self._prefetcher.close()

    def __enter__(self) -> "TrainStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _build(self, samples: int) -> Batch:
        number, sources, windows = self.order.locate(samples + self._offset, self._local)
        stage = self.stages[number]
        rows = [
            _fetch(stage.sources[source], int(window), stage.seq_len)
            for source, window in zip(sources, windows, strict=True)
        ]
        return collate(rows)


class ValidationSet:
    """The first samples of a finite set, each exactly once, in the set's order.

    The last global batch is filled up with rows that carry no loss, so every dp rank takes part in every
    batch.

    Args:
        sources: finite datasets, read one after the other; their weights are not used.
        seq_len: tokens a sample.
        global_batch_size, dp_rank, dp_size, pin_memory: as for TrainStream.
        max_samples: stop after so many; 0 for all.

    Raises:
        DataError: a source without an end, or sizes that do not divide.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        seq_len: int,
        global_batch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        max_samples: int = 0,
        pin_memory: bool = False,
    ) -> None:
        for source in sources:
            if not isinstance(source.dataset, Dataset):
                raise DataError(f"{source.key}: validation needs a set with an end, this is a stream")
        self.sources = tuple(sources)
        self.seq_len = seq_len
        self.global_batch_size = global_batch_size
        self._offset, self._local = _local_rows(global_batch_size, dp_rank, dp_size)
        self._ends = np.cumsum([len(source.dataset) for source in sources])  # type: ignore[arg-type]
        self.num_samples = int(self._ends[-1])
        if max_samples:
            self.num_samples = min(self.num_samples, max_samples)
        self._prefetcher = Prefetcher(
            self._build,
            step=global_batch_size,
            depth=2,
            workers=1,
            pin_memory=pin_memory,
            end=self.num_samples,
        )

    def starts(self) -> range:
        """The values of ``samples`` that cover the set."""
        return range(0, self.num_samples, self.global_batch_size)

    def batch(self, samples: int) -> Batch:
        """This rank's part of the global batch [samples, samples + global_batch_size)."""
        return self._prefetcher.get(samples)

    def close(self) -> None:
        """End the background thread."""
        self._prefetcher.close()

    def _build(self, samples: int) -> Batch:
        return collate([self._row(samples + self._offset + row) for row in range(self._local)])

    def _row(self, number: int) -> Sample:
        if number < self.num_samples:
            index = int(np.searchsorted(self._ends, number, side="right"))
            before = int(self._ends[index - 1]) if index else 0
            return _fetch(self.sources[index], number - before, self.seq_len)
        template = _fetch(self.sources[0], 0, self.seq_len)
        ids = None if template.document_ids is None else np.zeros(self.seq_len, dtype=np.int64)
        return Sample(np.zeros(self.seq_len, dtype=np.int64), np.full(self.seq_len, IGNORE), ids)


def check_stages(stages: Sequence[Stage], global_batch_size: int) -> None:
    """Raise DataError for stages that cannot follow one another."""
    if not stages:
        raise DataError("no data stage")
    for before, after in pairwise(stages):
        if after.start <= before.start:
            raise DataError(f"a data stage starts at sample {after.start}, not after the one before it")
    for stage in stages:
        if (stage.start - stages[0].start) % global_batch_size:
            raise DataError(f"a data stage starts at sample {stage.start}, not at the start of a global batch")
        if not stage.sources:
            raise DataError(f"the data stage at sample {stage.start} has no source")
        keys = [source.key for source in stage.sources]
        for source in stage.sources:
            if keys.count(source.key) > 1:
                raise DataError(f"{source.key}: given twice; give it once, with the sum of the weights")
            if not 0 < source.weight < float("inf"):
                raise DataError(
                    f"{source.key}: weight {source.weight}, expected a number above 0; leave the source out instead"
                )


def _stage_sources(stage: Stage) -> StageSources:
    sizes = tuple(len(source.dataset) if isinstance(source.dataset, Dataset) else None for source in stage.sources)
    for source, size in zip(stage.sources, sizes, strict=True):
        if size == 0:
            raise DataError(f"{source.key}: empty")
    return StageSources(
        start=stage.start,
        # With another sequence length the windows are others, so the source starts afresh.
        keys=tuple(f"{source.key} (seq_len {stage.seq_len})" for source in stage.sources),
        sizes=sizes,
        weights=tuple(source.weight for source in stage.sources),
        contents=tuple(source.content for source in stage.sources),
    )


def _fetch(source: Source, index: int, seq_len: int) -> Sample:
    """Sample ``index`` of a source, with its shape checked."""
    dataset = source.dataset
    if isinstance(dataset, Dataset):
        found = dataset[index]
    else:
        if dataset.position != index:
            dataset.seek(index)
        try:
            found = next(dataset)
        except StopIteration:
            raise DataError(f"{source.key}: the stream ended before sample {index}; let it begin again") from None
    if not isinstance(found, Sample):
        ids = np.asarray(found, dtype=np.int64)
        found = Sample(ids[:-1], ids[1:])
    if found.tokens.shape != (seq_len,) or found.labels.shape != (seq_len,):
        raise DataError(
            f"{source.key}: sample {index} has {len(found.tokens)} tokens and {len(found.labels)} labels, "
            "expected "
            f"{seq_len} each (or one array of {seq_len + 1} ids)"
        )
    return found
