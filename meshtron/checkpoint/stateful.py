"""Save and load whatever has state: tensors, modules, optimizers, schedulers, counters, in one mapping by name."""

import json
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshtron.checkpoint.checkpointer import Checkpointer
from meshtron.checkpoint.loading import load as load_tensors
from meshtron.checkpoint.steps import find_step, step_folder
from meshtron.errors import CheckpointError
from meshtron.parallel.names import global_name, named_parameters
from meshtron.parallel.stages import as_stages
from meshtron.parallel.state import make_state


def save(
    folder: Path | str,
    state: Mapping[str, Any],
    *,
    step: int = 0,
    meta: Mapping[str, Any] | None = None,
    keep_last: int = 0,
    process_group: dist.ProcessGroup | None = None,
) -> Path:
    """Save ``state`` as one step of a folder of checkpoints: whole, or not there at all. Every rank makes the call.

    ``Checkpointer`` does the same in the background, for state that is tensors by name already.

    Args:
        folder: where the step folders go, on a file system that all ranks share.
        state: by name: tensors and DTensors; modules and lists of modules (``Stages``), of which parameters and
            persistent buffers are saved under global names; ``torch.optim`` optimizers, whose parameters must belong
            to modules in ``state``; anything else with ``state_dict`` and ``load_state_dict`` (``ZeroOptimizer``, a
            learning-rate scheduler, a data loader); numbers, text and lists of them; mappings of all these.
        step: number of the step; one that is there already is replaced.
        meta: anything JSON can hold, for ``load`` to return; equal on all ranks.
        keep_last: whole steps to keep; 0 keeps all.
        process_group: the ranks that take part; by default the whole world, or this process alone.

    Returns:
        The step's folder.

    Raises:
        CheckpointError: something in ``state`` cannot be saved, or the disk does not take it; on all ranks.
    """
    content = _Content.of(state)
    with Checkpointer(folder, keep_last=keep_last, async_save=False, process_group=process_group) as checkpointer:
        checkpointer.save(step, content.tensors, {"plain": content.plain, "meta": dict(meta or {})})
        return step_folder(checkpointer.folder, step)


def load(
    folder: Path | str,
    state: Mapping[str, Any],
    *,
    partial: Sequence[str] = (),
    check_hashes: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Fill ``state`` from what ``save`` wrote at any layout. Every rank makes the call.

    Tensors are filled in place, objects are given their ``load_state_dict``, and numbers and text replace those in
    the mapping that holds them. No tensor is changed unless all names and shapes fit on all ranks.

    Args:
        folder: a step folder, or a folder of them: the newest whole step.
        state: shaped like what was saved, with the same names.
        partial: patterns (``*`` and ``?``) of tensor names that may be missing, unexpected or of another shape.
        check_hashes: compare every file's hash before anything is loaded.
        process_group: as in ``save``.

    Returns:
        The ``meta`` that was saved.

    Raises:
        CheckpointError: nothing whole is there, it is damaged, or names and shapes differ (all are listed).
    """
    content = _Content.of(state)
    stored = load_tensors(
        find_step(folder),
        content.tensors,
        partial=partial,
        check_hashes=check_hashes,
        process_group=process_group,
    )
    if "plain" not in stored:
        raise CheckpointError(f"{folder}: was not written by meshtron.save; use meshtron.checkpoint.load")
    for loading in content.loadings:
        loading.finish(stored["plain"])
    return stored["meta"]


@dataclass(frozen=True)
class _Loading:
    """What is left to do for one object when its tensors have been filled."""

    path: str
    holder: Any
    """The object to be given ``state``, or the mapping whose plain values are replaced."""
    state: Any = None

    def finish(self, plain: Mapping[str, Any]) -> None:
        if self.state is not None:
            self.holder.load_state_dict(_rebuilt(self.state, self.path, plain))
        elif isinstance(self.holder, torch.optim.Optimizer):
            for number, group in enumerate(self.holder.param_groups):
                group.update(plain[f"{self.path}.groups"][number])
        elif f"{self.path}" in plain:
            mapping, key = self.holder
            mapping[key] = plain[self.path]


@dataclass
class _Content:
    """A mapping taken apart: tensors by global name, plain values by path, and what loading has to do besides."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    plain: dict[str, Any] = field(default_factory=dict)
    loadings: list[_Loading] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    """Global names of the parameters of all modules, by identity."""

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "_Content":
        content = cls()
        for modules in _modules_in(state):
            stages = as_stages(modules)
            for name, parameter in named_parameters(stages):
                content.names[id(parameter)] = stages.ties.get(name, name)
        content._add_all("", state)
        return content

    def _add_all(self, path: str, mapping: Mapping[Any, Any], *, replaceable: bool = True) -> None:
        for key, value in mapping.items():
            self._add(f"{path}.{key}" if path else str(key), value, (mapping, key) if replaceable else None)

    def _add(self, path: str, value: Any, place: tuple[Any, Any] | None) -> None:
        if isinstance(value, Tensor):
            self.tensors[path] = value
        elif isinstance(value, nn.Module) or _is_modules(value):
            self._add_modules(path, value)
        elif isinstance(value, torch.optim.Optimizer):
            self._add_optimizer(path, value)
        elif hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
            state = value.state_dict()
            self._add_all(path, state, replaceable=False)
            self.loadings.append(_Loading(path, value, state))
        elif isinstance(value, Mapping):
            self._add_all(path, value, replaceable=place is not None)
        else:
            self.plain[path] = _plain(path, value)
            if place is not None and isinstance(place[0], MutableMapping):
                self.loadings.append(_Loading(path, place))

    def _add_modules(self, path: str, value: Any) -> None:
        stages = as_stages(value)
        for stage in stages:
            for name, tensor in stage.state_dict().items():
                name = global_name(name)
                if name not in stages.ties and isinstance(tensor, Tensor):
                    self.tensors[f"{path}.{name}"] = tensor
        for name, first in stages.ties.items():  # a stage that has only the later end of a tied pair
            tensor = next((s.state_dict()[name] for s in stages if name in s.state_dict()), None)
            if tensor is not None:
                self.tensors.setdefault(f"{path}.{first}", tensor)

    def _add_optimizer(self, path: str, optimizer: torch.optim.Optimizer) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if any(id(parameter) not in self.names for parameter in parameters):
            raise CheckpointError(
                f"{path}: parameters of {type(optimizer).__name__} have no names: put the modules that hold them "
                "into the same mapping"
            )
        make_state(optimizer, parameters)
        for parameter in parameters:
            for key, value in optimizer.state[parameter].items():
                if isinstance(value, Tensor):
                    self.tensors[f"{path}.{key}.{self.names[id(parameter)]}"] = value
        groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        self.plain[f"{path}.groups"] = _plain(path, [{k: v for k, v in g.items() if _jsonable(v)} for g in groups])
        self.loadings.append(_Loading(path, optimizer))


def _modules_in(state: Mapping[str, Any]) -> Iterator[Any]:
    for value in state.values():
        if isinstance(value, nn.Module) or _is_modules(value):
            yield value
        elif isinstance(value, Mapping):
            yield from _modules_in(value)


def _is_modules(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(part, nn.Module) for part in value)


def _jsonable(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True


def _plain(path: str, value: Any) -> Any:
    if not _jsonable(value):
        raise CheckpointError(
            f"{path}: {type(value).__name__} cannot be saved; expected a tensor, a module, an object with state_dict "
            "and load_state_dict, or what JSON can hold"
        )
    return json.loads(json.dumps(value))


def _rebuilt(state: Any, path: str, plain: Mapping[str, Any]) -> Any:
    """``state`` with its plain values replaced by those that were saved; tensors have been filled in place."""
    if isinstance(state, Mapping):
        return {key: _rebuilt(value, f"{path}.{key}", plain) for key, value in state.items()}
    return state if isinstance(state, Tensor) else plain.get(path, state)
