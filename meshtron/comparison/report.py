"""Compare what the ranks of each layout left with the first layout, and say where they part."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from meshtron.comparison.subject import GRADIENT, WEIGHT
from meshtron.errors import MeshtronError

TOLERANCES = {"float32": 1e-5, "float64": 1e-10}
_FLOOR = 0.01  # a tensor smaller than this part of the whole model's norm is judged as if it were that large


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """Where a run first parts from the reference."""

    step: int
    """Counted from 1."""
    what: str
    """``gradient``, ``weight``, ``loss``, ``grad norm`` or ``copies`` (ranks that share a parameter disagree)."""
    parameter: str = ""
    """The first one in forward order."""
    difference: float = 0.0
    """Norm of the difference over the norm of the reference; 0 for copies."""
    num_diverging: int = 0
    """Parameters that part at this step."""
    worst: str = ""
    """The one with the largest difference."""
    plan_key: str = ""
    """Key of the tensor parallel plan that shards it; "" where there is none."""
    placements: str = ""
    """Its placements over tp."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One run, compared with the reference. Differences are relative, the largest over all steps."""

    name: str
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    loss: float = 0.0
    grad_norm: float = 0.0
    gradients: float = 0.0
    weights: float = 0.0
    divergence: Divergence | None = None
    error: str = ""
    """Why the run could not take place."""

    @property
    def equal(self) -> bool:
        """Whether the run took place and agrees with the reference."""
        return not self.error and self.divergence is None


@dataclass(frozen=True, kw_only=True)
class Report:
    """All runs, the reference first."""

    outcomes: list[Outcome]
    steps: int
    dtype: str
    tolerance: float
    notes: list[str]

    @property
    def equal(self) -> bool:
        """Whether every run agrees with the first."""
        return all(outcome.equal for outcome in self.outcomes)

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return asdict(self) | {"equal": self.equal}


@dataclass(frozen=True, kw_only=True)
class _Run:
    """What the ranks of one layout left."""

    folder: Path
    records: list[dict[str, Any]]

    @classmethod
    def read(cls, folder: Path) -> "_Run":
        files = sorted(folder.glob("rank-*.json"))
        return cls(folder=folder, records=[json.loads(file.read_text(encoding="utf-8")) for file in files])

    def error(self) -> str:
        return next((record["error"] for record in self.records if "error" in record), "")

    def tensors(self, step: int) -> dict[str, Tensor]:
        merged: dict[str, Tensor] = {}
        for file in sorted(self.folder.glob(f"step-{step}-rank-*.safetensors")):
            merged |= load_file(file)
        return merged

    def located(self, found: Divergence) -> Divergence:
        """``found`` with the plan key and placements of its parameter."""
        sharding = (record["sharding"].get(found.parameter) for record in self.records)
        return replace(found, **next(filter(None, sharding), {}))

    def unequal_copies(self) -> list[str]:
        """Parameters of which two ranks hold the same part with different bits after the last step."""
        seen: dict[str, str] = {}
        unequal = []
        for record in self.records:
            for part, digest in record["hashes"].items():
                if seen.setdefault(part, digest) != digest:
                    unequal.append(part.rpartition(" [")[0])
        return list(dict.fromkeys(unequal))


def compare(runs: Sequence[tuple[str, Path]], *, steps: int, dtype: str, notes: list[str]) -> Report:
    """Compare every run's folder with the first one's.

    Raises:
        MeshtronError: the first run could not take place, so there is nothing to compare with.
    """
    tolerance = TOLERANCES[dtype]
    reference = _Run.read(runs[0][1])
    if reference.error():
        raise MeshtronError(f"{runs[0][0]}: {reference.error()}")
    outcomes = [_compare(name, _Run.read(folder), reference, steps, tolerance) for name, folder in runs]
    return Report(outcomes=outcomes, steps=steps, dtype=dtype, tolerance=tolerance, notes=notes)


def _compare(name: str, run: _Run, reference: _Run, steps: int, tolerance: float) -> Outcome:
    if run.error():
        return Outcome(name=name, error=run.error())
    losses, norms = run.records[0]["losses"], run.records[0]["norms"]
    loss_errors = _relative(losses, reference.records[0]["losses"])
    norm_errors = _relative(norms, reference.records[0]["norms"])
    order = reference.records[0]["names"]
    gradients = weights = 0.0
    first: Divergence | None = None
    for step in range(steps):
        found, expected = run.tensors(step), reference.tensors(step)
        errors = {prefix: _errors(found, expected, prefix, order) for prefix in (GRADIENT, WEIGHT)}
        gradients = max(gradients, *errors[GRADIENT].values())
        weights = max(weights, *errors[WEIGHT].values())
        if first is not None:
            continue
        for prefix, by_name in errors.items():
            diverging = [parameter for parameter, error in by_name.items() if not error <= tolerance]
            if diverging and first is None:
                first = Divergence(
                    step=step + 1,
                    what=prefix.rstrip("."),
                    parameter=diverging[0],
                    difference=by_name[diverging[0]],
                    num_diverging=len(diverging),
                    worst=max(diverging, key=by_name.__getitem__),
                )
        for what, found_errors in (("loss", loss_errors), ("grad norm", norm_errors)):
            if first is None and not found_errors[step] <= tolerance:
                first = Divergence(step=step + 1, what=what, difference=found_errors[step])
    if first is None and (copies := run.unequal_copies()):
        in_order = sorted(copies, key=lambda copy: order.index(copy) if copy in order else len(order))
        first = Divergence(
            step=steps,
            what="copies",
            parameter=in_order[0],
            num_diverging=len(copies),
            worst=in_order[0],
        )
    return Outcome(
        name=name,
        losses=losses,
        norms=norms,
        loss=max(loss_errors),
        grad_norm=max(norm_errors),
        gradients=gradients,
        weights=weights,
        divergence=first and run.located(first),
    )


def _relative(values: list[float], expected: list[float]) -> list[float]:
    return [_nan_is_infinite(abs(a - b) / max(abs(b), 1e-30)) for a, b in zip(values, expected, strict=True)]


def _errors(
    found: dict[str, Tensor], expected: dict[str, Tensor], prefix: str, order: Sequence[str]
) -> dict[str, float]:
    """For each parameter, in forward order: norm of the difference over the reference's norm.

    A gradient that is zero but for rounding (that of a key's bias, for one) must not be judged by its own size:
    the divisor is at least a hundredth of the whole model's norm.
    """
    names = [name for name in order if prefix + name in expected]
    norms = {name: expected[prefix + name].double().norm().item() for name in names}
    whole = sum(norm**2 for norm in norms.values()) ** 0.5
    errors = {}
    for name in names:
        ours, theirs = found.get(prefix + name), expected[prefix + name]
        if ours is None or ours.shape != theirs.shape:
            errors[name] = float("inf")
            continue
        difference = (ours.double() - theirs.double()).norm().item()
        errors[name] = _nan_is_infinite(difference / max(norms[name], _FLOOR * whole, 1e-30))
    return errors


def _nan_is_infinite(value: float) -> float:
    return float("inf") if value != value else value


def print_report(report: Report) -> None:
    """Print the table, and for each run that differs where it first does.

    Args:
        report: what ``parity`` returned.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    for note in report.notes:
        console.print(escape(note))
    table = Table(
        title=f"{report.steps} steps in {report.dtype}, tolerance {report.tolerance:g}", title_justify="left"
    )
    for heading in ("layout", "loss", "grad norm", "gradients", "weights", ""):
        table.add_column(heading, justify="left" if heading in ("layout", "") else "right")
    for number, outcome in enumerate(report.outcomes):
        figures = ("loss", "grad_norm", "gradients", "weights")
        cells = ["" if outcome.error else f"{getattr(outcome, key):.1e}" for key in figures]
        if number == 0:
            verdict = "reference" if outcome.equal else "[red]copies differ[/red]"
            cells = [f"{outcome.losses[-1]:.6g}", f"{outcome.norms[-1]:.6g}", "", ""]
        elif outcome.error:
            verdict = "[red]refused[/red]"
        else:
            verdict = "[green]equal[/green]" if outcome.equal else "[red]differs[/red]"
        table.add_row(outcome.name, *cells, verdict)
    console.print(table)
    for outcome in report.outcomes:
        for line in _explained(outcome):
            console.print(escape(line))


def _explained(outcome: Outcome) -> list[str]:
    if outcome.error:
        return [f"{outcome.name}: {line}" for line in outcome.error.splitlines()]
    found = outcome.divergence
    if found is None:
        return []
    if not found.parameter:
        return [
            f"{outcome.name}: the {found.what} of step {found.step} differs by {found.difference:.1e}, no tensor does"
        ]
    key = f"plan key {found.plan_key!r}" if found.plan_key else "no plan key"
    where = f"  its sharding: {key}, {found.placements}"
    if found.what == "copies":
        return [f"{outcome.name}: ranks that share {found.parameter} hold different values", where]
    return [
        f"{outcome.name}: first in forward order is the {found.what} of {found.parameter}, at step {found.step}, "
        f"by {found.difference:.1e} of its norm",
        where,
        f"  {found.num_diverging} parameters differ at that step, {found.worst} the most",
    ]
