"""The ranks that share a checkpoint: what they exchange, and how one rank's failure becomes everybody's."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from meshtron.errors import CheckpointError, MeshtronError

T = TypeVar("T")
R = TypeVar("R")

# A rank waits this long for the slowest writer; a rank that dies closes its connections and is noticed at once.
_TIMEOUT = timedelta(hours=2)


class Ranks:
    """A gloo group of its own over the ranks that take part, or this process alone.

    Its own, because a checkpoint is written in a background thread while training uses every other group.
    Every rank calls every method, in the same order.

    Args:
        process_group: the ranks that take part; by default the whole world, or this process alone if
            torch.distributed is not initialized.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self._group: dist.ProcessGroup | None = None
        self.rank, self.size = 0, 1
        if not (dist.is_available() and dist.is_initialized()):
            return
        self.rank, self.size = dist.get_rank(process_group), dist.get_world_size(process_group)
        if self.size > 1:
            members = None if process_group is None else dist.get_process_group_ranks(process_group)
            self._group = dist.new_group(
                members, timeout=_TIMEOUT, backend="gloo", use_local_synchronization=members is not None
            )

    def close(self) -> None:
        """Give up the group; no method may be called after it."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` is true on at least one rank."""
        if self.size == 1:
            return flag
        flags = torch.tensor(int(flag))
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group)
        return bool(flags)

    def all_gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def gather(self, value: T) -> list[T] | None:
        """Every rank's value, in rank order, on rank 0; None elsewhere."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, values, group=self._group, group_dst=0)
        return values

    def from_first(self, value: T) -> T:
        """Rank 0's value on every rank."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, group=self._group, group_src=0)
        return values[0]

    def answer(self, look: Callable[[], T]) -> T:
        """What ``look`` finds on rank 0, on every rank.

        Raises:
            CheckpointError: ``look`` could not find out; the same error on every rank.
        """
        found, problem = None, None
        if self.rank == 0:
            try:
                found = look()
            except CheckpointError as error:
                problem = error
            except OSError as error:
                problem = CheckpointError(reason(error))
        found, problem = self.from_first((found, problem))
        if problem is not None:
            raise problem
        return found  # type: ignore[return-value]

    def together(self, doing: str, work: Callable[[], T]) -> T:
        """Run ``work`` on every rank; where it fails on one, raise the same error on all.

        Args:
            doing: what is being done, for the message: ``"saving step 100"``.
            work: this rank's part.

        Raises:
            CheckpointError: ``work`` raised on at least one rank; each such rank and its reason is named.
        """
        result, failure = None, None
        try:
            result = work()
        except Exception as error:  # whatever it was, the other ranks must not wait for ever
            failure = reason(error)
        if self.any(failure is not None):
            failures = [(rank, text) for rank, text in enumerate(self.all_gather(failure)) if text is not None]
            raise CheckpointError(f"{doing} failed: " + "; ".join(self._told(rank, text) for rank, text in failures))
        return result  # type: ignore[return-value]

    def on_first(self, doing: str, work: Callable[[], T]) -> T | None:
        """Run ``work`` on rank 0 alone, whose failure is raised on all ranks; the result is None elsewhere."""
        return self.together(doing, work if self.rank == 0 else lambda: None)

    def divide(self, doing: str, work: Callable[[], T], share: Callable[[list[T]], list[R]]) -> R:
        """Gather what ``work`` gives on each rank, and hand each rank its part of what rank 0 makes of it.

        Raises:
            CheckpointError: ``work`` failed on a rank, or ``share`` on rank 0; raised on all ranks.
        """
        gathered = self.gather(self.together(doing, work))
        parts = self.on_first(doing, lambda: share(gathered or []))
        if self.size == 1:
            assert parts is not None
            return parts[0]
        received: list[Any] = [None]
        dist.scatter_object_list(received, parts, group=self._group, group_src=0)
        return received[0]

    def _told(self, rank: int, text: str) -> str:
        return text if self.size == 1 else f"rank {rank}: {text}"


def on_first_rank(doing: str, work: Callable[[], None]) -> None:
    """Do on rank 0 what one rank has to do; every rank makes the call.

    Raises:
        CheckpointError: ``work`` failed; on all ranks.
    """
    with Ranks() as ranks:
        ranks.on_first(doing, work)


def reason(error: Exception) -> str:
    """One line that says what happened and, for the operating system's errors, to which path."""
    if isinstance(error, MeshtronError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"
