"""What the parallel helpers need to know of a model, as data."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StageLayout:
    """Which parts of a model go where when it is split into pipeline stages.

    Names are attribute paths from the model (``"layers"``, ``"transformer.h"``). Parts that are named nowhere are
    kept on every stage.
    """

    layers: str
    """A ModuleList or ModuleDict whose children are divided over the stages in order."""
    first: tuple[str, ...] = ()
    """Parts that only the first stage has."""
    last: tuple[str, ...] = ()
    """Parts that only the last stage has."""
