"""The [model] section: sizes and options under Hugging Face's names."""

from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from meshtron.recipe.base import Count, Positive, Section
from meshtron.recipe.problems import UNION_TAGS, Problems, nearest

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Families that ship with meshtron; any other is given as ``package.module:Name``."""


class RopeScalingSection(Section):
    """How rotary frequencies are stretched past the original context (Hugging Face's ``rope_scaling``)."""

    rope_type: Literal["default", "linear", "llama3"]
    """Kind of stretching."""
    factor: Annotated[float, Field(gt=0)] = 1.0
    """How many times longer the context gets. Default 1.0."""
    low_freq_factor: Annotated[float, Field(gt=0)] = 1.0
    """Wavelengths above original / this are stretched in full (llama3). Default 1.0."""
    high_freq_factor: Annotated[float, Field(gt=0)] = 4.0
    """Wavelengths below original / this are kept (llama3). Default 4.0."""
    original_max_position_embeddings: Positive = 8192
    """Context, in tokens, before stretching (llama3). Default 8192."""


class ModelSection(Section):
    """The model, under Hugging Face's names. With ``from_hf`` the sizes come from that folder's config.json."""

    family: str = "llama"
    """"llama", "mistral", "qwen2", "qwen3", or "package.module:Name" for a model of your own. Default "llama"."""
    from_hf: str = ""
    """Hugging Face folder that gives sizes and initial weights; "" for none. Default ""."""
    hidden_size: Count = 0
    """Width of the hidden states. Required unless from_hf is set."""
    intermediate_size: Count = 0
    """Width of the feed-forward layer. Required unless from_hf is set."""
    num_hidden_layers: Count = 0
    """Transformer blocks. Required unless from_hf is set."""
    num_attention_heads: Count = 0
    """Query heads. Required unless from_hf is set."""
    num_key_value_heads: Count = Field(default_factory=lambda earlier: earlier["num_attention_heads"])
    """Key and value heads. Default num_attention_heads."""
    head_dim: Count = Field(
        default_factory=lambda earlier: earlier["hidden_size"] // max(1, earlier["num_attention_heads"])
    )
    """Size of a head. Default hidden_size / num_attention_heads."""
    vocab_size: Count = 0
    """Rows of the embedding; at least the tokenizer's vocabulary. Required unless from_hf is set."""
    rms_norm_eps: Annotated[float, Field(gt=0)] = 1e-5
    """Added to the mean square inside each norm. Default 1e-5."""
    rope_theta: Annotated[float, Field(gt=0)] = 10_000.0
    """Base of the rotary wavelengths. Default 10000.0."""
    rope_scaling: RopeScalingSection | None = None
    """Table that stretches rotary frequencies. Default none."""
    max_position_embeddings: Count = 0
    """Longest sequence in tokens; 0 for training.seq_len. Default 0."""
    tie_word_embeddings: bool = False
    """Whether the head and the embedding are one parameter. Default false."""
    attention_bias: bool = False
    """Whether q, k, v and o projections have biases. Default false."""
    sliding_window: Positive | None = None
    """Tokens that a token attends to, itself included. Default none: all before it."""
    attention: Literal["auto", "sdpa", "flash_attn", "flex"] = "auto"
    """Attention backend; "auto" takes the fastest of the device. Default "auto"."""
    init_std: Annotated[float, Field(gt=0)] = 0.02
    """Standard deviation of initial weights. Default 0.02."""
    mup_base_width: Count = 0
    """hidden_size at which learning rate and init_std were found: both are then scaled to this width (muP); 0 for no
    scaling. Default 0."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if model_tag(self) == "custom family":
            return self
        found = [] if self.from_hf else _missing_or_odd_sizes(self)
        if self.family not in FAMILIES:
            families = ", ".join(f'"{family}"' for family in FAMILIES)
            hint = nearest(self.family, FAMILIES)
            found.append(("family", f'expected {families} or "package.module:Name", found "{self.family}"{hint}'))
        Problems.raise_if(found)
        return self


class CustomModelSection(ModelSection):
    """A model of your own (``family = "package.module:Name"``): any further keys are in ``model_extra``."""

    model_config = ConfigDict(extra="allow")


def model_tag(model: Any) -> str:
    """Which of the two sections a table, or a section that is built already, belongs to."""
    family = model.get("family") if isinstance(model, dict) else getattr(model, "family", None)
    shipped, custom = UNION_TAGS
    return custom if isinstance(family, str) and ":" in family else shipped


def _missing_or_odd_sizes(model: ModelSection) -> list[tuple[str, str]]:
    required = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    if missing := [name for name in required if getattr(model, name) == 0]:
        return [(name, "missing (a whole number of at least 1)") for name in missing]
    heads, kv_heads, found = model.num_attention_heads, model.num_key_value_heads, list[tuple[str, str]]()
    if kv_heads == 0 or heads % kv_heads:
        divisors = [n for n in range(1, heads + 1) if heads % n == 0]
        found.append(
            (
                "num_key_value_heads",
                f"{kv_heads} does not divide num_attention_heads({heads}): use one of {divisors}",
            )
        )
    if model.mup_base_width and model.tie_word_embeddings:
        found.append(("mup_base_width", "a tied head cannot be scaled apart from the embedding: untie them"))
    if "head_dim" not in model.model_fields_set and model.hidden_size % heads:
        found.append(
            (
                "hidden_size",
                f"{model.hidden_size} is not a multiple of num_attention_heads({heads}): set head_dim",
            )
        )
    elif model.head_dim == 0 or model.head_dim % 2:
        found.append(("head_dim", f"{model.head_dim} is not even, as rotary position embedding needs"))
    return found
