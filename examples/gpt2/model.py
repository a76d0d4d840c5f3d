"""GPT-2 (Radford et al., 2019): learned positions, LayerNorm with bias, fused q, k, v, GELU, tied head, dropout."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Config:
    """Sizes of the model; the defaults are those of the smallest GPT-2."""

    vocab_size: int = 50257
    max_length: int = 1024
    width: int = 768
    num_layers: int = 12
    num_heads: int = 12
    dropout: float = 0.1


class Embedding(nn.Module):
    """Token ids (batch, sequence) to hidden states (batch, sequence, width)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Embedding(config.max_length, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        return self.dropout(self.tokens(ids) + self.positions(positions))


class Attention(nn.Module):
    """Causal multi-head self-attention with one matrix for queries, keys and values."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim = config.width // config.num_heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, _ = x.shape
        q, k, v = (
            part.view(batch, sequence, -1, self.head_dim).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        return self.out(mixed.transpose(1, 2).reshape(batch, sequence, -1))


class FeedForward(nn.Module):
    """Two matrices with GELU between them."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attn_norm = nn.LayerNorm(config.width)
        self.attn = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attn(self.attn_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT2(nn.Module):
    """Token ids (batch, sequence) to logits (batch, sequence, vocabulary)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embed = Embedding(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.head.weight = self.embed.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def init_std(self, name: str) -> float:
        """Standard deviation of a matrix: outputs into the residual stream start smaller."""
        residual = name.endswith(("attn.out.weight", "mlp.down.weight"))
        return 0.02 / math.sqrt(2 * self.config.num_layers) if residual else 0.02
