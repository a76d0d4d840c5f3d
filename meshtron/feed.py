"""The recipe's [data] and [validation] sections as streams of batches for this rank, and their place in a checkpoint.

The order of samples is a pure function of the recipe and of a beginning: a step, a number of samples, and how far
each source had come there. A run begins at zero. Resumed with other data, weights or batch size it begins anew at
the checkpoint, so that every source goes on where it stood.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from meshtron.checkpoint.untrusted import count, instance
from meshtron.data import Source, Stage, TrainStream, ValidationSet, load_tokenizer, open_source
from meshtron.data.formats import has_tokens
from meshtron.data.sampler import Cursor, Order
from meshtron.data.tokenizer import tokenizer_file
from meshtron.errors import DataError
from meshtron.recipe import Recipe
from meshtron.recipe import Source as SourceSection
from meshtron.world import warning_once

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _Beginning:
    step: int = 0
    samples: int = 0
    cursors: Mapping[str, Cursor] = field(default_factory=dict)


def check_tokenizer(recipe: Recipe) -> None:
    """Compare a resolved recipe's tokenizer with its model; token ids may also come without a tokenizer.

    Raises:
        DataError: the tokenizer has more ids than the model's vocabulary, or cannot be read.
    """
    path = recipe.tokenizer.path
    if path and tokenizer_file(path) is not None:
        load_tokenizer(path, recipe.model.vocab_size)
    elif path and not Path(path).exists():
        log.log(
            warning_once(),
            "tokenizer.path = %s: not there; training does without, generate.py and export-hf will need it",
            path,
        )


def open_training(
    recipe: Recipe,
    mesh: DeviceMesh,
    device: torch.device,
    step: int = 0,
    samples: int = 0,
    *,
    saved: Mapping[str, Any] | None = None,
) -> TrainStream:
    """All data stages of a run as one stream, cut for this rank's dp coordinate.

    Args:
        recipe: resolved for the world.
        step, samples: how far the run has come.
        saved: what ``data_state`` said there.

    Raises:
        DataError: a source is missing, damaged, or does not fit the vocabulary, or ``saved`` is something else.
    """
    opened: dict[Any, Source] = {}
    if not saved:
        return _open_training(recipe, mesh, device, _Beginning(), opened)
    with _position():
        start, batch = count(saved["order"]["stages"][0]["start"]), count(saved["order"]["global_batch_size"])
        if not samples - step * batch <= start <= samples:
            raise ValueError(f"it begins at sample {start}, the checkpoint is at {samples}")
        beginning = _Beginning(
            step=step - (samples - start) // batch, samples=start, cursors=_cursors(saved["beginning"])
        )
        cursors, keys = _cursors(saved["cursors"]), [instance(key, str) for key in saved["keys"]]
    stream = _open_training(recipe, mesh, device, beginning, opened)
    if stream.order.facts() != saved["order"]:
        log.log(
            warning_once(),
            "data, weights or batch size are not those of the checkpoint: each source goes on where it stood",
        )
        beginning = _Beginning(step=step, samples=samples, cursors=cursors)
        _log_cursors(beginning.cursors, _open_training(recipe, mesh, device, beginning, opened).order)
    elif moved := {old: new for old, new in zip(keys, stream.order.keys, strict=False) if old != new}:
        for old, new in moved.items():
            log.log(
                warning_once(), "%s has the samples that %s had and is taken to be the same data, moved", new, old
            )
        cursors = {moved.get(key, key): cursor for key, cursor in beginning.cursors.items()}
        beginning = replace(beginning, cursors=cursors)
    stream = _open_training(recipe, mesh, device, beginning, opened)
    with _position():
        stream.restore_streams(saved["streams"])
    return stream


def data_state(stream: TrainStream, samples: int) -> dict[str, Any]:
    """Where the data stands after ``samples``, as plain values for a checkpoint."""
    first = stream.order.stages[0].start
    found = {"beginning": stream.order.cursors(first), "cursors": stream.order.cursors(samples)}
    cursors = {name: {key: asdict(cursor) for key, cursor in known.items()} for name, known in found.items()}
    order = {"order": stream.order.facts(), "keys": stream.order.keys}
    return order | cursors | {"streams": stream.stream_states(samples)}


def _log_cursors(saved: Mapping[str, Cursor], order: Order) -> None:
    """Say where each source of a checkpoint goes on."""
    now = order.cursors(order.stages[0].start)
    for key, cursor in saved.items():
        begun_anew = ""
        if key in now and now[key].epoch > cursor.epoch:
            what = "content" if now[key].size == cursor.size else f"size ({cursor.size} samples, now {now[key].size})"
            begun_anew = f"; its {what} is not that of the checkpoint, so it begins its next epoch"
        log.log(warning_once(), "%s: epoch %d, sample %d of it%s", key, cursor.epoch, cursor.used, begun_anew)


def _cursors(saved: Mapping[str, Mapping[str, Any]]) -> dict[str, Cursor]:
    return {
        key: Cursor(
            epoch=count(values["epoch"]),
            used=count(values["used"]),
            size=None if values["size"] is None else count(values["size"]),
            content=instance(values["content"], str),
        )
        for key, values in saved.items()
    }


@contextmanager
def _position() -> Iterator[None]:
    """Say in one line that a checkpoint has no position in the data that ``data_state`` could have written."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        found = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise DataError(
            f"the checkpoint's position in the data is not what a training run saves ({found})"
        ) from error


def _open_training(
    recipe: Recipe, mesh: DeviceMesh, device: torch.device, beginning: _Beginning, opened: dict[Any, Source]
) -> TrainStream:
    batch = recipe.training.global_batch_size
    current = recipe.data_stages[recipe.data_stage(beginning.step) :]
    stages = [
        Stage(
            start=beginning.samples + max(0, stage.start_step - beginning.step) * batch,
            seq_len=stage.seq_len,
            sources=_open(recipe, stage.train, stage.seq_len, opened),
        )
        for stage in current
    ]
    return TrainStream(
        stages,
        global_batch_size=batch,
        seed=recipe.run.seed,
        dp_rank=mesh.get_local_rank("dp"),
        dp_size=mesh["dp"].size(),
        prefetch=recipe.data.prefetch,
        workers=recipe.data.workers,
        cursors=beginning.cursors,
        pin_memory=device.type == "cuda",
    )


def open_validation(recipe: Recipe, mesh: DeviceMesh, device: torch.device) -> ValidationSet:
    """The held-out set, cut for this rank's dp coordinate.

    Raises:
        DataError: a source is missing, damaged, or does not fit the model's vocabulary.
    """
    training = recipe.training
    if recipe.validation.interval > training.steps:
        log.log(
            warning_once(),
            "validation.interval: %d, but the run ends at step %d: nothing is validated",
            recipe.validation.interval,
            training.steps,
        )
    return ValidationSet(
        _open(recipe, recipe.validation.data, training.seq_len, {}),
        seq_len=training.seq_len,
        global_batch_size=training.global_batch_size,
        dp_rank=mesh.get_local_rank("dp"),
        dp_size=mesh["dp"].size(),
        max_samples=recipe.validation.steps * training.global_batch_size,
        pin_memory=device.type == "cuda",
    )


def missing_data(recipe: Recipe, *, validation: bool = False) -> list[str]:
    """Paths of training data, and of validation data where wanted, at which nothing lies."""
    sections = [source for stage in recipe.data_stages for source in stage.train]
    sections += recipe.validation.data if validation else []
    paths = dict.fromkeys(section.path for section in sections)
    return [path for path in paths if not path.startswith(("hf:", "py:")) and not has_tokens(path)]


def describe_stage(recipe: Recipe, step: int) -> str:
    """A line about the data stage that feeds the step after ``step`` finished ones."""
    number = recipe.data_stage(step)
    stage = recipe.data_stages[number]
    total = sum(source.weight for source in stage.train)
    sources = ", ".join(f"{source.path} ({source.weight / total:.1%})" for source in stage.train)
    rate = f", learning rate x {stage.lr_scale:g}" if stage.lr_scale != 1 else ""
    decay = f", {stage.lr_decay} decay of the learning rate" if stage.lr_decay != "none" else ""
    return f"data stage {number + 1} of {len(recipe.data_stages)}: {sources}; seq_len {stage.seq_len}{rate}{decay}"


def _open(
    recipe: Recipe, sections: Sequence[SourceSection], seq_len: int, opened: dict[Any, Source]
) -> tuple[Source, ...]:
    """Sources of a stage or of validation; what was opened before is used again."""
    found = []
    for section in sections:
        key = (section.path, seq_len, str(section.options))
        if key not in opened:
            opened[key] = open_source(
                section.path,
                seq_len=seq_len,
                vocab_size=recipe.model.vocab_size,
                packing="documents" if recipe.data.document_mask else recipe.data.packing,
                options=section.options,
                tokenizer=recipe.tokenizer.path,
            )
        found.append(replace(opened[key], weight=section.weight))
    return tuple(found)
