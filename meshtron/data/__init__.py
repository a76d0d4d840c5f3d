"""Text to token shards, and token shards to batches.

``prepare_corpus`` writes shards; ``open_source`` maps them; ``TrainStream`` and ``ValidationSet`` answer "the
batch that starts at sample n". Names are imported when first asked for, so that a worker that only tokenizes
stays light.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshtron.data.batch import Batch
    from meshtron.data.formats import open_tokens
    from meshtron.data.loader import Source, Stage, TrainStream, ValidationSet
    from meshtron.data.prepare import PrepareOptions, prepare_corpus
    from meshtron.data.samples import Dataset, ResumableStream, Sample, StreamDataset, Windows
    from meshtron.data.sources import open_source
    from meshtron.data.tokenizer import end_of_text_id, load_tokenizer

_HOMES = {
    "Batch": "batch",
    "Dataset": "samples",
    "PrepareOptions": "prepare",
    "ResumableStream": "samples",
    "Sample": "samples",
    "Source": "loader",
    "Stage": "loader",
    "StreamDataset": "samples",
    "TrainStream": "loader",
    "ValidationSet": "loader",
    "Windows": "samples",
    "end_of_text_id": "tokenizer",
    "load_tokenizer": "tokenizer",
    "open_source": "sources",
    "open_tokens": "formats",
    "prepare_corpus": "prepare",
}
__all__ = [
    "Batch",
    "Dataset",
    "PrepareOptions",
    "ResumableStream",
    "Sample",
    "Source",
    "Stage",
    "StreamDataset",
    "TrainStream",
    "ValidationSet",
    "Windows",
    "end_of_text_id",
    "load_tokenizer",
    "open_source",
    "open_tokens",
    "prepare_corpus",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
