"""Tiny random transformers models of each family, written to folders as their owners would publish them."""

from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

VOCAB = 263  # a prime, so that a split over the vocabulary is uneven

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 72,
    "num_hidden_layers": 4,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "max_position_embeddings": 96,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,  # the tests use 64 tokens
}

# case -> (transformers' config class, what differs from _SIZES)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("LlamaConfig", {"num_key_value_heads": 12, "rms_norm_eps": 1e-5}),
    "llama3": ("LlamaConfig", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "llama3.1": ("LlamaConfig", {"rope_parameters": {**_LLAMA3, "rope_theta": 5e5}}),
    "llama3.2": (
        "LlamaConfig",
        {"rope_parameters": {**_LLAMA3, "rope_theta": 1e4}, "tie_word_embeddings": True},
    ),
    "linear": (
        "LlamaConfig",
        {
            "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
            "attention_bias": True,
        },
    ),
    "smollm": (
        "LlamaConfig",
        {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True},
    ),
    "mistral": ("MistralConfig", {"head_dim": 16, "sliding_window": 12}),
    "mistral-full": ("MistralConfig", {"sliding_window": None, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen2-window": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-bias": ("Qwen3Config", {"head_dim": 12, "attention_bias": True}),
}


@cache
def model_of(case: str) -> transformers.PreTrainedModel:
    """The model of a case in float32, every parameter random and large enough to matter."""
    name, differences = CASES[case]
    config = getattr(transformers, name)(**{**_SIZES, **differences})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.5)
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)
    return model


def tokens_of(rows: int = 2, length: int = 64, seed: int = 0) -> torch.Tensor:
    """Random token ids of shape (rows, length), none of them a special one."""
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def write(case: str, folder: Path, **options: Any) -> Path:
    """Save a case's model as a Hugging Face folder and return the folder."""
    model_of(case).save_pretrained(folder, **options)
    return folder


@torch.no_grad()
def logits_of(case: str, tokens: torch.Tensor) -> torch.Tensor:
    """transformers' logits."""
    return model_of(case)(tokens).logits


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder's safetensors files."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}
