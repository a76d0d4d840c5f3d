"""The Checkpointer: saves steps into a folder, in the background, one at a time, all ranks together."""

import itertools
import json
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshtron.checkpoint import steps
from meshtron.checkpoint.files import FileRecord, memory_of, tensor_header, write_file
from meshtron.checkpoint.manifest import INDEX, MANIFEST, Manifest, rank_file
from meshtron.checkpoint.plan import Chunk, Holding, Index, box_of, holding, spread
from meshtron.checkpoint.ranks import Ranks, reason
from meshtron.checkpoint.staging import Staging
from meshtron.checkpoint.untrusted import check_levels
from meshtron.checkpoint.verify import damage
from meshtron.errors import CheckpointError

log = logging.getLogger(__name__)

# How long an error waits for a save in flight to end; other ranks are alive still, so it normally does.
_IN_FLIGHT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """Who writes what; it holds as long as names, shapes and placements stay the same on every rank."""

    signature: list[Any]
    held: Holding
    write: list[Chunk]
    index: Index | None
    """On rank 0 only."""


class Checkpointer:
    """Saves steps into one folder and finds them again; every rank makes every call, in the same order.

    Args:
        folder: where the step folders go, on a file system that all ranks share.
        keep_last: whole checkpoints to keep; older ones are deleted after each commit. 0 keeps all.
        keep_every: steps that are a multiple of this are never deleted. 0 means no such steps.
        async_save: return from ``save`` when a private copy is made, and write it in the background.
        process_group: the ranks that take part; by default the whole world.

    Raises:
        CheckpointError: the folder cannot be read, or a step that was being replaced cannot be put back.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        keep_last: int = 0,
        keep_every: int = 0,
        async_save: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.folder = Path(folder).absolute()  # the run may change its working directory
        self._keep_last, self._keep_every, self._async = keep_last, keep_every, async_save
        self._ranks = Ranks(process_group)
        self._staging = Staging()
        self._plan: _Plan | None = None
        self._thread: threading.Thread | None = None
        self._failure: CheckpointError | None = None
        found = self._ranks.on_first(f"tidying {self.folder}", lambda: steps.clear_leftovers(self.folder))
        for leftover in found or ():
            log.warning("%s: set aside %s", self.folder, leftover)

    # Saving

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        meta: Mapping[str, Any],
        rank_state: Mapping[str, Any] | None = None,
    ) -> None:
        """Save a step; a step of that number which is there already is replaced.

        A save that comes due while another is being written waits for it. With ``async_save`` tensors may be
        changed as soon as this returns.

        Args:
            step: number of the step.
            tensors: global name -> Tensor or DTensor. A rank passes the names that it holds. A name that several
                ranks pass as plain tensors is one tensor, equal on all of them, and is saved once.
            meta: what JSON can hold, equal on all ranks.
            rank_state: this rank's own state, such as that of its random generators: tensors, and what JSON can
                hold, by name.

        Raises:
            CheckpointError: this save failed, or with ``async_save`` the one before it; on all ranks, with the
                step, the path and the reason.
        """
        self.wait()
        doing = self._doing(step)
        kept_meta = json.loads(json.dumps(dict(meta), allow_nan=False))
        check_levels(kept_meta)
        plan = self._planned(doing, tensors)
        header, spans, boxes = self._ranks.together(doing, lambda: _lay_out(plan, tensors, rank_state or {}))
        if not self._async:
            self._publish(step, kept_meta, plan, itertools.chain([header], _pieces(boxes, spans)))
            return
        staged = self._ranks.together(doing, lambda: self._staging.copy(boxes, spans))
        self._thread = threading.Thread(
            target=self._in_background,
            args=(doing, lambda: self._publish(step, kept_meta, plan, [header, staged])),
            name=f"checkpoint-step-{step}",
            daemon=True,  # a rank that fails or is told to end at once does not wait for its disk
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait until no save is in flight.

        Raises:
            CheckpointError: the save in flight failed; on all ranks, with the step, the path and the reason.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    @property
    def failed(self) -> bool:
        """Whether a save in the background has failed, as far as this rank knows; ``wait`` raises what happened."""
        return self._failure is not None

    def close(self) -> None:
        """Wait for the save in flight and give up the process group.

        Raises:
            CheckpointError: the save in flight failed.
        """
        try:
            self.wait()
        finally:
            self._ranks.close()

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        elif self._thread is not None and self._thread.is_alive():
            # Other ranks may be gone, and then this fails by itself; the first error is the one to see.
            log.warning("%s: first the save in flight is finished", kind.__name__)
            self._thread.join(_IN_FLIGHT_S)

    # Finding

    def steps(self) -> list[int]:
        """Whole steps in rising order; hashes are not computed."""
        return self._ranks.answer(lambda: steps.whole_steps(self.folder))

    def newest(self) -> Path | None:
        """Folder of the newest whole step; hashes are not computed.

        Raises:
            CheckpointFormatError: a later meshtron wrote a step that is newer than all that are whole.
        """
        return self._ranks.answer(lambda: steps.newest(self.folder))

    def newest_sound(self) -> Path | None:
        """Folder of the newest step whose every byte is as it was written; damaged ones are logged as errors.

        Returns:
            None where there is no step at all.

        Raises:
            CheckpointError: all there are are damaged.
            CheckpointFormatError: a later meshtron wrote a step that is newer than all that are sound.
        """
        named = self._ranks.answer(lambda: steps.named_steps(self.folder))
        for step in reversed(named):
            folder = steps.step_folder(self.folder, step)
            found = damage(folder, self._ranks)
            if not found:
                return folder
            if self._ranks.rank == 0:
                listed = "; ".join(f"{name}: {problem}" for name, problem in found.items())
                log.error("%s is damaged and is passed over: %s", folder, listed)
        if named:
            raise CheckpointError(
                f"{self.folder}: every step is damaged: {', '.join(map(str, named))} (see meshtron ckpt verify); "
                'move them away, or begin anew with checkpoint.resume = "none"'
            )
        return None

    def find(self, path: Path | str) -> Path:
        """``find_step(path)``, looked for by one rank: all ranks get the same answer."""
        return self._ranks.answer(lambda: steps.find_step(path))

    # How a step is written

    def _doing(self, step: int) -> str:
        return f"saving step {step} to {steps.step_folder(self.folder, step)}"

    def _planned(self, doing: str, tensors: Mapping[str, Tensor]) -> _Plan:
        """The plan of the save before where it still holds on every rank, else a new one."""
        signature = [_signature(name, tensor) for name, tensor in tensors.items()]
        if not self._ranks.any(self._plan is None or self._plan.signature != signature):
            assert self._plan is not None
            return self._plan
        index: list[Index] = []
        held = self._ranks.together(doing, lambda: holding(tensors))

        def share(holdings: list[Holding]) -> list[list[Chunk]]:
            assigned, infos = spread(holdings)
            index.append(Index.of(assigned, infos, [rank_file(rank) for rank in range(len(holdings))]))
            return assigned

        write = self._ranks.divide(doing, lambda: held, share)
        self._plan = _Plan(signature=signature, held=held, write=write, index=index[0] if index else None)
        return self._plan

    def _in_background(self, doing: str, work: Callable[[], None]) -> None:
        try:
            work()
        except CheckpointError as error:
            self._failure = error
        except Exception as error:  # a rank died and took its connections along
            self._failure = CheckpointError(f"{doing} failed: {reason(error)}")

    def _publish(self, step: int, meta: dict[str, Any], plan: _Plan, pieces: Iterable[bytes | memoryview]) -> None:
        """Write every rank's file, then the index, then the manifest; then give the folder its name."""
        ranks, doing = self._ranks, self._doing(step)
        writing = steps.writing_folder(self.folder, step)
        try:
            ranks.on_first(doing, lambda: steps.begin(self.folder, step))
            record = ranks.together(doing, lambda: write_file(writing / rank_file(ranks.rank), pieces))
            records = ranks.gather(record)
            ranks.on_first(doing, lambda: self._commit(step, meta, plan, records or []))
        except CheckpointError:
            if ranks.rank == 0:
                steps.discard(self.folder, step)
            raise
        keep = {"keep_last": self._keep_last, "keep_every": self._keep_every}
        ranks.on_first(f"deleting old steps of {self.folder}", lambda: steps.retain(self.folder, **keep, saved=step))

    def _commit(self, step: int, meta: dict[str, Any], plan: _Plan, records: list[FileRecord]) -> None:
        assert plan.index is not None
        writing = steps.writing_folder(self.folder, step)
        files = {rank_file(rank): record for rank, record in enumerate(records)}
        files[INDEX] = write_file(writing / INDEX, [json.dumps(plan.index.to_json()).encode()])
        manifest = Manifest.of(step, meta, files, world_size=self._ranks.size)
        write_file(writing / MANIFEST, [manifest.render().encode()])
        steps.commit(self.folder, step)


def _signature(name: str, tensor: Tensor) -> Any:
    placed = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
    return name, getattr(tensor, "dtype", None), getattr(tensor, "shape", None), placed


def _lay_out(
    plan: _Plan, tensors: Mapping[str, Tensor], rank_state: Mapping[str, Any]
) -> tuple[bytes, dict[str, tuple[int, int]], dict[str, Tensor]]:
    """Header of this rank's file, where each tensor lies in what follows, and the tensors."""
    origins = {chunk.name: chunk.offsets for chunk in plan.held.chunks}
    boxes = {chunk.key: box_of(tensors[chunk.name], origins[chunk.name], chunk) for chunk in plan.write}
    boxes |= {f"rank_state.{name}": value for name, value in rank_state.items() if isinstance(value, Tensor)}
    plain = {name: value for name, value in rank_state.items() if not isinstance(value, Tensor)}
    check_levels(plain)
    header, spans = tensor_header(boxes, {"rank_state": json.dumps(plain)})
    return header, spans, boxes


def _pieces(boxes: Mapping[str, Tensor], spans: Iterable[str]) -> Iterator[memoryview]:
    """The boxes' bytes in file order, one at a time, so that a sync save needs no second copy of the state."""
    for key in spans:
        yield memory_of(boxes[key].cpu())
