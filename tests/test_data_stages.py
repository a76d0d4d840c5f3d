"""Data stages inside one run: the samples, losses and learning rates of a plain run, at any layout and resume."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from meshtron.data import TrainStream, open_tokens
from meshtron.data.sampler import permute
from meshtron.data.samples import scan_ids
from meshtron.errors import RecipeError
from meshtron.initialize import init_weights
from meshtron.loop import train
from meshtron.mesh import Layout
from meshtron.models.llama import Llama, config_of, init_std
from meshtron.recipe import Recipe
from meshtron.testing import run_ranks
from tests.runs import logged, small_recipe, token_folder

BATCH = 16


@pytest.fixture(scope="module")
def corpora(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("corpora")
    token_folder(folder / "web", documents=60)
    token_folder(folder / "books", documents=70, seed=1)
    return folder


def staged_recipe(corpora: Path, folder: Path, layout: str = "1x1x1", **sections: dict[str, Any]) -> Recipe:
    """Ten steps: web; from step 4 longer sequences of books with a decay; from step 7 both again, three to one."""
    web, books = str(corpora / "web"), str(corpora / "books")
    data = {
        "train": [{"path": web}],
        "stages": [
            {"start_step": 3, "train": [{"path": books}], "seq_len": 32, "lr_decay": "linear", "lr_scale": 0.5},
            {"start_step": 7, "train": [{"path": web, "weight": 3.0}, {"path": books}], "lr_scale": 0.25},
        ],
    }
    return small_recipe(folder, layout, data=data, **({"lr_schedule": {"kind": "constant"}} | sections))


def plain_order(corpora: Path) -> list[np.ndarray]:
    """Windows (seq_len + 1 ids a row) of each global batch, from the rules that docs/data.md states."""
    rows = {name: open_tokens(corpora / name) for name in ("web", "books")}
    rows = {name: tokens.read(0, tokens.num_tokens).astype(np.int64) for name, tokens in rows.items()}

    def window(name: str, seq_len: int, place: int, epoch: int = 0) -> np.ndarray:
        size = (len(rows[name]) - 1) // seq_len
        start = int(permute(np.array([place]), size, 0, epoch)[0]) * seq_len
        return rows[name][start : start + seq_len + 1]

    batches = [np.stack([window("web", 16, BATCH * step + row) for row in range(BATCH)]) for step in range(3)]
    batches += [np.stack([window("books", 32, BATCH * step + row) for row in range(BATCH)]) for step in range(4)]
    web, books = 3 * BATCH, 0  # web goes on where stage 1 left it, books with 16 tokens is new
    for _ in range(3):
        batch = []
        for row in range(BATCH):
            if row % 4 == 2:  # three to one: the fourth sample of four would be the 0.75 th, rounded down
                batch.append(window("books", 16, books))
                books += 1
            else:
                batch.append(window("web", 16, web))
                web += 1
        batches.append(np.stack(batch))
    return batches


def plain_losses(recipe: Recipe, batches: list[np.ndarray]) -> list[float]:
    config = config_of(recipe.model.model_dump())
    model = Llama(config)
    init_weights([model], seed=0, std=lambda name: init_std(config, name))
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], betas=(0.9, 0.95)
    )
    curve = []
    for ids, rate in zip(batches, RATES, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate
        ids = torch.from_numpy(ids)
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        curve.append(loss.item())
    return curve


# Two steps of warm-up, then level; half of that falling to zero over four steps; a quarter.
RATES = [3e-3 * factor for factor in (0.5, 1, 1, 0.5, 0.375, 0.25, 0.125, 0.25, 0.25, 0.25)]


def train_recording(recipe: Recipe) -> dict[tuple[int, int], np.ndarray]:
    """Train, and give the ids of every batch: (first sample, first row of this rank) -> ids."""
    seen: dict[tuple[int, int], np.ndarray] = {}
    original = TrainStream.batch

    def batch(self: TrainStream, samples: int):
        found = original(self, samples)
        seen[samples, self._offset] = torch.cat([found.tokens, found.labels[:, -1:]], dim=1).numpy()
        return found

    TrainStream.batch = batch  # type: ignore[method-assign]
    try:
        train(recipe)
    finally:
        TrainStream.batch = original  # type: ignore[method-assign]
    return seen


def run(recipe: Recipe, layout: str) -> dict[int, np.ndarray]:
    """Train on ranks; the ids of every global batch by its first sample."""
    parts: dict[tuple[int, int], np.ndarray] = {}
    for seen in run_ranks(train_recording, Layout.parse(layout).world_size, recipe, timeout_s=280):
        for key, ids in seen.items():
            assert np.array_equal(parts.setdefault(key, ids), ids)  # pp and tp peers read the same
    starts = sorted({start for start, _ in parts})
    return {start: np.concatenate([parts[key] for key in sorted(parts) if key[0] == start]) for start in starts}


def test_stages_follow_one_another_as_in_a_plain_run_at_any_layout_and_resume(corpora, tmp_path):
    expected = plain_order(corpora)
    recipe = staged_recipe(corpora, tmp_path, "2x2x2")
    found = run(recipe, "2x2x2")
    assert list(found) == [BATCH * step for step in range(10)]
    for ids, want in zip(found.values(), expected, strict=True):
        assert np.array_equal(ids, want)
    lines = logged(tmp_path)
    losses = plain_losses(recipe, expected)
    assert [line["lr"] for line in lines] == pytest.approx(RATES)
    torch.testing.assert_close([line["loss"] for line in lines], losses, rtol=2e-5, atol=0)
    assert [line["data_stage"] for line in lines] == [1] * 3 + [2] * 4 + [3] * 3
    assert lines[-1]["tokens"] == BATCH * (3 * 16 + 4 * 32 + 3 * 16) == recipe.num_tokens

    # From step 5, inside the stage with longer sequences, at other numbers of data-parallel ranks.
    saved = tmp_path / "run"
    shutil.rmtree(saved / "checkpoints" / "step-00000010")
    for layout, schedule in (("1x1x1", "1F1B"), ("1x4x1", "1F1B"), ("2x1x2", "Interleaved1F1B")):
        there = tmp_path / layout
        shutil.copytree(saved, there / "run")
        resumed = staged_recipe(corpora, there, layout)
        resumed = Recipe(**(resumed.model_dump() | {"parallel": {**layout_of(layout), "schedule": schedule}}))
        found = run(resumed, layout)
        assert list(found) == [BATCH * step for step in range(5, 10)]
        for ids, want in zip(found.values(), expected[5:], strict=True):
            assert np.array_equal(ids, want)
        torch.testing.assert_close([line["loss"] for line in logged(there)], losses, rtol=2e-5, atol=0)


def layout_of(text: str) -> dict[str, int]:
    parts = Layout.parse(text)
    return {"pp": parts.pp, "dp": parts.dp, "tp": parts.tp}


def test_the_log_names_each_stage_when_it_begins(corpora, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    train(staged_recipe(corpora, tmp_path))
    lines = [line for line in caplog.messages if "data stage" in line]
    assert [line.split(":")[0] for line in lines] == ["step 1", "step 4", "step 8"]
    assert lines[1].endswith("books (100.0%); seq_len 32, learning rate x 0.5, linear decay of the learning rate")
    assert "web (75.0%), " in lines[2]


def test_validation_keeps_its_own_length_in_every_stage(corpora, tmp_path):
    held_out = token_folder(tmp_path / "held_out", documents=17, seed=2)
    validation = {"interval": 5, "data": [{"path": str(held_out)}]}
    found = []
    for layout in ("1x1x1", "2x1x1"):
        where = tmp_path / layout
        where.mkdir()
        run(staged_recipe(corpora, where, layout, validation=validation, checkpoint={"interval": 0}), layout)
        found.append([line["val_loss"] for line in logged(where) if "val_loss" in line])
    assert len(found[0]) == 2
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=0)


def test_changed_data_begins_at_the_checkpoint_and_sources_go_on_where_they_stood(corpora, tmp_path, caplog):
    """Another batch size, then weights of one's own: no window of web comes again before all have been seen."""
    first = train_recording(small_recipe(tmp_path, data=web_only(corpora), training={"steps": 4}))
    changed = {"steps": 8, "global_batch_size": 12, "micro_batch_size": 6}
    second = train_recording(small_recipe(tmp_path, data=web_only(corpora), training=changed))
    assert "data, weights or batch size are not those of the checkpoint" in caplog.text
    assert sorted(start for start, _ in second) == [64, 76, 88, 100]
    seen = [bytes(row) for ids in (*first.values(), *second.values()) for row in ids]
    assert len(seen) == len(set(seen)) == 4 * 16 + 4 * 12

    both = {"train": [{"path": str(corpora / "web")}, {"path": str(corpora / "books")}]}
    third = train_recording(small_recipe(tmp_path, data=both, training=changed | {"steps": 10}))
    assert len({bytes(row) for ids in third.values() for row in ids} - set(seen)) == 24
    # What began at a checkpoint is taken up again at a later one as it was.
    steps = tmp_path / "run" / "checkpoints"
    again = train_recording(small_recipe(tmp_path, data=both, training=changed | {"steps": 12}))
    shutil.rmtree(steps / "step-00000012")
    caplog.clear()
    repeated = train_recording(small_recipe(tmp_path, data=both, training=changed | {"steps": 12}))
    assert "not those of the checkpoint" not in caplog.text
    assert all(np.array_equal(again[key], repeated[key]) for key in again)


def web_only(corpora: Path) -> dict[str, Any]:
    return {"train": [{"path": str(corpora / "web")}]}


def test_a_folder_may_be_moved_between_two_runs(corpora, tmp_path, caplog):
    shutil.copytree(corpora / "web", tmp_path / "data")
    end = {"checkpoint": {"interval": 0}, "training": {"steps": 6}}
    train(small_recipe(tmp_path, checkpoint={"interval": 0}, training={"steps": 4}))
    straight = train_recording(small_recipe(tmp_path, **end))
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000006")
    (tmp_path / "data").rename(tmp_path / "elsewhere")
    moved = small_recipe(tmp_path, data={"train": [{"path": str(tmp_path / "elsewhere")}]}, **end)
    found = train_recording(moved)
    assert "is taken to be the same data, moved" in caplog.text
    assert all(np.array_equal(found[key], straight[key]) for key in straight)


def test_a_folder_with_other_content_of_the_same_size_begins_its_next_epoch(tmp_path, caplog):
    token_folder(tmp_path / "data", documents=60)
    train(small_recipe(tmp_path, training={"steps": 2}))
    shutil.rmtree(tmp_path / "data")
    token_folder(tmp_path / "data", documents=60, seed=1)
    found = train_recording(small_recipe(tmp_path, training={"steps": 3}))
    assert "data, weights or batch size are not those of the checkpoint" in caplog.text
    key = f"{tmp_path / 'data'} (seq_len 16)"
    assert f"{key}: epoch 0, sample 32 of it; its content is not that of the checkpoint, so it begins" in caplog.text
    tokens = open_tokens(tmp_path / "data")
    ids, size = tokens.read(0, tokens.num_tokens).astype(np.int64), (tokens.num_tokens - 1) // 16
    windows = permute(np.arange(BATCH), size, 0, epoch=1)
    expected = np.stack([ids[window * 16 : window * 16 + 17] for window in windows])
    assert np.array_equal(found[32, 0], expected)
    caplog.clear()
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000003")
    assert np.array_equal(train_recording(small_recipe(tmp_path, training={"steps": 3}))[32, 0], expected)
    prompts = open_tokens(tmp_path / "data")
    before = scan_ids(prompts, 96)
    prompts.prompt_lengths = np.ones(60, dtype=np.uint32)
    assert scan_ids(prompts, 96) != before


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"stages": [{"start_step": 3, "train": [{"path": "a"}]}]}, "data.stages: the first stage starts at step 3"),
        (
            {"train": [{"path": "a"}], "stages": [{"start_step": 0, "train": [{"path": "b"}]}]},
            "data.train: never used, since a stage starts at step 0",
        ),
        (
            {
                "train": [{"path": "a"}],
                "stages": [{"start_step": n, "train": [{"path": "b"}]} for n in (5, 5)],
            },
            r"start_step must grow from stage to stage, found \[5, 5\]",
        ),
        (
            {"train": [{"path": "a"}], "stages": [{"start_step": 2, "train": [{"path": "b", "weight": 0.0}]}]},
            r"data.stages\[0\].train\[0\].weight: expected more than 0.0, found 0.0$",
        ),
    ],
)
def test_stages_that_cannot_be_are_refused(tmp_path, data, message):
    values = small_recipe(tmp_path).model_dump() | {"data": data}
    with pytest.raises(RecipeError, match=message):
        Recipe(**json.loads(json.dumps(values)))
