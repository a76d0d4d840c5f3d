"""The recipe's [data] and [validation] sections as streams of batches for this rank."""

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from meshtron.data import Source, Stage, TrainStream, ValidationSet, load_tokenizer, open_source
from meshtron.data.tokenizer import tokenizer_file
from meshtron.recipe import Recipe
from meshtron.recipe import Source as SourceSection


def check_tokenizer(recipe: Recipe) -> None:
    """Compare a resolved recipe's tokenizer with its model; token ids may also come without a tokenizer.

    Raises:
        DataError: the tokenizer has more ids than the model's vocabulary, or cannot be read.
    """
    if tokenizer_file(recipe.tokenizer.path) is not None:
        load_tokenizer(recipe.tokenizer.path, recipe.model.vocab_size)


def open_training(recipe: Recipe, mesh: DeviceMesh, device: torch.device) -> TrainStream:
    """All data stages of a run as one stream, cut for this rank's dp coordinate.

    Raises:
        DataError: a source is missing, damaged, or does not fit the model's vocabulary.
    """
    training = recipe.training
    stages = [Stage(start=0, seq_len=training.seq_len, sources=_open(recipe, recipe.data.train, training.seq_len))]
    return TrainStream(
        stages,
        global_batch_size=training.global_batch_size,
        seed=recipe.run.seed,
        dp_rank=mesh.get_local_rank("dp"),
        dp_size=mesh["dp"].size(),
        prefetch=recipe.data.prefetch,
        pin_memory=device.type == "cuda",
    )


def open_validation(recipe: Recipe, mesh: DeviceMesh, device: torch.device) -> ValidationSet:
    """The held-out set, cut for this rank's dp coordinate.

    Raises:
        DataError: a source is missing, damaged, or does not fit the model's vocabulary.
    """
    training = recipe.training
    return ValidationSet(
        _open(recipe, recipe.validation.data, training.seq_len),
        seq_len=training.seq_len,
        global_batch_size=training.global_batch_size,
        dp_rank=mesh.get_local_rank("dp"),
        dp_size=mesh["dp"].size(),
        max_samples=recipe.validation.steps * training.global_batch_size,
        pin_memory=device.type == "cuda",
    )


def _open(recipe: Recipe, sections: Sequence[SourceSection], seq_len: int) -> tuple[Source, ...]:
    return tuple(
        open_source(
            section.path,
            seq_len=seq_len,
            vocab_size=recipe.model.vocab_size,
            weight=section.weight,
            packing="documents" if recipe.data.document_mask else "concat",
        )
        for section in sections
    )
