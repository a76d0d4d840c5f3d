"""From logits to the next token, the same at every layout.

A draw is a function of (seed, row, position): one uniform number from a hash, looked up in the cumulative
distribution of the whole vocabulary. No random state is kept anywhere, so it does not matter which rank draws, and
rounding differences between layouts change a token only where the number falls within them of a boundary.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshtron.errors import RecipeError


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float = 0.0
    """Divides the logits; 0 takes the likeliest token (greedy)."""
    top_k: int = 0
    """Tokens with a lower logit than the k-th are left out; 0 keeps all."""
    top_p: float = 1.0
    """Only the likeliest tokens whose probabilities sum to at least this are kept (Holtzman et al., 2020)."""
    seed: int = 0
    """Seed of the draws."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise RecipeError(f"temperature {self.temperature}: expected 0 (greedy) or more")
        if self.top_k < 0:
            raise RecipeError(f"top-k {self.top_k}: expected 0 (all) or more")
        if not 0 < self.top_p <= 1:
            raise RecipeError(f"top-p {self.top_p}: expected more than 0 and at most 1 (all)")


def uniform(seed: int, row: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits."""
    digest = hashlib.sha256(f"{seed}/{row}/{position}".encode()).digest()
    return (int.from_bytes(digest[:8], "little") >> 11) / (1 << 53)


def choose(logits: Tensor, sampling: Sampling, rows: Sequence[int], positions: Sequence[int]) -> Tensor:
    """The next token of each row.

    Args:
        logits: (batch, vocabulary).
        sampling: how to choose.
        rows: number of each row's prompt, for its draws.
        positions: position in its sequence of each token that is chosen.

    Returns:
        (batch,) int64 ids.
    """
    if sampling.temperature == 0:
        return logits.argmax(dim=-1)
    scaled, order = (logits.double() / sampling.temperature).sort(dim=-1, descending=True, stable=True)
    if 0 < sampling.top_k < scaled.shape[-1]:
        scaled = scaled.masked_fill(scaled < scaled[:, sampling.top_k - 1 : sampling.top_k], float("-inf"))
    cumulative = scaled.softmax(dim=-1).cumsum(dim=-1)
    # A token is kept while those before it have not reached top_p; the first always is.
    kept = torch.searchsorted(cumulative, torch.full_like(cumulative[:, :1], sampling.top_p))
    kept = kept.clamp(max=cumulative.shape[-1] - 1)
    total = cumulative.gather(-1, kept)
    draws = [uniform(sampling.seed, row, position) for row, position in zip(rows, positions, strict=True)]
    target = torch.tensor(draws, dtype=torch.float64, device=logits.device)[:, None] * total
    index = torch.searchsorted(cumulative, target, right=True).minimum(kept)
    return order.gather(-1, index).squeeze(-1)
