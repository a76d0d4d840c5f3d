"""DTensor- and DeviceMesh-native 3D parallelism for pretraining transformers.

What a model of one's own needs is imported from here; docs/your-model.md shows it in use. Nothing is loaded before it
is asked for.
"""

import tomllib
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

try:
    __version__ = version("meshtron")
except PackageNotFoundError:  # a checkout on PYTHONPATH without an install: the same number, where it is written
    _project = Path(__file__).parent.parent / "pyproject.toml"
    __version__ = tomllib.loads(_project.read_text(encoding="utf-8"))["project"]["version"]

if TYPE_CHECKING:
    from meshtron.checkpoint.stateful import load, save
    from meshtron.comparison import Subject, parity, print_report
    from meshtron.errors import (
        CheckpointError,
        DataError,
        LayoutError,
        MeshtronError,
        PlanError,
        RecipeError,
    )
    from meshtron.initialize import init_weights
    from meshtron.inspecting import inspect_rank
    from meshtron.loss import CausalLMLoss
    from meshtron.mesh import Layout, build_mesh
    from meshtron.models.spec import ModelSpec, StageLayout
    from meshtron.parallel.boundaries import Boundary
    from meshtron.parallel.clip import clip_grad_norm
    from meshtron.parallel.explain import explain
    from meshtron.parallel.packed import unpack_linear
    from meshtron.parallel.pipeline import pipeline_schedule, total_loss
    from meshtron.parallel.stages import Stages, split_stages
    from meshtron.parallel.tensor import apply_tensor_parallel, check_plan
    from meshtron.parallel.zero import ZeroOptimizer
    from meshtron.seeds import seed_ranks

# Where each name lives; what is imported above for type checkers is imported from here when it is asked for.
_HOMES = {
    "meshtron.checkpoint.stateful": ("load", "save"),
    "meshtron.comparison": ("Subject", "parity", "print_report"),
    "meshtron.errors": (
        "CheckpointError",
        "DataError",
        "LayoutError",
        "MeshtronError",
        "PlanError",
        "RecipeError",
    ),
    "meshtron.initialize": ("init_weights",),
    "meshtron.inspecting": ("inspect_rank",),
    "meshtron.loss": ("CausalLMLoss",),
    "meshtron.mesh": ("Layout", "build_mesh"),
    "meshtron.models.spec": ("ModelSpec", "StageLayout"),
    "meshtron.parallel.boundaries": ("Boundary",),
    "meshtron.parallel.clip": ("clip_grad_norm",),
    "meshtron.parallel.explain": ("explain",),
    "meshtron.parallel.packed": ("unpack_linear",),
    "meshtron.parallel.pipeline": ("pipeline_schedule", "total_loss"),
    "meshtron.parallel.stages": ("Stages", "split_stages"),
    "meshtron.parallel.tensor": ("apply_tensor_parallel", "check_plan"),
    "meshtron.parallel.zero": ("ZeroOptimizer",),
    "meshtron.seeds": ("seed_ranks",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Boundary",
    "CausalLMLoss",
    "CheckpointError",
    "DataError",
    "Layout",
    "LayoutError",
    "MeshtronError",
    "ModelSpec",
    "PlanError",
    "RecipeError",
    "StageLayout",
    "Stages",
    "Subject",
    "ZeroOptimizer",
    "__version__",
    "apply_tensor_parallel",
    "build_mesh",
    "check_plan",
    "clip_grad_norm",
    "explain",
    "init_weights",
    "inspect_rank",
    "load",
    "parity",
    "pipeline_schedule",
    "print_report",
    "save",
    "seed_ranks",
    "split_stages",
    "total_loss",
    "unpack_linear",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'meshtron' has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
