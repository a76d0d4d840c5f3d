"""Learning-rate schedules as pure functions of the step, and which parameters decay."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from meshtron.errors import RecipeError


@dataclass(frozen=True, kw_only=True)
class RateStage:
    """Steps with a learning rate of their own, for a stage of the data."""

    start: int
    """Finished steps when it begins."""
    stop: int
    """Finished steps when it ends."""
    scale: float = 1.0
    """Factor on the schedule."""
    decay: str | None = None
    """``linear``, ``cosine`` or ``1-sqrt``: from the rate at ``start`` to the floor at ``stop``, in place of the
    schedule; None follows the schedule."""


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """Learning rate of every step: warm-up from near zero, then one of five shapes down to a floor.

    A pure function of the step: nothing is stored, so a resume at any step goes on exactly.
    """

    peak: float
    """Learning rate after warm-up."""
    total_steps: int
    """Steps of the whole run."""
    kind: str = "cosine"
    """``cosine``, ``linear`` and ``constant`` follow warm-up at once; ``wsd`` and ``1-sqrt`` hold the peak and
    decay over the last ``decay_steps``: linearly, or as 1 - sqrt(progress) (Hägele et al., 2024)."""
    warmup_steps: int = 0
    """Steps over which the rate rises linearly to the peak; the first step has peak / warmup_steps."""
    decay_steps: int | None = None
    """Length of the decay in steps. By default all that follows warm-up; for wsd and 1-sqrt the last fifth."""
    min_lr_ratio: float = 0.0
    """Floor as a share of the peak."""
    stages: tuple[RateStage, ...] = ()
    """Steps that change the schedule; they do not overlap."""

    def at(self, step: int) -> float:
        """Learning rate of the update that takes ``step`` finished steps to ``step + 1``."""
        stage = next((stage for stage in self.stages if stage.start <= step < stage.stop), None)
        if stage is None:
            return self._scheduled(step)
        if stage.decay is None:
            return self._scheduled(step) * stage.scale
        first = self._scheduled(stage.start) * stage.scale
        floor = min(first, self.peak * self.min_lr_ratio)
        progress = (step - stage.start) / (stage.stop - stage.start)
        return floor + (first - floor) * _SHAPES[stage.decay](progress)

    def _scheduled(self, step: int) -> float:
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if self.kind == "constant":
            return self.peak
        start, length = self._decay_span()
        progress = min(max((step - start) / max(length, 1), 0.0), 1.0)
        return self.peak * (self.min_lr_ratio + (1 - self.min_lr_ratio) * _SHAPES[self.kind](progress))

    def _decay_span(self) -> tuple[int, int]:
        after_warmup = max(self.total_steps - self.warmup_steps, 0)
        if self.kind in ("wsd", "1-sqrt"):
            length = self.decay_steps if self.decay_steps is not None else self.total_steps // 5
            return self.total_steps - length, length
        return self.warmup_steps, self.decay_steps if self.decay_steps is not None else after_warmup


_SHAPES: dict[str, Callable[[float], float]] = {
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1 - progress,
    "wsd": lambda progress: 1 - progress,
    "1-sqrt": lambda progress: 1 - math.sqrt(progress),
}


@dataclass(frozen=True, kw_only=True)
class GroupRule:
    """Hyper-parameters for the parameters whose name matches a pattern."""

    match: str
    """Pattern of global parameter names (``*`` matches anything)."""
    lr_scale: float = 1.0
    """Factor on the learning rate."""
    weight_decay: float | None = None
    """Replaces the optimizer's weight decay; None leaves it."""


def parameter_options(
    rules: Sequence[GroupRule] = (), lr_scale: Callable[[str], float] = lambda name: 1.0
) -> Callable[[str, torch.Size], dict[str, Any]]:
    """Hyper-parameters by parameter name and shape, for ``ZeroOptimizer(group_of=...)``.

    Norms and biases (anything of fewer than two dims) are not decayed; then the last matching rule has its say. A
    rule's ``lr_scale`` is a factor on the model's own, ``lr_scale(name)``.
    """

    def options(name: str, shape: torch.Size) -> dict[str, Any]:
        chosen: dict[str, Any] = {} if len(shape) >= 2 else {"weight_decay": 0.0}
        chosen["lr_scale"] = lr_scale(name)
        for rule in rules:
            if fnmatchcase(name, rule.match):
                chosen["lr_scale"] = lr_scale(name) * rule.lr_scale
                if rule.weight_decay is not None:
                    chosen["weight_decay"] = rule.weight_decay
        return chosen

    return options


def check_rules(rules: Sequence[GroupRule], shapes: Mapping[str, torch.Size]) -> None:
    """Raise RecipeError for a rule that matches none of the model's parameters."""
    for rule in rules:
        if not any(fnmatchcase(name, rule.match) for name in shapes):
            raise RecipeError(
                f"optimizer.groups: match = {rule.match!r} matches no parameter; names look like "
                f"{', '.join(list(shapes)[:3])}"
            )


def describe_groups(
    options: Callable[[str, torch.Size], dict[str, Any]], shapes: Mapping[str, torch.Size], weight_decay: float
) -> list[str]:
    """A line for each group of the whole model's parameters: its hyper-parameters and its size."""
    sizes: dict[str, list[int]] = {}
    for name, shape in shapes.items():
        chosen = {"weight_decay": weight_decay} | options(name, shape)
        key = f"learning rate x {chosen['lr_scale']:g}, weight decay {chosen['weight_decay']:g}"
        sizes.setdefault(key, []).append(shape.numel())
    return [
        f"{key}: {len(found)} tensor{'s' * (len(found) != 1)}, {sum(found):,} parameters"
        for key, found in sizes.items()
    ]


def set_learning_rate(groups: Sequence[dict[str, Any]], rate: float) -> None:
    """Set a step's learning rate on every group, times the group's ``lr_scale``."""
    for group in groups:
        group["lr"] = rate * group.get("lr_scale", 1.0)
