"""The [data] and [validation] sections: sources of tokens, mixtures and stages."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from meshtron.recipe.base import Count, Positive, Section
from meshtron.recipe.problems import Problems


class Source(Section):
    """One folder of token shards in a mixture."""

    path: Annotated[str, Field(min_length=1)]
    """Folder of token shards, as ``meshtron prepare`` writes it."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Part of the mixture, relative to the other sources. Default 1.0."""


Sources = Annotated[tuple[Source, ...], Field(strict=False)]


class DataStage(Section):
    """Data from a given step on."""

    start_step: Count
    """First step, counted from 0, that this stage feeds."""
    train: Annotated[tuple[Source, ...], Field(strict=False, min_length=1)]
    """Sources of the stage."""
    seq_len: Positive | None = None
    """Tokens in a sequence. Default training.seq_len."""
    lr_scale: Annotated[float, Field(gt=0)] = 1.0
    """Factor on the learning rate. Default 1.0."""


class DataSection(Section):
    """What is trained on."""

    train: Sources = ()
    """Sources of the mixture. Required unless there are stages."""
    stages: Annotated[tuple[DataStage, ...], Field(strict=False)] = ()
    """Stages that replace ``train`` from their start_step on. Default []."""
    document_mask: bool = False
    """Whether attention stops at the boundaries of packed documents. Default false."""
    workers: Count = 0
    """Loader threads a rank; 0 loads between steps. Default 0."""
    prefetch: Positive = 2
    """Batches that workers hold ready. Default 2."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        starts, found = [stage.start_step for stage in self.stages], list[tuple[str, str]]()
        if not self.train and not self.stages:
            found.append(("train", 'missing (a list of sources, such as [{path = "data/my_corpus"}])'))
        elif not self.train and starts[0] != 0:
            found.append(("stages", f"the first stage starts at step {starts[0]}, and train is empty before it"))
        if starts != sorted(set(starts)):
            found.append(("stages", f"start_step must grow from stage to stage, found {starts}"))
        Problems.raise_if(found)
        return self


class ValidationSection(Section):
    """Loss on held-out data."""

    interval: Count = 0
    """Steps between validations; 0 for none. Default 0."""
    steps: Count = 0
    """Global batches of one validation; 0 for all the data once. Default 0."""
    data: Sources = ()
    """Sources. Required where interval is not 0."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.interval and not self.data:
            raise Problems([("data", "missing (a list of sources), since validation.interval is not 0")])
        return self
