"""Batches that are built before they are asked for."""

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from meshtron.data.batch import Batch


class Prefetcher:
    """Builds the batches behind the one asked for last, in threads; asking out of turn starts again there.

    Threads are enough: reading a map and copying rows release the interpreter, and a thread that waits for a disk
    or a network holds up nobody.
    """

    def __init__(
        self, build: Callable[[int], Batch], *, step: int, depth: int, workers: int, pin_memory: bool, end: int | None
    ) -> None:
        self._build = build
        self._step = step
        self._depth = depth
        self._workers = workers
        self._pin_memory = pin_memory
        self._end = end
        self._pool: ThreadPoolExecutor | None = None
        self._pending: deque[tuple[int, Future[Batch]]] = deque()
        self.wait_s = 0.0

    def get(self, samples: int) -> Batch:
        started = time.perf_counter()
        batch = self._take(samples) if self._workers else self._make(samples)
        self.wait_s = time.perf_counter() - started
        return batch

    def _take(self, samples: int) -> Batch:
        if not self._pending or self._pending[0][0] != samples:
            self.close()
            self._pool = ThreadPoolExecutor(self._workers, thread_name_prefix="meshtron-data")
            self._submit(samples)
        following = self._pending[-1][0] + self._step
        while len(self._pending) <= self._depth and (self._end is None or following < self._end):
            self._submit(following)
            following += self._step
        _, first = self._pending.popleft()
        try:
            return first.result()
        except BaseException:
            self.close()
            raise

    def _submit(self, samples: int) -> None:
        assert self._pool is not None
        self._pending.append((samples, self._pool.submit(self._make, samples)))

    def _make(self, samples: int) -> Batch:
        batch = self._build(samples)
        return batch.pinned() if self._pin_memory else batch

    def close(self) -> None:
        self._pending.clear()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._pool = None
