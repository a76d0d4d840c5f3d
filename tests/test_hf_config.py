"""config.json in and out: every key is understood, accepted or refused by name."""

import copy
import math
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError

from meshtron.errors import CheckpointError
from meshtron.hf.config import ACCEPTED, HF_FAMILIES, IGNORED, config_from_hf, config_to_hf
from meshtron.models import FAMILIES
from meshtron.models.llama import Llama, LlamaConfig
from meshtron.models.rope import RopeScaling
from tests.hf_models import CASES, model_of

# As published with Llama 3.1 8B, SmolLM2 135M, Mistral 7B v0.1 and Qwen2.5 0.5B (older schema, keys left out).
LLAMA31 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3",
    "use_cache": True,
    "vocab_size": 128256,
}
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
    "vocab_size": 49152,
}
MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "vocab_size": 32000,
}

QWEN25 = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 896,
    "initializer_range": 0.02,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "use_cache": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def test_published_configs_are_read() -> None:
    family, config = config_from_hf(LLAMA31, "config.json")
    assert family == "llama"
    assert config == LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
        rope_theta=500_000.0,
        rope_scaling=RopeScaling(rope_type="llama3", factor=8.0, original_max_position_embeddings=8192),
        max_position_embeddings=131_072,
    )
    config = config_from_hf(SMOLLM2, "config.json")[1]
    assert (config.head_dim, config.num_key_value_heads, config.tie_word_embeddings) == (64, 3, True)
    family, config = config_from_hf(MISTRAL, "config.json")
    assert (family, config.sliding_window, config.rope_scaling) == ("mistral", 4096, None)
    family, config = config_from_hf(QWEN25, "config.json")
    assert (family, config.sliding_window, config.rope_theta, config.head_dim) == ("qwen2", None, 1e6, 64)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_keys_left_out_mean_what_transformers_takes(family: str) -> None:
    sizes = {
        "vocab_size": 64,
        "hidden_size": 4096,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
    }
    ours = config_from_hf({"model_type": family, **sizes}, "config.json")[1]
    theirs = transformers.AutoConfig.for_model(family, **sizes)
    for key in ("num_key_value_heads", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings"):
        assert getattr(ours, key) == getattr(theirs, key), key
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 4096 // 32)
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.sliding_window == getattr(theirs, "sliding_window", None)
    assert ours.init_std == theirs.initializer_range


@pytest.mark.parametrize("case", CASES)
def test_a_config_survives_export_and_import(case: str) -> None:
    theirs = model_of(case).config
    family, config = config_from_hf(theirs.to_diff_dict(), case)
    written = config_to_hf(family, config)
    assert config_from_hf(written, case) == (family, config)
    read_back = transformers.AutoConfig.for_model(**written).to_dict()
    others = {"architectures", "dtype", "bos_token_id", "eos_token_id", "transformers_version", "max_window_layers"}
    for key, value in theirs.to_dict().items():
        if key not in others:
            assert read_back[key] == value, key


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gemma"}, r"model_type = 'gemma'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
        ({"hidden_act": "gelu"}, r"hidden_act = 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"attention_dropout": 0.1}, r"attention_dropout = 0\.1"),
        ({"final_logit_softcapping": 30.0}, r"final_logit_softcapping = 30\.0"),
        ({"num_local_experts": 8}, "num_local_experts = 8"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor = 0\.5"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"sliding_window": 128}, "sliding_window = 128"),  # transformers' llama would ignore it
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, r"rope_scaling\.rope_type = 'yarn'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, r"rope_scaling\.rope_type = 'dynamic'"),
        ({"rope_scaling": {"type": "linear", "rope_type": "default", "factor": 2.0}}, "type and rope_type differ"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'linear' takes factor"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "attention_factor": 2.0}}, "'linear' takes factor"),
        ({"rope_scaling": None, "rope_parameters": {"partial_rotary_factor": 0.5}}, r"partial_rotary_factor = 0\.5"),
        ({"rope_parameters": {"rope_type": "default"}}, "contradicts"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor = '2': expected a positive number"),
        ({"rope_scaling": None, "rope_theta": -1}, "rope_theta = -1: expected a positive number"),
        ({"vocab_size": 0}, "vocab_size = 0: expected a positive whole number"),
        ({"hidden_size": 64.0}, r"hidden_size = 64\.0"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings = 1: expected true or false"),
        ({"num_key_value_heads": 5}, "num_attention_heads = 32 is not a multiple of num_key_value_heads = 5"),
        ({"head_dim": 65}, "head_dim = 65: rotary embedding needs an even number"),
        ({"use_mrope": True}, "use_mrope = True"),
        ({"model_type": ["llama"]}, r"model_type = \['llama'\]"),
        ({"rope_scaling": "linear"}, "rope_scaling = 'linear' is not supported: expected an object"),
        ({"rope_scaling": {"type": ["linear"]}}, r"rope_scaling\.rope_type = \['linear'\]"),
        ({"rope_parameters": 5}, "rope_parameters = 5"),
        ({"rope_scaling": None, "rope_theta": math.nan}, "rope_theta = nan: expected a positive number"),
        ({"rms_norm_eps": math.inf}, "rms_norm_eps = inf: expected a positive number"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0: expected a positive whole number"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers = '32': expected a positive whole number"),
        ({"per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config"),
        (
            {"rope_scaling": None, "rope_parameters": {"rope_theta": 1e4}},
            r"rope_theta = 500000\.0 is not supported: it contradicts rope_parameters.rope_theta = 10000\.0",
        ),
    ],
)
def test_what_is_not_implemented_is_refused_by_key_and_value(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        config_from_hf({**LLAMA31, **changes}, "config.json")


def test_missing_sizes_are_listed() -> None:
    config = {key: value for key, value in LLAMA31.items() if key not in ("vocab_size", "hidden_size")}
    with pytest.raises(CheckpointError, match=r"config\.json: vocab_size, hidden_size missing"):
        config_from_hf(config, "config.json")


def test_layers_with_and_without_a_window_are_refused() -> None:
    qwen = {**LLAMA31, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True}
    with pytest.raises(CheckpointError, match="max_window_layers = 28"):
        config_from_hf(qwen, "config.json")
    types = ["full_attention", "sliding_attention"] * 16
    with pytest.raises(CheckpointError, match="max_window_layers = None: expected a whole number"):
        config_from_hf({**qwen, "max_window_layers": None}, "config.json")
    with pytest.raises(CheckpointError, match="layer_types"):
        config_from_hf({**qwen, "layer_types": types}, "config.json")
    assert config_from_hf({**qwen, "max_window_layers": 0}, "config.json")[1].sliding_window == 4096
    assert config_from_hf({**qwen, "max_window_layers": 32}, "config.json")[1].sliding_window is None


def test_what_transformers_cannot_say_is_not_exported() -> None:
    _, config = config_from_hf(SMOLLM2, "config.json")
    values = {name: getattr(config, name) for name in config.__dataclass_fields__}
    with pytest.raises(CheckpointError, match="sliding_window"):
        config_to_hf("llama", LlamaConfig(**{**values, "sliding_window": 8}))
    with pytest.raises(CheckpointError, match="attention_bias"):
        config_to_hf("qwen2", LlamaConfig(**{**values, "attention_bias": True}))
    with pytest.raises(CheckpointError, match="hidden_size = 576"):
        config_to_hf("llama", LlamaConfig(**{**values, "num_attention_heads": 10, "num_key_value_heads": 5}))


def _others(value: Any) -> list[Any]:
    """Values of the same kind that mean something else."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value * 2]
    if isinstance(value, float):
        return [value * 3 + 0.1]
    if isinstance(value, dict):
        return [
            {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4},
            {"rope_type": "default", "rope_theta": 9.0},
        ]
    return [True, 2, 0.5] if value is None else ["gelu"]


# Keys that transformers' releases have written, beside those of its configuration objects.
_MORE_KEYS = (
    "attention_bias",
    "head_dim",
    "layer_types",
    "mlp_bias",
    "partial_rotary_factor",
    "qkv_bias",
    "use_mrope",
)


@pytest.mark.parametrize("family", HF_FAMILIES)
def test_a_changed_key_is_honoured_or_refused_never_ignored(family: str) -> None:
    """Each key of transformers' configuration in turn gets another value: the logits follow, or it is refused."""
    sizes = {
        "vocab_size": 67,
        "hidden_size": 24,
        "intermediate_size": 20,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "max_position_embeddings": 64,
    }
    explicit = {"head_dim": 8} if family == "qwen3" else {}
    base = transformers.AutoConfig.for_model(family, **sizes, **explicit).to_dict() | {"architectures": None}
    tokens = torch.randint(3, 67, (2, 40), generator=torch.Generator().manual_seed(0))
    honoured, refused, unnamed = set(), set(), set()
    for key in {*base, *IGNORED, *ACCEPTED, *_MORE_KEYS} - {"dtype", "torch_dtype", "id2label", "return_dict"}:
        for value in _others(base.get(key)):
            changed = copy.deepcopy(base) | {key: value}
            try:
                ours = _llama(changed)
            except CheckpointError as error:
                refused.add(key)
                unnamed |= set() if key in str(error) else {key}
                continue
            try:
                theirs = _random_model(transformers.AutoConfig.for_model(**changed))
            except (ValueError, TypeError, AttributeError, StrictDataclassError):
                continue  # nobody can have such a model
            ours.load_state_dict(
                {name.removeprefix("model."): tensor for name, tensor in theirs.state_dict().items()}
            )
            with torch.no_grad():
                difference = (ours(tokens) - theirs(tokens).logits).abs().max().item()
            assert difference < 1e-4, (key, value, difference)
            honoured.add(key)
    assert {"hidden_size", "num_key_value_heads", "rms_norm_eps", "rope_parameters", "eos_token_id"} <= honoured
    assert unnamed <= {
        "num_hidden_layers",
        "rope_parameters",
    }  # what they contradict is named: layer_types, rope_theta
    assert {"hidden_act", "model_type", "attention_dropout", "qkv_bias", "layer_types"} <= refused


def _llama(hf_config: dict[str, Any]) -> Llama:
    family, config = config_from_hf(hf_config, "config.json")
    return Llama(FAMILIES[family]().config(vars(config)))


def _random_model(config: transformers.PretrainedConfig) -> transformers.PreTrainedModel:
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * 0.4) if parameter.dim() == 1 else parameter.copy_(noise * 0.15)
    return model
