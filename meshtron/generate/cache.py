"""Keys and values of earlier tokens, kept by an attention function that takes the place of the model's own.

The model calls ``attend(q, k, v, mask)`` in every layer; a ``CachedAttention`` a layer stores the keys and values it
is handed and attends over all it has stored. The model knows nothing of it, and what it hands over is this rank's
share of heads, so caches are sharded over tensor parallel ranks and pipeline stages by themselves.

Prompts of different lengths are padded on the right: causal attention never looks at what comes later, and the
padding's entries are overwritten one by one by the tokens that are generated.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshtron.models.attention import causal_attention


@dataclass(frozen=True, kw_only=True)
class CacheStep:
    """Where the tokens of one forward pass stand; passed to the model as ``mask``."""

    positions: Tensor
    """(batch, sequence) position of each token; a first pass holds 0 .. sequence - 1, later ones one token a row."""
    end: int
    """One more than the largest position: entries of the cache that are read."""
    ragged: bool
    """Whether rows stand at different positions."""

    @property
    def is_first(self) -> bool:
        """Whether this pass fills the cache from the beginning."""
        return self.positions.shape[1] == self.end


class CachedAttention:
    """Attention of one layer over this pass's tokens and all earlier ones.

    Args:
        length: tokens a row that there is room for.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self._keys = self._values = torch.empty(0)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: CacheStep | None = None, *, window: int | None = None
    ) -> Tensor:
        """Store and attend; shapes as in ``Attend``, with a ``CacheStep`` in place of a mask."""
        if mask is None:
            raise TypeError("CachedAttention needs a CacheStep as the model's mask")
        if mask.is_first:
            self._allocate(k)
            self._keys[:, :, : mask.end], self._values[:, :, : mask.end] = k, v
            return causal_attention(q, k, v, window=window)
        self._store(k, v, mask)
        return self._attend(q, mask, window)

    def _allocate(self, k: Tensor) -> None:
        batch, heads, _, head_dim = k.shape
        shape = (batch, heads, self.length, head_dim)
        if self._keys.shape != shape:
            # Zeros, since a masked entry still meets a weight of 0, and 0 times what memory holds may be NaN.
            self._keys, self._values = k.new_zeros(shape), k.new_zeros(shape)

    def _store(self, k: Tensor, v: Tensor, step: CacheStep) -> None:
        if step.ragged:
            rows, positions = torch.arange(len(k), device=k.device), step.positions[:, 0]
            self._keys[rows, :, positions] = k[:, :, 0]
            self._values[rows, :, positions] = v[:, :, 0]
        else:
            self._keys[:, :, step.end - 1 : step.end] = k
            self._values[:, :, step.end - 1 : step.end] = v

    def _attend(self, q: Tensor, step: CacheStep, window: int | None) -> Tensor:
        start = 0 if window is None or step.ragged else max(0, step.end - window)
        keys, values = self._keys[:, :, start : step.end], self._values[:, :, start : step.end]
        visible = None
        if step.ragged:
            age = step.positions - torch.arange(step.end, device=q.device)
            visible = age >= 0 if window is None else (age >= 0) & (age < window)
            visible = visible[:, None, None]
        # The query heads that share a key-value head stand as that head's queries: nothing is repeated.
        batch, heads, _, head_dim = q.shape
        grouped = q.reshape(batch, keys.shape[1], -1, head_dim)
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=visible)
        return out.reshape(batch, heads, 1, head_dim)


@contextmanager
def cached(stages: Iterable[nn.Module], length: int) -> Iterator[None]:
    """Give every attention layer of ``stages`` (modules with an ``attend``) a cache of ``length`` tokens a row."""
    layers = [module for stage in stages for module in stage.modules() if hasattr(module, "attend")]
    own = [layer.attend for layer in layers]
    try:
        for layer in layers:
            layer.attend = CachedAttention(length)  # type: ignore[assignment]
        yield
    finally:
        for layer, attend in zip(layers, own, strict=True):
            layer.attend = attend
