"""Small training runs from a recipe, for tests of the loop: data, recipe, and what a run wrote down."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from meshtron.data.shard_writer import ShardWriter
from meshtron.data.shards import HEADER, Header, dtype_name
from meshtron.mesh import Layout
from meshtron.recipe import Recipe

VOCAB = 96


def token_folder(folder: Path, documents: int = 200, seed: int = 0) -> Path:
    """A folder of token shards with a little structure to learn: each id is likely to be followed by its double."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(seed)
    writer = ShardWriter(folder, vocab_size=VOCAB)
    for _ in range(documents):
        ids = [int(random.integers(1, VOCAB))]
        while len(ids) < 40:
            follow = random.random() < 0.8
            ids.append((ids[-1] * 2) % VOCAB if follow else int(random.integers(1, VOCAB)))
        writer.append(np.array([*ids, 0]), np.array([len(ids) + 1]))
    writer.close()
    header = Header(
        dtype=dtype_name(VOCAB), vocab_size=VOCAB, eos_id=0, tokenizer_hash="", shards=tuple(writer.shards)
    )
    (folder / HEADER).write_text(header.dumps())
    return folder


def small_recipe(folder: Path, layout: str = "1x1x1", *, zero: int = 1, **sections: dict[str, Any]) -> Recipe:
    """A recipe over ``folder/data`` that runs in ``folder/run``; keyword arguments change its sections."""
    parts = Layout.parse(layout)
    values: dict[str, dict[str, Any]] = {
        "run": {"name": "small", "dir": str(folder / "run")},
        "model": {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "max_position_embeddings": 64,
        },
        "parallel": {"pp": parts.pp, "dp": parts.dp, "tp": parts.tp, "zero": zero},
        "training": {
            "steps": 10,
            "seq_len": 16,
            "global_batch_size": 16,
            # two micro-batches, or as many as fill the pipeline: tensor parallel ones are slow on a CPU
            "micro_batch_size": 16 // parts.dp // max(parts.pp, 2),
            "param_dtype": "float32",
        },
        "optimizer": {"lr": 3e-3},
        "lr_schedule": {"warmup_steps": 2},
        "data": {"train": [{"path": str(folder / "data")}]},
        "checkpoint": {"interval": 5},
    }
    for name, changes in sections.items():
        values[name] = values.get(name, {}) | changes
    return Recipe(**values)


@contextmanager
def logged_lines(name: str) -> Iterator[list[str]]:
    """What the logger ``name`` says meanwhile, from INFO up."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(name)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def logged(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
