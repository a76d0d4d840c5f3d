"""A recipe's Llama shape as a model of torchtitan; ``--experimental.custom_import`` imports this inside its process.

The environment variable ``SHAPE`` holds the recipe's [model] section as JSON. Batches are random ids of the
vocabulary, drawn as train_speed.py draws them, so that neither a tokenizer nor a data set is needed.
"""

import dataclasses
import json
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.models.llama3 import TransformerModelArgs, get_train_spec
from torchtitan.protocols.train_spec import register_train_spec

NAME = FLAVOR = "recipe_shape"


def model_args(section: dict[str, Any]) -> TransformerModelArgs:
    """torchtitan's arguments for a Llama; it takes the feed-forward width as a multiple of its own default."""
    hidden, width = section["hidden_size"], section["intermediate_size"]
    return TransformerModelArgs(
        dim=hidden,
        n_layers=section["num_hidden_layers"],
        n_heads=section["num_attention_heads"],
        n_kv_heads=section["num_key_value_heads"],
        vocab_size=section["vocab_size"],
        multiple_of=width & -width,  # what the product of the multiplier loses to rounding down comes back
        ffn_dim_multiplier=width / int(8 * hidden / 3),
        norm_eps=section["rms_norm_eps"],
        rope_theta=section["rope_theta"],
    )


class RandomIds(IterableDataset):
    """Endless sequences; id k comes up about 1 / (k + 1) of the time."""

    def __init__(self, vocab_size: int, seq_len: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        ids = np.exp(random.random(64 * seq_len + 1) * np.log(vocab_size)).astype(np.int64) - 1
        self.ids, self.seq_len = torch.from_numpy(ids), seq_len

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            for start in range(0, len(self.ids) - 1, self.seq_len):
                part = self.ids[start : start + self.seq_len + 1]
                yield {"input": part[:-1]}, part[1:]


def dataloader(*, dp_world_size: int, dp_rank: int, job_config: Any, **_: Any) -> ParallelAwareDataloader:
    training = job_config.training
    data = RandomIds(SECTION["vocab_size"], training.seq_len, seed=dp_rank)
    return ParallelAwareDataloader(
        data, dp_rank, dp_world_size, batch_size=training.local_batch_size, pin_memory=True
    )


SECTION = json.loads(os.environ["SHAPE"])
register_train_spec(
    NAME,
    dataclasses.replace(
        get_train_spec(),
        model_args={FLAVOR: model_args(SECTION)},
        build_dataloader_fn=dataloader,
        build_tokenizer_fn=None,
        build_validator_fn=None,
    ),
)
