"""Attention functions behind one signature; the model is handed one and calls it."""

from typing import Any, Protocol

from torch import Tensor
from torch.nn import functional as F


class Attend(Protocol):
    """Attention over heads.

    Args:
        q: (batch, query heads, sequence, head_dim).
        k, v: (batch, key-value heads, sequence, head_dim); query heads are a multiple of theirs.
        mask: what the backend needs to restrict causal attention further, or None.

    Returns:
        (batch, query heads, sequence, head_dim).
    """

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Any = None) -> Tensor: ...


def causal_attention(q: Tensor, k: Tensor, v: Tensor, mask: Any = None) -> Tensor:
    """Attention through torch's ``scaled_dot_product_attention``; ``mask`` is a boolean mask or None (causal)."""
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
    )
