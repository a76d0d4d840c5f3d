"""``meshtron ckpt``: what lies in a folder of checkpoints, and whether it is sound.

Beside the package ``meshtron.checkpoint`` rather than in it, because that imports torch.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from meshtron.errors import CheckpointError, CheckpointFormatError

app = typer.Typer(help="Look into checkpoints.", no_args_is_help=True)

CheckpointPath = Annotated[
    Path, typer.Argument(metavar="PATH", help="A step folder, or a run's folder.", show_default=False)
]


@app.command(name="list")
def list_steps(path: CheckpointPath) -> None:
    """Print every step with its age, size and layout, and whether it is whole; hashes are not computed."""
    from meshtron.checkpoint.manifest import read_manifest, unwhole

    folders = step_folders(path)
    print(f"{'step':>10}  {'age':>8}  {'size':>10}  {'layout':>8}  state")
    for folder in folders:
        try:
            manifest = read_manifest(folder)
            age, size = f"{_age(manifest.saved_at):>8}", f"{_size(manifest.size_bytes):>10}"
            row = f"{manifest.step:>10}  {age}  {size}  {manifest.meta.get('layout', '-')!s:>8}"
        except CheckpointError:
            row = f"{folder.name.removeprefix('step-').lstrip('0') or '0':>10}  {'-':>8}  {'-':>10}  {'-':>8}"
        try:
            problem = unwhole(folder)
            print(f"{row}  {f'DAMAGED {problem}' if problem else 'whole'}")
        except CheckpointFormatError as error:
            print(f"{row}  LATER FORMAT {error}")


@app.command()
def verify(path: CheckpointPath) -> None:
    """Compare every file with the hash that was taken when it was written; exits with status 1 on damage."""
    from meshtron.checkpoint import verify as verify_step
    from meshtron.checkpoint.manifest import MANIFEST, read_manifest

    damaged, unknown = [], []
    for folder in step_folders(path):
        try:
            found = verify_step(folder)
        except CheckpointFormatError as error:
            print(f"{folder / MANIFEST}: LATER FORMAT {error}")
            unknown.append(folder.name)
            continue
        names = set(found) | {MANIFEST}
        if MANIFEST not in found:
            names |= read_manifest(folder).files.keys()
        for name in sorted(names):
            print(f"{folder / name}: {'DAMAGED ' + found[name] if name in found else 'ok'}")
        if found:
            damaged.append(folder.name)
    problems = [f"damaged: {', '.join(damaged)}"] * bool(damaged)
    problems += [f"written by a later meshtron, not checked: {', '.join(unknown)}"] * bool(unknown)
    if problems:
        raise CheckpointError(f"{path}: {'; '.join(problems)}")


@app.command()
def show(path: CheckpointPath) -> None:
    """Print what is in a step (of a run: the newest whole one): every tensor with dtype, shape and shards."""
    from meshtron.checkpoint import find_step, read_manifest
    from meshtron.checkpoint.loading import read_index

    folder = find_step(path)
    manifest = read_manifest(folder)
    print(f"{folder}: step {manifest.step}, {_size(manifest.size_bytes)}, saved {_age(manifest.saved_at)} ago")
    print(f"by meshtron {manifest.meshtron}, torch {manifest.torch}, {manifest.world_size} rank(s)")
    _print_meta(manifest.meta)
    index = read_index(folder, manifest)
    width = max(map(len, index.tensors), default=0)
    for name, info in sorted(index.tensors.items()):
        shape = "x".join(map(str, info.shape)) or "scalar"
        shards = len(index.chunks[name])
        print(f"{name:<{width}}  {info.dtype:<5} {shape:>16}  {shards} shard{'s' * (shards != 1)}")


def _print_meta(values: Mapping[str, Any], indent: str = "") -> None:
    """What was saved beside the tensors, without whole files (the recipe)."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            print(f"{indent}{key}:")
            _print_meta(value, indent + "  ")
        elif not isinstance(value, str) or "\n" not in value:
            print(f"{indent}{key}: {value}")


def step_folders(path: Path) -> list[Path]:
    """The step folder ``path``, whole or not, or all those in a folder of checkpoints or a run's folder.

    Raises:
        CheckpointError: there is none.
    """
    from meshtron.checkpoint.manifest import MANIFEST
    from meshtron.checkpoint.steps import named_steps, step_folder

    if (path / MANIFEST).exists() or path in [step_folder(path.parent, step) for step in named_steps(path.parent)]:
        return [path]
    for folder in (path, path / "checkpoints"):
        if steps := named_steps(folder):
            return [step_folder(folder, step) for step in steps]
    found = "holds no checkpoint" if path.exists() else "not there"
    raise CheckpointError(f"{path}: {found}; expected a step folder or a run's folder")


def _age(since: float) -> str:
    seconds = max(0, int(time.time() - since))
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length} {unit}"
    return f"{seconds} s"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB" if num_bytes >= 2**28 else f"{num_bytes / 2**20:,.2f} MiB"
