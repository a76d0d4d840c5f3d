"""The [data] and [validation] sections: sources of tokens, mixtures and stages."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from meshtron.recipe.base import Count, Positive, Section
from meshtron.recipe.problems import Problems


class Source(Section):
    """One source of a mixture."""

    path: Annotated[str, Field(min_length=1)]
    """Folder of ``meshtron prepare``, token files of datatrove or Megatron-LM, ``hf:NAME[:SPLIT]`` for a dataset that
    is tokenized while it is read, or ``py:MODULE:NAME`` for a dataset of one's own."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Part of the mixture, relative to the other sources. Default 1.0."""
    options: dict[str, Any] = Field(default={})
    """Keyword arguments for ``py:``; for ``hf:`` text_key (or prompt_key and completion_key) and arguments of
    ``datasets.load_dataset``. Default {}."""


Sources = Annotated[tuple[Source, ...], Field(strict=False)]


class DataStage(Section):
    """Data from a given step on."""

    start_step: Count
    """Finished steps of the run when the stage begins."""
    train: Sources
    """Sources of the stage."""
    seq_len: Count = 0
    """Tokens in a sequence; 0 for training.seq_len. Default 0."""
    lr_scale: Annotated[float, Field(gt=0)] = 1.0
    """Factor on the learning rate of lr_schedule. Default 1.0."""
    lr_decay: Literal["none", "linear", "cosine", "1-sqrt"] = "none"
    """How the learning rate falls from the stage's first step to the floor (lr_schedule.min_lr_ratio) at its end, in
    place of lr_schedule; "none" follows lr_schedule. Default "none"."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.train:
            raise Problems([("train", "expected at least one source")])
        return self


class DataSection(Section):
    """What is trained on."""

    train: Sources = ()
    """Sources of the mixture. Required unless there are stages."""
    stages: Annotated[tuple[DataStage, ...], Field(strict=False)] = ()
    """Stages that replace ``train`` from their start_step on. Default []."""
    packing: Literal["concat", "pad"] = "concat"
    """"concat": documents one behind the other, cut every seq_len tokens; "pad": each document begins a sequence of
    its own, whose rest is padding without loss. Default "concat"."""
    document_mask: bool = False
    """Whether attention stops at the boundaries of documents in one sequence. Default false."""
    workers: Count = 1
    """Threads a rank that read ahead; 0 reads between steps. Default 1."""
    prefetch: Positive = 4
    """Batches that they hold ready. Default 4."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        starts, found = [stage.start_step for stage in self.stages], list[tuple[str, str]]()
        if not self.train and not self.stages:
            found.append(("train", 'missing (a list of sources, such as [{path = "data/my_corpus"}])'))
        elif not self.train and starts[0] != 0:
            found.append(("stages", f"the first stage starts at step {starts[0]}, and train is empty before it"))
        elif self.train and starts[:1] == [0]:
            found.append(("train", "never used, since a stage starts at step 0: leave one of them out"))
        if starts != sorted(set(starts)):
            found.append(("stages", f"start_step must grow from stage to stage, found {starts}"))
        if self.packing == "pad" and self.document_mask:
            found.append(("document_mask", 'packing = "pad" has one document a sequence: leave document_mask false'))
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
