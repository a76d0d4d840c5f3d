"""Attention that stops at the boundaries of documents packed into one sequence.

A token attends to tokens before it in its own document only. With positions that restart at each document, the
logits of a document are then those it would have alone, whatever lies beside it.
"""

from typing import Any

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from meshtron.models.attention import Attend, flex


def document_mask(attend: Attend, document_ids: Tensor, window: int | None = None) -> Any:
    """What ``attend`` takes as its mask so that documents do not see each other.

    Args:
        attend: the attention function that will be given the mask.
        document_ids: (batch, sequence), equal where two tokens are of one document.
        window: of sliding window attention, in tokens.

    Returns:
        A ``BlockMask`` for FlexAttention, else a boolean tensor (batch, 1, query, key) for
        ``scaled_dot_product_attention``, which the flash-attn functions fall back to. Both hold causality too.
    """
    if attend is flex:
        return _block_mask(document_ids, window)
    same = document_ids[:, :, None] == document_ids[:, None, :]
    return same.tril()[:, None]


def _block_mask(document_ids: Tensor, window: int | None) -> BlockMask:
    batch, length = document_ids.shape
    reach = length if window is None else window

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same = document_ids[row, query] == document_ids[row, key]
        return same & (query >= key) & (query - key < reach)

    return create_block_mask(visible, batch, None, length, length, str(document_ids.device))
