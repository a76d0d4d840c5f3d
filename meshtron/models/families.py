"""Model families as data: the options that tell them from Llama."""

from typing import Any

# family -> options of LlamaConfig that every model of the family has. What varies within a family (sizes, rope,
# sliding_window, attention_bias, tied weights) is a key of the recipe's [model] section.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
}
