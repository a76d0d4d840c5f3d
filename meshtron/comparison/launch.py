"""Start the ranks of every layout with torchrun and compare what they leave."""

import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from meshtron.comparison.report import TOLERANCES, Report, compare
from meshtron.comparison.subject import Subject
from meshtron.errors import MeshtronError, RecipeError
from meshtron.feed import missing_data
from meshtron.mesh import Layout
from meshtron.recipe import Recipe, dump_recipe

_SHOWN_LINES = 30  # of what a failed rank wrote


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One of the runs that are compared."""

    layout: Layout
    schedule: str = "1F1B"
    """Pipeline schedule; without effect where pp is 1."""

    def __str__(self) -> str:
        return f"{self.layout} {self.schedule}" if self.layout.pp > 1 else str(self.layout)


def parse_variants(layouts: str, schedules: str) -> list[Variant]:
    """``"1x1x1,2x1x2"`` and ``"1F1B,AFAB"`` -> every layout, with every schedule where it has a pipeline.

    Raises:
        LayoutError: a layout is not pp x dp x tp.
    """
    variants = []
    for text in layouts.split(","):
        layout = Layout.parse(text)
        names = [name.strip() for name in schedules.split(",")]
        variants += [Variant(layout=layout, schedule=name) for name in (names if layout.pp > 1 else names[:1])]
    return list(dict.fromkeys(variants))


def compare_recipe(recipe: Recipe, variants: Sequence[Variant], *, steps: int = 3, dtype: str = "float64") -> Report:
    """Run a recipe at every variant and compare with the first.

    Args:
        recipe: its layout, schedule and parameter dtype are replaced; all else stays.
        variants: layouts and schedules.
        steps: optimizer steps of each run.
        dtype: ``float64`` tells a mistake from rounding, ``float32`` is nearer to training.

    Raises:
        MeshtronError: the recipe does not fit a layout (all misfits are listed before anything starts), or a rank
            failed.
    """
    _check(variants, dtype)
    device, notes = _pick_device(recipe.run.device, variants)
    if missing := missing_data(recipe):
        notes.append(f"{missing[0]} is not there: comparing on random tokens")
    if recipe.model.attention == "flash_attn" or (recipe.model.attention == "flex" and device == "cpu"):
        notes.append(f"{recipe.model.attention} does not train in {dtype} on {device}: attention runs through sdpa")
    recipes, problems = [], []
    for variant in variants:
        try:
            recipes.append(variant_recipe(recipe, variant, dtype, device))
        except MeshtronError as error:
            problems += [f"{variant}: {line}" for line in str(error).splitlines()]
    if problems:
        raise RecipeError("\n".join(problems))
    with tempfile.TemporaryDirectory(prefix="meshtron-parity-") as folder:
        paths = []
        for number, changed in enumerate(recipes):
            paths.append(Path(folder) / f"recipe-{number}.toml")
            paths[-1].write_text(dump_recipe(changed), encoding="utf-8")
        return _run(Path(folder), variants, steps, dtype, device, notes, recipes=paths)


def parity(
    subject: Callable[..., Subject] | str,
    layouts: Sequence[str] = ("1x1x1", "1x1x2", "1x2x1", "2x1x1"),
    *,
    schedules: Sequence[str] = ("1F1B",),
    steps: int = 3,
    dtype: str = "float64",
    device: str = "auto",
) -> Report:
    """Run a model of your own at every layout and compare losses, norms, gradients and weights with the first.

    It starts the ranks itself, on this machine. ``print_report`` shows what it returns.

    Args:
        subject: a function at the top level of a module, or ``"package.module:function"``; every rank calls
            ``function(mesh=..., schedule=..., dtype=...)`` and is given back a ``Subject``: the same run, with the
            same global batches, at every layout.
        layouts: pp x dp x tp.
        schedules: pipeline schedules for layouts with more than one pp rank.
        steps: optimizer steps of each run.
        dtype: ``float64`` or ``float32``.
        device: ``auto`` takes GPUs where there are enough of them.

    Returns:
        A report: ``equal`` says whether all agree, ``outcomes`` has the figures of each run, in order.

    Raises:
        MeshtronError: a layout or dtype cannot be read, or a rank failed.
    """
    variants = parse_variants(",".join(layouts), ",".join(schedules))
    _check(variants, dtype)
    device, notes = _pick_device(device, variants)
    with tempfile.TemporaryDirectory(prefix="meshtron-parity-") as folder:
        return _run(Path(folder), variants, steps, dtype, device, notes, subject=_address(subject))


def _address(subject: Callable[..., Subject] | str) -> str:
    """How ranks find a function: its module's name, or its file where the module is the program that runs."""
    if isinstance(subject, str):
        return subject
    if "<" in subject.__qualname__ or "." in subject.__qualname__:
        raise MeshtronError(f"{subject.__qualname__}: ranks can call a function at the top level of a module only")
    module = subject.__module__
    if module == "__main__":
        module = str(Path(inspect.getfile(subject)).absolute())
    return f"{module}:{subject.__name__}"


def variant_recipe(recipe: Recipe, variant: Variant, dtype: str, device: str) -> Recipe:
    """The recipe at another layout and schedule, in ``dtype``, resolved.

    Raises:
        MeshtronError: the recipe cannot run there.
    """
    values = recipe.model_dump(exclude_none=True)
    layout, parallel = variant.layout, values["parallel"]
    parallel |= {"pp": layout.pp, "dp": layout.dp, "tp": layout.tp}
    if layout.pp == 1:
        parallel |= {"schedule": "1F1B", "stages_per_rank": 1}
    elif variant.schedule != parallel["schedule"]:
        parallel["schedule"] = variant.schedule
        del parallel["stages_per_rank"]  # the new schedule's default
    values["run"] |= {"device": device}
    values["training"] |= {"param_dtype": dtype, "grad_accum_dtype": dtype, "float8": "off"}
    values["optimizer"] |= {"moment_dtype": "float32"}
    keeps_flex = recipe.model.attention == "flex" and device == "cuda"
    values["model"] |= {"attention": "flex" if keeps_flex else "sdpa"}
    return Recipe(**values).resolve(layout.world_size)


def _check(variants: Sequence[Variant], dtype: str) -> None:
    if dtype not in TOLERANCES:
        raise RecipeError(f"dtype {dtype!r}: expected {' or '.join(TOLERANCES)}")
    if len(variants) < 2:
        raise RecipeError(f"layouts: {variants[0]} alone has nothing to be compared with; name two or more")


def _pick_device(wanted: str, variants: Sequence[Variant]) -> tuple[str, list[str]]:
    """The device type of all runs, and what there is to say about it."""
    ranks = max(variant.layout.world_size for variant in variants)
    gpus = torch.cuda.device_count()
    if wanted in ("cpu", "mps"):
        return "cpu", [f"comparing on CPU with gloo, up to {ranks} ranks"]
    if gpus < ranks:
        return "cpu", [f"{gpus} GPU{'s' * (gpus != 1)} for {ranks} ranks: comparing on CPU with gloo"]
    return "cuda", [f"comparing on {ranks} of {gpus} GPUs with NCCL"]


def _run(
    folder: Path,
    variants: Sequence[Variant],
    steps: int,
    dtype: str,
    device: str,
    notes: list[str],
    *,
    recipes: Sequence[Path] = (),
    subject: str = "",
) -> Report:
    """One torchrun for each number of ranks; all layouts of that many ranks share it."""
    entries = [
        {
            "layout": str(variant.layout),
            "schedule": variant.schedule,
            "folder": f"variant-{number}",
            "recipe": str(recipes[number]) if recipes else "",
        }
        for number, variant in enumerate(variants)
    ]
    request = {"subject": subject, "steps": steps, "dtype": dtype, "device": device, "variants": entries}
    (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
    for ranks in sorted({variant.layout.world_size for variant in variants}):
        _torchrun(ranks, folder)
    return compare(
        [(str(variant), folder / str(entry["folder"])) for variant, entry in zip(variants, entries, strict=True)],
        steps=steps,
        dtype=dtype,
        notes=notes,
    )


def _torchrun(ranks: int, folder: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["--module", "meshtron.comparison.worker", str(folder)]
    # A model of one's own is looked for where this program would find it.
    environment = {"OMP_NUM_THREADS": "1"} | os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    log = folder / f"ranks-{ranks}.log"
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait()
        except BaseException:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()
            raise
    if status:
        last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_SHOWN_LINES:]
        print("\n".join(last), file=sys.stderr)
        raise MeshtronError(f"{ranks} ranks: a rank failed with the message above")
