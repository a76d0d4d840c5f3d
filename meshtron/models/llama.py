"""The Llama family in plain torch: it knows nothing of meshes, ranks or recipes.

RMSNorm, rotary position embedding, grouped-query attention and SwiGLU, as in "LLaMA: Open and Efficient
Foundation Language Models" (Touvron et al., 2023) and "The Llama 3 Herd of Models" (2024), with the few options
that make it a Mistral, Qwen2 or Qwen3. Parameter names are those of Hugging Face's
``LlamaForCausalLM`` without the leading ``model.``.

Heads are read off the runtime shape of the projections, so the same code runs with all heads or with one tensor
parallel rank's share of them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.nn import functional as F

from meshtron.models.attention import Attend, causal_attention
from meshtron.models.documents import document_mask
from meshtron.models.rope import RopeScaling, apply_rope, rope_table
from meshtron.models.spec import StageLayout


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Sizes of a Llama model, under Hugging Face's names."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    """How rotary frequencies are stretched past the original context (None: not)."""
    max_position_embeddings: int = 4096
    tie_word_embeddings: bool = False
    """Whether lm_head and embed_tokens are one parameter."""
    attention_bias: bool = False
    """Whether q, k, v and o projections have biases."""
    qkv_bias: bool = False
    """Whether q, k and v projections have biases even where o has none (Qwen2)."""
    qk_norm: bool = False
    """Whether queries and keys are RMS-normalised within each head before they are rotated (Qwen3)."""
    sliding_window: int | None = None
    """Tokens that a token attends to, itself included (Mistral 7B v0.1); None is all before it."""
    init_std: float = 0.02
    """Standard deviation of initial weights; residual outputs get ``init_std / sqrt(2 * num_hidden_layers)``."""


# What runs where when the model is split into pipeline stages.
STAGES = StageLayout(layers="layers", first=("embed_tokens",), last=("norm", "lm_head"), head="lm_head")


def tensor_parallel_plan(sequence_parallel: bool = True, *, qk_norm: bool = False) -> dict[str, ParallelStyle]:
    """Tensor-parallel styles by module name, for models with or without ``qk_norm``.

    Between blocks the hidden states are local tensors: 1/tp of the sequence each with ``sequence_parallel``, whole
    copies without. Each sharded region opens with one all-gather (or nothing) and closes with one reduce-scatter
    (or all-reduce), as in Megatron-LM (Shoeybi et al., 2019; Korthikanti et al., 2022).
    """
    hidden = Shard(1) if sequence_parallel else Replicate()
    plan: dict[str, ParallelStyle] = {
        # Vocabulary-sharded table: every rank looks up the ids it owns, the sum of the parts is the embedding.
        "embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=hidden),
        # Attention: heads are split, so q, k, v read the whole sequence and o_proj sums over heads.
        "layers.*.self_attn": PrepareModuleInput(
            input_layouts=(hidden, None, None), desired_input_layouts=(Replicate(), None, None)
        ),
        "layers.*.self_attn.q_proj": ColwiseParallel(),
        "layers.*.self_attn.k_proj": ColwiseParallel(),
        "layers.*.self_attn.v_proj": ColwiseParallel(),
        "layers.*.self_attn.o_proj": RowwiseParallel(output_layouts=hidden),
        # Feed-forward: the intermediate size is split.
        "layers.*.mlp": PrepareModuleInput(input_layouts=(hidden,), desired_input_layouts=(Replicate(),)),
        "layers.*.mlp.gate_proj": ColwiseParallel(),
        "layers.*.mlp.up_proj": ColwiseParallel(),
        "layers.*.mlp.down_proj": RowwiseParallel(output_layouts=hidden),
        # Logits stay sharded over the vocabulary; the loss reads them where they are.
        "lm_head": ColwiseParallel(input_layouts=hidden, output_layouts=Shard(-1)),
    }
    if qk_norm:
        # One weight for all heads, applied to each rank's heads (dim 2 here, where the style says sequence), so
        # that its gradient is a partial sum over tp.
        plan |= {
            "layers.*.self_attn.q_norm": SequenceParallel(sequence_dim=2, use_local_output=True),
            "layers.*.self_attn.k_norm": SequenceParallel(sequence_dim=2, use_local_output=True),
        }
    if sequence_parallel:
        # Norms work on each rank's part of the sequence; their weight gradients are partial sums over tp.
        plan |= {
            "layers.*.input_layernorm": SequenceParallel(),
            "layers.*.post_attention_layernorm": SequenceParallel(),
            "norm": SequenceParallel(use_local_output=True),
        }
    return plan


class RMSNorm(nn.Module):
    """Scale to unit root mean square over the last dim (Zhang & Sennrich, 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Attention(nn.Module):
    """Causal grouped-query self-attention with rotary positions."""

    def __init__(self, config: LlamaConfig, attend: Attend) -> None:
        super().__init__()
        size, head_dim = config.hidden_size, config.head_dim
        bias = config.attention_bias or config.qkv_bias
        self.head_dim = head_dim
        self.window = config.sliding_window
        self.attend = attend
        self.q_proj = nn.Linear(size, config.num_attention_heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(size, config.num_key_value_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(size, config.num_key_value_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * head_dim, size, bias=config.attention_bias)
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Any = None) -> Tensor:
        """Attend within ``x`` of shape (batch, sequence, hidden); ``rope`` is what ``rope_table`` returns."""
        batch, sequence, _ = x.shape
        q, k, v = (
            proj(x).view(batch, sequence, -1, self.head_dim) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
        out = self.attend(apply_rope(q, rope), apply_rope(k, rope), v, mask, window=self.window)
        return self.o_proj(out.transpose(1, 2).reshape(batch, sequence, -1))


class FeedForward(nn.Module):
    """SwiGLU (Shazeer, 2020)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Pre-norm transformer block."""

    recomputed_parts = ("add_attention", "add_feed_forward")  # for meshtron.layers.recompute_layers

    def __init__(self, config: LlamaConfig, attend: Attend) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, attend)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Any = None) -> Tensor:
        return self.add_feed_forward(self.add_attention(x, rope, mask))

    def add_attention(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Any = None) -> Tensor:
        return x + self.self_attn(self.input_layernorm(x), rope, mask)

    def add_feed_forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """A whole Llama model, or, with parts taken out, one pipeline stage of it."""

    head_in_loss: bool = False  # forward stops before lm_head, which the loss applies a chunk of tokens at a time
    sequence_shards: int = 1  # ranks that share a sequence under sequence parallelism; set where it is applied

    def __init__(self, config: LlamaConfig, attend: Attend = causal_attention) -> None:
        super().__init__()
        self.config = config
        self.attend = attend
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, attend) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        mask: Any = None,
        last: Tensor | None = None,
        document_ids: Tensor | None = None,
    ) -> Tensor:
        """Token ids (batch, sequence), or an earlier stage's hidden states, to logits or hidden states.

        Args:
            x: ids of shape (batch, sequence) for a whole model or its first stage, else hidden states of shape
                (batch, sequence, hidden); under sequence parallelism the rank's part of the sequence.
            positions: position of each token, (sequence,) or (batch, sequence); by default 0 .. sequence - 1.
                They count the whole sequence, also where ``x`` is a part of it.
            mask: passed to the attention function as it is.
            last: (batch,) index in ``x`` of the one token of each row whose logits are wanted, so that logits are
                (batch, 1, vocabulary); by default those of all tokens. Not under sequence parallelism.
            document_ids: (batch, sequence) number of each token's document in its row; attention then stays inside
                documents. Takes the place of ``mask``.
        """
        if document_ids is not None:
            mask = document_mask(self.attend, document_ids, self.config.sliding_window)
        if positions is None:
            positions = torch.arange(self.sequence_length(x), device=x.device)
        x = self.embed_tokens(x)
        rope = rope_table(positions, self.config.head_dim, self.config.rope_theta, self.config.rope_scaling)
        for layer in self.layers:
            x = layer(x, rope, mask)
        x = self.norm(x)
        if self.head_in_loss:
            return x
        if last is not None and isinstance(self.lm_head, nn.Linear):  # an earlier stage hands on all tokens
            x = x[torch.arange(len(x), device=x.device), last][:, None]
        return self.lm_head(x)

    def sequence_length(self, x: Tensor) -> int:
        """Length of the whole sequence of which ``x`` is this stage's input."""
        return x.shape[1] * self.sequence_shards if x.is_floating_point() else x.shape[1]


def init_std(config: LlamaConfig, name: str) -> float:
    """Standard deviation of a weight's initial values: outputs into the residual stream start smaller (GPT-2)."""
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return config.init_std / math.sqrt(2 * config.num_hidden_layers)
    return config.init_std


def flops_per_token(config: LlamaConfig, sequence: int) -> int:
    """Floating-point operations of one token's forward and backward pass.

    Six a matrix parameter (two forward, four backward; the embedding look-up is none) and
    ``12 * layers * heads * head_dim * sequence`` for attention scores and values, with the causal mask not
    discounted, as in PaLM (Chowdhery et al., 2022, appendix B). Left out: norms, rotary, softmax,
    activations, the optimizer and recomputation.
    """
    heads_size = config.num_attention_heads * config.head_dim
    kv_size = config.num_key_value_heads * config.head_dim
    per_layer = config.hidden_size * (2 * heads_size + 2 * kv_size + 3 * config.intermediate_size)
    matrices = config.num_hidden_layers * per_layer + config.vocab_size * config.hidden_size
    return 6 * matrices + 12 * config.num_hidden_layers * heads_size * sequence


def config_of(model: Mapping[str, Any]) -> LlamaConfig:
    """The sizes in a recipe's [model] section; keys that say nothing about the architecture are passed over."""
    values = {field.name: model[field.name] for field in fields(LlamaConfig) if field.name in model}
    if isinstance(values.get("rope_scaling"), Mapping):
        values["rope_scaling"] = RopeScaling(**values["rope_scaling"])
    return LlamaConfig(**values)
