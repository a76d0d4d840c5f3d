"""What every rank of a parity run does; torchrun starts it with the folder of the request."""

import hashlib
import importlib
import importlib.util
import json
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshtron import world
from meshtron.comparison.subject import GRADIENT, WEIGHT, Subject, recipe_subject
from meshtron.errors import MeshtronError
from meshtron.mesh import Layout, build_mesh
from meshtron.parallel.names import named_parameters
from meshtron.parallel.pipeline import total_loss
from meshtron.parallel.placement import local_part, slices_of
from meshtron.parallel.stages import Stages, as_stages
from meshtron.parallel.tensor import Plan, matches
from meshtron.recipe import load_recipe


def main(folder: Path) -> None:
    """Run the variants of ``folder/request.json`` that have this world's size, one after the other.

    Each rank leaves ``<variant>/rank-R.json``: losses, norms, where parameters are sharded, hashes of what it holds;
    one rank of each pipeline stage leaves ``<variant>/step-S-rank-R.safetensors``: gradients and weights.
    """
    request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    device = world.pick_device(request["device"])
    torch.set_num_threads(1)
    with world.process_group(device):
        for variant in request["variants"]:
            layout = Layout.parse(variant["layout"])
            if layout.world_size != world.world_size():
                continue
            out = folder / variant["folder"]
            out.mkdir(exist_ok=True)
            try:
                mesh = build_mesh(layout, device.type)
                with ExitStack() as resources:
                    record = _measure(
                        _subject(request, variant, mesh, device, resources), mesh, request["steps"], out
                    )
            except MeshtronError as error:  # the same on every rank: said in the table, and the others go on
                record = {"error": str(error)}
            (out / f"rank-{world.rank()}.json").write_text(json.dumps(record), encoding="utf-8")
            torch.distributed.barrier()


def _subject(
    request: dict[str, Any], variant: dict[str, Any], mesh: DeviceMesh, device: torch.device, resources: ExitStack
) -> Subject:
    if variant["recipe"]:
        recipe = load_recipe(variant["recipe"]).resolve(world.world_size())
        return recipe_subject(recipe, device, resources)
    module, _, name = request["subject"].rpartition(":")
    build = getattr(_import(module), name)
    return build(mesh=mesh, schedule=variant["schedule"], dtype=getattr(torch, request["dtype"]))


def _import(module: str) -> Any:
    """A module by name, or by the path of its file."""
    if not module.endswith(".py"):
        return importlib.import_module(module)
    name = Path(module).stem
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, module)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def _measure(subject: Subject, mesh: DeviceMesh, steps: int, out: Path) -> dict[str, Any]:
    """Take the steps; returns what goes into this rank's record."""
    optimizer, stages = subject.optimizer, as_stages(subject.stages)
    losses, norms = [], []
    writes = mesh.get_local_rank("dp") == 0 and mesh.get_local_rank("tp") == 0
    for step in range(steps):
        losses.append(float(total_loss(subject.forward_backward(step), mesh)))
        optimizer.reduce_gradients()
        tensors = _gathered(optimizer.gradients(), GRADIENT)
        norms.append(float(optimizer.clip_grad_norm(subject.max_norm, subject.norm_type)))
        optimizer.step()
        tensors |= _gathered(optimizer.masters(), WEIGHT)
        if writes:
            save_file(tensors, out / f"step-{step}-rank-{world.rank()}.safetensors")
    return {
        "names": _names(stages, mesh),
        "losses": losses,
        "norms": norms,
        "sharding": _sharding(stages, subject.plan),
        "hashes": _hashes(stages),
    }


def _gathered(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Whole tensors on the CPU; every rank takes part."""
    whole = {}
    for name, tensor in tensors.items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        whole[prefix + name] = full.detach().to("cpu", copy=True).contiguous()
    return whole


def _names(stages: Stages, mesh: DeviceMesh) -> list[str]:
    """Every parameter of the whole model, in forward order."""
    parts: list[list[str]] = [[] for _ in range(mesh["pp"].size())]
    torch.distributed.all_gather_object(parts, list(stages.shapes), group=mesh.get_group("pp"))
    return list(dict.fromkeys(name for part in parts for name in part))


def _sharding(stages: Stages, plan: Plan) -> dict[str, dict[str, str]]:
    """For each parameter held here: the plan key of its module, and its placements over tp."""
    sharding = {}
    for name, parameter in named_parameters(stages):
        module = name.rpartition(".")[0]
        key = next((key for key in plan if matches(key, module)), "")
        placements = str(parameter.placements) if isinstance(parameter, DTensor) else "whole on every tp rank"
        sharding[stages.ties.get(name, name)] = {"plan_key": key, "placements": placements}
    return sharding


def _hashes(stages: Stages) -> dict[str, str]:
    """A hash of each part of a parameter that this rank holds: ranks with the same part must have the same bits."""
    hashes = {}
    for name, parameter in named_parameters(stages):
        held = ",".join(f"{part.start}:{part.stop}" for part in slices_of(parameter))
        values = local_part(parameter).detach().cpu().contiguous().view(-1).view(torch.uint8)
        hashes[f"{stages.ties.get(name, name)} [{held}]"] = hashlib.sha256(values.numpy().tobytes()).hexdigest()
    return hashes


if __name__ == "__main__":
    main(Path(sys.argv[1]))
