"""config.json <-> (family, LlamaConfig): what each key means, which values are accepted, what is refused.

Nothing that changes the maths is passed over: a key that no table below names is refused with its value. Where a
config.json leaves a key out, the value is the one transformers would take.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from meshtron.errors import CheckpointError
from meshtron.models import FAMILIES
from meshtron.models.llama import LlamaConfig
from meshtron.models.rope import RopeScaling


@dataclass(frozen=True, kw_only=True)
class HFFamily:
    """How one family is written in config.json."""

    architecture: str
    """Class name in ``architectures``."""
    defaults: Mapping[str, Any]
    """What transformers takes where config.json leaves a key out; also the keys that only some families have."""
    exported: Mapping[str, Any] = field(default_factory=dict)
    """Keys with a constant value that are written beside the translated ones."""


HF_FAMILIES: dict[str, HFFamily] = {
    "llama": HFFamily(
        architecture="LlamaForCausalLM",
        defaults={"num_key_value_heads": None, "max_position_embeddings": 2048, "attention_bias": False},
        exported={"mlp_bias": False, "pretraining_tp": 1},
    ),
    "mistral": HFFamily(
        architecture="MistralForCausalLM",
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096},
    ),
    "qwen2": HFFamily(
        architecture="Qwen2ForCausalLM",
        defaults={
            "num_key_value_heads": 32,
            "max_position_embeddings": 32_768,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "max_window_layers": 28,
            "layer_types": None,
        },
    ),
    "qwen3": HFFamily(
        architecture="Qwen3ForCausalLM",
        defaults={
            "num_key_value_heads": 32,
            "max_position_embeddings": 32_768,
            "head_dim": 128,
            "attention_bias": False,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "max_window_layers": 28,
            "layer_types": None,
        },
    ),
}

# Keys of every family that are required, or have the same default in all of them; same names in LlamaConfig.
REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
DEFAULTS: dict[str, Any] = {
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
}

# Rotary embedding: the older schema (rope_theta beside rope_scaling) and the newer one (all in rope_parameters).
ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")
ROPE_TYPES: dict[str, tuple[str, ...]] = {  # type -> the keys it needs
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}

# Keys that may be there with these values only: the model computes exactly this and nothing else.
ACCEPTED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "mlp_bias": (False,),
    "attention_bias": (False,),  # in families that have the key as an option, DEFAULTS above go first
    "attention_dropout": (0, None),
    "sliding_window": (None,),
    "rope_interleaved": (False,),
    "partial_rotary_factor": (1, None),
    "use_mrope": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
}

# Keys that do not change the logits.
# fmt: off
IGNORED = frozenset({
    "architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "_name_or_path",
    "_attn_implementation_autoset", "attn_implementation", "use_cache", "cache_implementation",
    "pretraining_tp", "is_llama_config", "transformers.js_config", "unsloth_version", "unsloth_fixed",
    "max_sequence_length", "gradient_checkpointing",  # Llama 1's name for its training length; training
    "output_attentions", "output_hidden_states", "output_scores", "return_dict", "return_dict_in_generate",
    "torchscript", "use_bfloat16", "chunk_size_feed_forward", "problem_type", "id2label", "label2id",
    "finetuning_task", "tokenizer_class", "prefix", "task_specific_params", "tie_encoder_decoder",
    "cross_attention_hidden_size", "is_decoder",
    # token ids
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id",
    # what older configs say about generation
    "max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups",
    "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty",
    "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences",
    "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty",
    "suppress_tokens", "begin_suppress_tokens", "tf_legacy_loss",
})
# fmt: on


def config_from_hf(config: Mapping[str, Any], where: str) -> tuple[str, LlamaConfig]:
    """Translate the contents of a config.json.

    Args:
        config: the parsed file.
        where: its path, for messages.

    Returns:
        The family (a key of ``meshtron.models.FAMILIES``) and the configuration.

    Raises:
        CheckpointError: a model, key or value that meshtron does not implement exactly, or a missing size.
    """
    name = config.get("model_type")
    if not isinstance(name, str) or name not in HF_FAMILIES:
        raise _refusal(where, "model_type", name, f"supported are {', '.join(HF_FAMILIES)}")
    family = HF_FAMILIES[name]
    if config.get("architectures") not in (None, [family.architecture]):
        raise _refusal(where, "architectures", config["architectures"], f"expected [{family.architecture!r}]")
    missing = [key for key in REQUIRED if key not in config]
    if missing:
        raise CheckpointError(f"{where}: {', '.join(missing)} missing; expected a whole config.json")
    _check_types({key: config[key] for key in REQUIRED}, where)
    defaults = {**DEFAULTS, **family.defaults}
    for key, value in config.items():
        if key in REQUIRED or key in defaults or key in ROPE_KEYS or key in IGNORED:
            continue
        if key not in ACCEPTED:
            raise _refusal(where, key, value, "meshtron does not know this key, which may change the maths")
        if value not in ACCEPTED[key]:
            raise _refusal(where, key, value, f"only {_either(ACCEPTED[key])} is implemented")
    values = {key: config[key] for key in REQUIRED} | {key: config.get(key, defaults[key]) for key in defaults}
    theta, scaling = _rope(config, where)
    values |= {"rope_theta": theta, "rope_scaling": scaling, "sliding_window": _window(values, name, where)}
    if values["num_key_value_heads"] is None:
        values["num_key_value_heads"] = values["num_attention_heads"]
    if values["head_dim"] is None:
        values["head_dim"] = values["hidden_size"] // values["num_attention_heads"]
    values["init_std"] = values.pop("initializer_range")
    for key in ("use_sliding_window", "max_window_layers", "layer_types"):
        values.pop(key, None)
    _check_types(values, where)
    heads, kv_heads, head_dim = (values[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    if heads % kv_heads:
        raise CheckpointError(
            f"{where}: num_attention_heads = {heads} is not a multiple of num_key_value_heads = {kv_heads}"
        )
    if head_dim % 2:
        raise CheckpointError(f"{where}: head_dim = {head_dim}: rotary embedding needs an even number")
    return name, FAMILIES[name]().config(values)


def _rope(config: Mapping[str, Any], where: str) -> tuple[float, RopeScaling | None]:
    """Base and scaling of the rotary embedding, from either schema."""
    old, new = config.get("rope_scaling"), config.get("rope_parameters")
    for key, table in (("rope_scaling", old), ("rope_parameters", new)):
        if table is not None and not isinstance(table, dict):
            raise _refusal(where, key, table, "expected an object")
    if old and new and old != new:
        raise _refusal(where, "rope_scaling", old, f"it contradicts rope_parameters = {new!r}")
    key, written = ("rope_parameters", new) if new else ("rope_scaling", old or {})
    found = {name: value for name, value in written.items() if value is not None}
    above, within = config.get("rope_theta"), found.pop("rope_theta", None)
    if above is not None and within is not None and above != within:
        raise _refusal(where, "rope_theta", above, f"it contradicts {key}.rope_theta = {within!r}")
    theta = next((value for value in (within, above) if value is not None), 10_000.0)
    kind = found.pop("rope_type", None) or found.get("type") or "default"
    if found.pop("type", kind) != kind:
        raise _refusal(where, key, written, "type and rope_type differ")
    partial = found.pop("partial_rotary_factor", 1.0)
    if partial != 1.0:
        raise _refusal(where, f"{key}.partial_rotary_factor", partial, "only 1.0 is implemented")
    if not isinstance(kind, str) or kind not in ROPE_TYPES:
        raise _refusal(where, f"{key}.rope_type", kind, f"only {_either(tuple(ROPE_TYPES))} is implemented")
    if set(found) != set(ROPE_TYPES[kind]):
        needed = ", ".join(ROPE_TYPES[kind]) or "no other keys"
        raise _refusal(where, key, written, f"{kind!r} takes {needed}")
    for name, value in {"rope_theta": theta, **found}.items():
        if not _is_positive(value):
            raise CheckpointError(f"{where}: {name} = {value!r}: expected a positive number")
    return float(theta), RopeScaling(rope_type=kind, **found) if kind != "default" else None


def _window(values: Mapping[str, Any], family: str, where: str) -> int | None:
    """Sliding window of all layers; a mixture of layers with and without one is refused."""
    window = values.get("sliding_window")
    if "use_sliding_window" not in values:
        return window
    if not values["use_sliding_window"]:
        window = None
    layers, first = values["num_hidden_layers"], values["max_window_layers"]
    if type(first) is not int:
        raise CheckpointError(f"{where}: max_window_layers = {first!r}: expected a whole number")
    types = values["layer_types"] or [
        "sliding_attention" if window is not None and layer >= first else "full_attention" for layer in range(layers)
    ]
    if types == ["full_attention"] * layers:
        return None
    if types == ["sliding_attention"] * layers and window is not None:
        return window
    key = "layer_types" if values["layer_types"] else "max_window_layers"
    raise _refusal(where, key, values[key], f"all {layers} layers must have a sliding window, or none")


def _check_types(values: Mapping[str, Any], where: str) -> None:
    """Raise CheckpointError where a value is not of the type that LlamaConfig has for it."""
    for key, value in values.items():
        if key.startswith("rope_") or (key == "sliding_window" and value is None):
            continue
        if key in ("tie_word_embeddings", "attention_bias"):
            valid, expected = isinstance(value, bool), "true or false"
        elif key in ("rms_norm_eps", "init_std"):
            valid, expected = _is_positive(value), "a positive number"
        else:
            valid, expected = type(value) is int and value > 0, "a positive whole number"
        if not valid:
            raise CheckpointError(f"{where}: {key} = {value!r}: expected {expected}")


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def config_to_hf(family: str, config: LlamaConfig) -> dict[str, Any]:
    """Contents of the config.json that describes ``config``; token ids and dtype are the caller's to add.

    The older schema of rotary keys is written: every release of transformers reads it.

    Raises:
        CheckpointError: transformers has no way to say this configuration.
    """
    hf = HF_FAMILIES[family]
    if family == "llama" and config.hidden_size % config.num_attention_heads:
        raise CheckpointError(
            f"hidden_size = {config.hidden_size} is not a multiple of num_attention_heads = "
            f"{config.num_attention_heads}: transformers refuses such a llama; model.family = 'mistral' is the same"
        )
    values: dict[str, Any] = {"architectures": [hf.architecture], "model_type": family, "hidden_act": "silu"}
    for key in (*REQUIRED, "num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings"):
        values[key] = getattr(config, key)
    values |= {
        "tie_word_embeddings": config.tie_word_embeddings,
        "initializer_range": config.init_std,
        "rope_theta": config.rope_theta,
        "rope_scaling": _rope_to_hf(config.rope_scaling),
        "attention_dropout": 0.0,
        "use_cache": True,
    }
    if "attention_bias" in hf.defaults:
        values["attention_bias"] = config.attention_bias
    elif config.attention_bias:
        raise CheckpointError(f"attention_bias = true: transformers' {family} has no bias on o_proj")
    if "use_sliding_window" in hf.defaults:
        windowed = config.sliding_window is not None
        values["use_sliding_window"] = windowed
        values["max_window_layers"] = 0 if windowed else config.num_hidden_layers
    if "sliding_window" in hf.defaults:
        values["sliding_window"] = config.sliding_window
    elif config.sliding_window is not None:
        raise CheckpointError(
            f"sliding_window = {config.sliding_window}: transformers' {family} has none; "
            "model.family = 'mistral' is the same model with one"
        )
    return values | dict(hf.exported)


def _rope_to_hf(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None or scaling.rope_type == "default":
        return None
    keys = ROPE_TYPES[scaling.rope_type]
    return {"rope_type": scaling.rope_type} | {key: getattr(scaling, key) for key in keys}


def _refusal(where: str, key: str, value: Any, why: str) -> CheckpointError:
    return CheckpointError(f"{where}: {key} = {value!r} is not supported: {why}")


def _either(values: tuple[Any, ...]) -> str:
    return " or ".join(repr(value) for value in values)
