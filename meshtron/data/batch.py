"""One dp rank's part of a global batch, made of samples."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from meshtron.data.samples import Sample


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One dp rank's part of a global batch."""

    tokens: Tensor
    """Ids, int64 (local batch, seq_len)."""
    labels: Tensor
    """The id that each token has to predict, int64 (local batch, seq_len); -100 where there is no loss."""
    document_ids: Tensor | None = None
    """Number of each token's document in its row, int64 (local batch, seq_len), or None where attention sees
    all."""
    positions: Tensor | None = None
    """Place of each token in its document, int64 (local batch, seq_len), or None for 0 .. seq_len - 1."""

    def to(self, device: torch.device | str) -> "Batch":
        """The batch on a device; the copy overlaps with what the host does next when the memory is pinned."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> "Batch":
        """The batch in page-locked memory."""
        return self._each(Tensor.pin_memory)

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        changed = {key: None if tensor is None else change(tensor) for key, tensor in vars(self).items()}
        return Batch(**changed)  # type: ignore[arg-type]


def collate(rows: Sequence[Sample]) -> Batch:
    """A batch with one sample a row."""
    tokens = np.stack([row.tokens for row in rows]).astype(np.int64, copy=False)
    labels = np.stack([row.labels for row in rows]).astype(np.int64, copy=False)
    if all(row.document_ids is None for row in rows):
        return Batch(tokens=torch.from_numpy(tokens), labels=torch.from_numpy(labels))
    # Where one source of a mixture has documents, a row of another is one document.
    document_ids = np.zeros_like(tokens)
    for number, row in enumerate(rows):
        if row.document_ids is not None:
            document_ids[number] = row.document_ids
    places = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    begins = np.diff(document_ids, axis=1, prepend=document_ids[:, :1]) != 0
    positions = places - np.maximum.accumulate(np.where(begins, places, 0), axis=1)
    return Batch(
        tokens=torch.from_numpy(tokens),
        labels=torch.from_numpy(labels),
        document_ids=torch.from_numpy(document_ids),
        positions=torch.from_numpy(positions),
    )
