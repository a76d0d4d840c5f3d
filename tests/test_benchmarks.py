"""What the benchmarks compute from what they measure, and the rows they measure it at."""

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.kernel_times import exposed
from benchmarks.layout_rows import Row, layouts, rows
from benchmarks.torchtitan_rows import commands, figures
from meshtron.recipe import load_recipe


def test_communication_is_exposed_where_no_other_kernel_runs():
    alone, beside = ("ncclAllReduce", 20.0, 25.0), ("ncclAllGather", 5.0, 15.0)
    assert exposed([("gemm", 0.0, 10.0), beside, ("add", 12.0, 13.0), alone, ("nccl", 24.0, 30.0)]) == 4 + 10
    assert exposed([("gemm", 0.0, 10.0)]) == 0


def test_layouts_fill_the_ranks_and_bubbles_are_those_of_1f1b():
    assert list(layouts(4)) == ["1x1x4", "1x2x2", "1x4x1", "2x1x2", "2x2x1", "4x1x1"]
    assert [row.name for row in rows(["1b", "8b"], 1)] == ["1b 1x1x1"]
    assert all(row.ranks in (1, 8) for row in rows(["1b", "8b"], 8))
    four_stages = Row(shape="1b", pp=4)
    assert four_stages.bubble(gpus=4) == 8 / (8 + 3)
    assert Row(shape="1b", pp=4, schedule="Interleaved1F1B").bubble(gpus=4) == 16 / (16 + 3)


def test_rows_are_recipes_and_show_every_choice():
    recipes = Path(__file__).parents[1] / "recipes"
    for gpus in (2, 4, 8):
        found = rows(["1b", "8b"], gpus)
        assert len({row.name for row in found}) == len(found)
        for row in found:
            name = {"1b": "llama_1b.toml", "8b": "llama_8b.toml"}[row.shape]
            recipe = load_recipe(recipes / name, row.overrides(gpus)).resolve(row.ranks)
            assert recipe.parallel.overlap == row.overlap
        for shape in ("1b", "8b"):
            mine = [row for row in found if row.shape == shape]
            assert {row.overlap for row in mine} == {True, False}
            assert {row.schedule for row in mine if row.pp > 1} == {"1F1B", "Interleaved1F1B"}
    assert {row.zero for row in found if row.shape == "1b"} == {0, 1}


def test_torchtitan_trains_the_recipes_batch_and_its_log_gives_a_row():
    line = "step: {}  \x1b[36mmemory: 60.{}GiB(43.1%)  \x1b[34mtps: {}  tflops: 2.0  mfu: {}%\x1b[0m\n"
    log = "".join(line.format(step, step, tps, 40 + step) for step, tps in enumerate(("10", "20", "6,000", "3,000")))
    assert figures(log) == {"tokens_per_s": 4000.0, "mfu": 0.425, "memory_gib": 60.3}
    assert figures("nothing") == {}
    overrides = ["training.activation_checkpointing=selective", "training.micro_batch_size=2"]
    recipe = load_recipe(Path(__file__).parents[1] / "recipes" / "llama_8b.toml", overrides)
    (_, data), (_, tensor) = commands(recipe.resolve(4), 4, steps=8)
    assert data[data.index("--parallelism.data_parallel_shard_degree") + 1] == "4"
    assert tensor[tensor.index("--parallelism.tensor_parallel_degree") + 1] == "4"
    assert data[data.index("--training.local_batch_size") + 1] == "2"
    assert data[data.index("--activation_checkpoint.mode") + 1] == "selective"
    assert data[-1] == "--compile.enable"


def test_the_harness_runs_on_gloo_ranks_and_writes_what_it_found(tmp_path):
    program = Path(__file__).parents[1] / "benchmarks" / "multi_gpu.py"
    options = ["--gpus", "2", "--device", "cpu", "--parts", "kill", "--json", str(tmp_path / "found.json")]
    done = subprocess.run([sys.executable, str(program), *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["kill"]["ranks"] == 2
    assert found["kill"]["status"] != 0  # all have ended, and torchrun says that one was killed
    assert found["not_run"] == []
