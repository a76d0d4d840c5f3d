"""Attention functions behind one signature; the model is handed one and calls it."""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from meshtron.errors import RecipeError


class Attend(Protocol):
    """Attention over heads.

    Args:
        q: (batch, query heads, sequence, head_dim).
        k, v: (batch, key-value heads, sequence, head_dim); query heads are a multiple of theirs.
        mask: what the backend needs to restrict causal attention further, or None.
        window: a token attends to itself and the ``window - 1`` before it; None is all of them.

    Returns:
        (batch, query heads, sequence, head_dim).
    """

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Any = None, *, window: int | None = None) -> Tensor: ...


def causal_attention(q: Tensor, k: Tensor, v: Tensor, mask: Any = None, *, window: int | None = None) -> Tensor:
    """Attention through torch's ``scaled_dot_product_attention``; ``mask`` is a boolean mask or None (causal)."""
    if window is not None and window < q.shape[2]:
        inside = window_mask(q.shape[2], window, q.device)
        mask = inside if mask is None else mask & inside
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
    )


def window_mask(sequence: int, window: int, device: torch.device | str | None = None) -> Tensor:
    """Boolean mask (query, key) of sliding window attention: key in ``query - window + 1 .. query``."""
    positions = torch.arange(sequence, device=device)
    age = positions[:, None] - positions
    return (age >= 0) & (age < window)


def attention_backend(name: str) -> Attend:
    """The attention function of a recipe's ``model.attention``.

    Raises:
        RecipeError: there is no such backend.
    """
    backends = {"auto": causal_attention, "sdpa": causal_attention}
    if name not in backends:
        raise RecipeError(f"model.attention = {name!r} is not available here: use one of {', '.join(backends)}")
    return backends[name]
