"""Checkpoints: what is saved comes back bit for bit at any layout, and misfits are named."""

import json
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from meshtron.checkpoint import (
    Checkpointer,
    find_step,
    load,
    newest,
    read_rank_state,
    verify,
    whole_steps,
)
from meshtron.checkpoint import checkpointer as checkpointer_module
from meshtron.errors import CheckpointError
from meshtron.testing import run_ranks

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.float64, torch.uint8, torch.bool)


def global_tensors() -> dict[str, Tensor]:
    """What the whole world holds, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"model.rows{rows}": torch.randn(rows, 6, generator=generator).to(DTYPES[number % 2])
        for number, rows in enumerate((16, 12, 10, 7, 3, 1))
    }
    tensors |= {f"kind.{dtype}": (torch.randn(9, 4, generator=generator) * 5).to(dtype) for dtype in DTYPES}
    tensors["scalar"] = torch.tensor(3.25)
    tensors["count"] = torch.tensor(7, dtype=torch.int64)
    tensors["nothing"] = torch.zeros(0, 5)
    tensors["cube"] = torch.randn(5, 4, 3, generator=generator)
    return tensors


def local_state(pp: int, dp: int, tp: int, *, zero: bool, blank: bool = False) -> dict[str, Tensor]:
    """One rank's part of ``global_tensors``: names over pp, rows (of the cube columns) over tp, rows over dp."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (pp, dp, tp), mesh_dim_names=("pp", "dp", "tp"))
    if dp == 1:
        placed, over_dp = mesh["tp"], []
    else:  # the same ranks with tp in front: dp's slice of tp's shard
        ranks = mesh.mesh[rank // (dp * tp)].T.contiguous()
        groups = [mesh.get_group("tp"), mesh.get_group("dp")]
        placed = DeviceMesh.from_group(groups, "cpu", mesh=ranks, mesh_dim_names=("tp", "dp"))
        over_dp = [Shard(0) if zero else Replicate()]
    state: dict[str, Tensor] = {}
    for number, (name, whole) in enumerate(global_tensors().items()):
        if number % pp != rank // (dp * tp):
            continue
        source = torch.zeros_like(whole) if blank else whole
        if whole.dim() == 0 or name == "kind.torch.bool":
            state[name] = source.clone()  # plain and replicated
        else:
            over_tp = Shard(1) if name == "cube" else Shard(0)
            state[name] = distribute_tensor(source, placed, [over_tp, *over_dp], src_data_rank=None)
    return state


def assert_equal_to_global(state: dict[str, Tensor]) -> None:
    for name, tensor in state.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        expected = global_tensors()[name]
        assert whole.dtype == expected.dtype
        assert torch.equal(whole, expected), name


def save_at(folder: str, layout: tuple[int, int, int], zero: bool, async_save: bool) -> None:
    rank = dist.get_rank()
    with Checkpointer(folder, async_save=async_save) as checkpointer:
        rank_state = {"rng": torch.arange(5 + rank), "where": [rank, layout]}
        checkpointer.save(
            3, local_state(*layout, zero=zero), {"samples": 12, "layout": "x".join(map(str, layout))}, rank_state
        )


def load_at(folder: str, layouts: list[tuple[int, int, int]], zero: bool) -> None:
    for layout in layouts:
        state = local_state(*layout, zero=zero, blank=True)
        meta = load(find_step(folder), state)
        assert meta["samples"] == 12
        assert_equal_to_global(state)


@pytest.mark.parametrize(
    ("saved", "zero", "async_save"),
    [((2, 2, 2), True, True), ((1, 4, 2), False, True), ((1, 1, 8), True, False), ((1, 1, 1), True, True)],
)
def test_what_one_layout_saves_every_layout_loads(tmp_path, saved, zero, async_save):
    pp, dp, tp = saved
    run_ranks(save_at, pp * dp * tp, str(tmp_path), saved, zero, async_save)
    run_ranks(load_at, 8, str(tmp_path), [(2, 2, 2), (1, 8, 1), (4, 1, 2)], not zero)
    run_ranks(load_at, 1, str(tmp_path), [(1, 1, 1)], True)
    folder = find_step(tmp_path)
    assert folder.name == "step-00000003"
    assert verify(folder) == {}
    assert read_rank_state(folder, pp * dp * tp) is None
    for rank in range(pp * dp * tp):
        state = read_rank_state(folder, rank)
        assert torch.equal(state["rng"], torch.arange(5 + rank))
        assert state["where"] == [rank, list(saved)]


def test_files_are_plain_safetensors_and_json_that_hold_each_element_once(tmp_path):
    run_ranks(save_at, 8, str(tmp_path), (1, 4, 2), False, True)
    folder = find_step(tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        ["manifest.json", "index.json", *(f"rank-{rank:05d}.safetensors" for rank in range(8))]
    )
    rebuilt = {name: torch.zeros_like(whole) for name, whole in global_tensors().items()}
    seen = {name: torch.zeros(whole.shape) for name, whole in global_tensors().items()}
    sizes = []
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            keys = [key for key in file.keys() if not key.startswith("rank_state.")]  # noqa: SIM118
            sizes.append(sum(file.get_tensor(key).nbytes for key in keys))
            for key in keys:
                name, box = key.removesuffix("]").split("[")
                where = tuple(slice(*map(int, part.split(":"))) for part in box.split(",") if part)
                rebuilt[name][where] = file.get_tensor(key)
                seen[name][where] += 1
    assert all(torch.equal(rebuilt[name], whole) for name, whole in global_tensors().items())
    assert all(bool((count == 1).all()) for count in seen.values())
    assert max(sizes) <= 2 * min(sizes), sizes
    manifest = json.loads((folder / "manifest.json").read_text())["manifest"]
    assert manifest["meta"] == {"samples": 12, "layout": "1x4x2"}
    assert manifest["torch"] == torch.__version__
    assert {name: entry["size"] for name, entry in manifest["files"].items()} == {
        path.name: path.stat().st_size for path in folder.iterdir() if path.name != "manifest.json"
    }


def one_big_replicated(folder: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    big = torch.arange(64 * 100.0).view(64, 100)
    tensors = {"embed": big, "norm": torch.ones(100), "other": distribute_tensor(big, mesh, [Replicate()])}
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(1, tensors, {})


def test_replicated_tensors_are_cut_and_spread_over_ranks(tmp_path):
    run_ranks(one_big_replicated, 4, str(tmp_path))
    folder = find_step(tmp_path)
    sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
    assert max(sizes) < 1.3 * min(sizes)
    embed, norm, other = torch.zeros(64, 100), torch.zeros(100), torch.zeros(64, 100)
    load(folder, {"embed": embed, "norm": norm, "other": other})
    assert torch.equal(embed, torch.arange(6400.0).view(64, 100))
    assert torch.equal(other, embed)


def every_kind_of_tensor() -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    base = torch.arange(60.0).view(6, 10)
    flat = torch.arange(100.0)
    return {
        "plain": base.clone(),
        "parameter": torch.nn.Parameter(base.clone()),
        "view": flat[10:70].view(6, 10),
        "transposed": base.clone().T,
        "strided": base.clone()[:, ::3],
        "expanded": torch.ones(1, 1).expand(3, 4).clone().T,
        "scalar": torch.tensor(4.0),
        "bf16": base.bfloat16(),
        "int64": torch.arange(5),
        "shard0": distribute_tensor(base.clone(), mesh, [Shard(0)]),
        "shard1": distribute_tensor(base.clone(), mesh, [Shard(1)]),
        "replicate": distribute_tensor(base.clone(), mesh, [Replicate()]),
        "empty_shard": distribute_tensor(base[:1].clone(), mesh, [Shard(0)]),
    }


def change_while_it_is_written(folder: str) -> None:
    """Overwrite every tensor in place between save's return and the first byte written."""
    tensors = every_kind_of_tensor()
    expected = {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for name, t in tensors.items()
    }
    go, write = threading.Event(), checkpointer_module.write_file

    def slow_write(*args):
        assert go.wait(20)
        return write(*args)

    checkpointer_module.write_file = slow_write
    try:
        checkpointer = Checkpointer(folder)
        checkpointer.save(1, tensors, {})
        with torch.no_grad():
            for tensor in tensors.values():
                tensor.zero_()
        assert not any(find.name == "step-00000001" for find in Path(folder).iterdir())
        go.set()
        checkpointer.close()
    finally:
        checkpointer_module.write_file = write
    for tensor in tensors.values():
        assert not (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).any()
    load(find_step(folder), tensors)
    for name, tensor in tensors.items():
        assert torch.equal(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor, expected[name]), name


def test_async_save_has_a_private_copy_of_every_kind_of_tensor(tmp_path):
    run_ranks(change_while_it_is_written, 2, str(tmp_path))


def several_saves_in_a_row(folder: str) -> None:
    """Plans are reused, and remade when what is saved changes; the last value wins."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with Checkpointer(folder) as checkpointer:
        for step in range(1, 5):
            value = distribute_tensor(torch.full((8, 2), float(step)), mesh, [Shard(0) if step % 2 else Replicate()])
            extra = {"more": torch.full((3,), step)} if step > 2 else {}
            checkpointer.save(step, {"value": value, **extra}, {"step": step})
        checkpointer.wait()
        assert checkpointer.steps() == [1, 2, 3, 4]
    for step in range(1, 5):
        value = torch.zeros(8, 2)
        extra = {"more": torch.zeros(3, dtype=torch.int64)} if step > 2 else {}
        assert load(Path(folder) / f"step-{step:08d}", {"value": value, **extra}) == {"step": step}
        assert bool((value == step).all())
        assert all(bool((tensor == step).all()) for tensor in extra.values())


def test_saves_in_a_row(tmp_path):
    run_ranks(several_saves_in_a_row, 2, str(tmp_path))


# One process, no process group


def save(folder: Path, step: int, tensors: dict[str, Tensor] | None = None, **options) -> Path:
    with Checkpointer(folder, **options) as checkpointer:
        checkpointer.save(step, tensors or {"model.a": torch.full((4, 2), float(step))}, {"step": step})
    return folder / f"step-{step:08d}"


def test_newest_is_the_highest_number_that_is_whole(tmp_path):
    for step in (9, 10, 100000000, 11):
        save(tmp_path, step)
    for foreign in ("step-12", "step-000000013", "step-00000014.bak", "latest", "step-x"):
        (tmp_path / foreign).mkdir()
    (tmp_path / "step-00000099").mkdir()
    (tmp_path / "step-00000098").write_text("a file")
    assert whole_steps(tmp_path) == [9, 10, 11, 100000000]
    assert newest(tmp_path).name == "step-100000000"
    (tmp_path / "step-100000000" / "index.json").unlink()
    assert find_step(tmp_path).name == "step-00000011"
    assert newest(tmp_path / "absent") is None


def test_find_step_says_what_it_looked_for(tmp_path):
    with pytest.raises(CheckpointError, match="no such folder"):
        find_step(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        find_step(tmp_path)
    folder = save(tmp_path / "checkpoints", 5)
    assert find_step(tmp_path) == find_step(tmp_path / "checkpoints") == find_step(folder) == folder
    (folder / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="no whole checkpoint; damaged: 5"):
        find_step(tmp_path)
    with pytest.raises(CheckpointError, match=r"step-00000005: no manifest\.json"):
        find_step(folder)


def test_strict_load_lists_every_misfit_and_changes_nothing(tmp_path):
    folder = save(
        tmp_path, 1, {name: torch.ones(4, 2) for name in ("model.a", "model.b", "model.c", "optimizer.m.a")}
    )
    tensors = {"model.a": torch.zeros(4, 2), "model.b": torch.zeros(4, 3), "model.new": torch.zeros(1)}
    with pytest.raises(CheckpointError) as raised:
        load(folder, tensors)
    message = str(raised.value)
    for part in (
        "model.b has shape (4, 2) in the checkpoint and (4, 3) here",
        "unexpected model.c",
        "missing model.new",
        "unexpected optimizer.m.a",
    ):
        assert part in message
    assert not tensors["model.a"].any()
    with pytest.raises(CheckpointError) as raised:
        load(folder, tensors, prefix="model.")
    assert "optimizer" not in str(raised.value)
    with pytest.raises(CheckpointError, match=r"unexpected model\.c"):
        load(folder, tensors, prefix="model.", partial=["model.b", "model.n*"])
    load(folder, tensors, prefix="model.", partial=["model.b", "model.n*", "*.c"])
    assert bool(tensors["model.a"].all())
    assert not tensors["model.b"].any()
    with pytest.raises(CheckpointError, match=r"'model\.typo' matches no name"):
        load(folder, tensors, prefix="model.", partial=["*", "model.typo"])
    with pytest.raises(CheckpointError, match=r"dtype F32 in the checkpoint and torch\.int64 here"):
        load(folder, {"model.a": torch.zeros(4, 2, dtype=torch.int64)}, prefix="model.a")


def misfit_on_one_rank(folder: str) -> list[str]:
    """Each rank holds other names; a wrong one on rank 1 is everybody's error."""
    rank = dist.get_rank()
    tensors = {f"model.{rank}": torch.ones(2)}
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(1, tensors, {})
    load(find_step(folder), tensors)
    messages = []
    for wrong in ({"model.1": torch.ones(3)}, {"model.9": torch.ones(2)}):
        with pytest.raises(CheckpointError) as raised:
            load(find_step(folder), wrong if rank == 1 else tensors)
        messages.append(str(raised.value))
    return messages


def test_names_are_compared_over_all_ranks(tmp_path):
    first, second = run_ranks(misfit_on_one_rank, 2, str(tmp_path))
    assert first == second
    assert "model.1 has shape (2,) in the checkpoint and (3,) here" in first[0]
    assert "unexpected model.1" in first[1]
    assert "missing model.9" in first[1]


def test_floating_point_values_are_converted_on_load(tmp_path):
    values = torch.randn(40, 30)
    folder = save(tmp_path, 1, {"model.a": values})
    half = torch.zeros(40, 30, dtype=torch.bfloat16)
    columns = torch.zeros(30, 40).T
    load(folder, {"model.a": half})
    load(folder, {"model.a": columns})
    assert torch.equal(half, values.bfloat16())
    assert torch.equal(columns, values)


def impossible_saves(folder: str) -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    local = torch.ones(2)
    with Checkpointer(folder) as checkpointer:
        for tensors, expected in (
            ({"a": torch.ones(2 + rank)}, "a: rank 1 holds F32 of shape"),
            (
                {"a": DTensor.from_local(local, mesh, [Shard(0)])} if rank == 0 else {},
                "all ranks' shards hold 2 elements",
            ),
            ({"a": torch.ones(2, device="meta")}, "a: is on the meta device"),
            ({"a": torch.ones(2, dtype=torch.complex64)}, "dtype torch.complex64 cannot be saved"),
            ({"a": 3} if rank == 1 else {"a": local}, "rank 1: a: expected a Tensor or DTensor, found int"),
        ):
            with pytest.raises(CheckpointError, match=r"saving step 1 to .*step-00000001 failed") as raised:
                checkpointer.save(1, tensors, {})
            assert expected in str(raised.value)
        checkpointer.save(2, {"a": local}, {})
    assert [path.name for path in Path(folder).iterdir()] == ["step-00000002"]


def test_what_cannot_be_saved_is_refused_on_every_rank(tmp_path):
    run_ranks(impossible_saves, 2, str(tmp_path))
