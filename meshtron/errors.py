"""Every error meshtron raises on purpose.

MeshtronError
├── RecipeError      a key, value or combination in a recipe
├── LayoutError      pp x dp x tp does not fit the world, the model or the batch
├── PlanError        a tensor-parallel plan does not fit the model
├── CheckpointError  a checkpoint is missing, damaged or of another model
│   └── CheckpointFormatError   a later meshtron wrote it
└── DataError        token shards, tokenizers and sources of text

A message is one line: what, where, expected, found, what to do. Under torchrun it is printed once, by one
rank, after the word ``error:`` and without a traceback.
"""


class MeshtronError(Exception):
    """A mistake that the user can mend; the message says how."""


class RecipeError(MeshtronError):
    """A key, value or combination in a recipe is not allowed."""


class LayoutError(MeshtronError):
    """A layout (pp x dp x tp) does not fit the world, the model or the batch."""


class PlanError(MeshtronError):
    """A tensor-parallel plan does not fit the model."""


class CheckpointError(MeshtronError):
    """A checkpoint is missing, damaged, or belongs to another model."""


class CheckpointFormatError(CheckpointError):
    """A later meshtron wrote the checkpoint, in a format that this one cannot read."""


class DataError(MeshtronError):
    """Token shards, a tokenizer or a source of text is unusable."""
