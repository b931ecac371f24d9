"""Reads a Hugging Face ``config.json`` into a ``ModelArch``, and says what its KV cache looks like.

It owns the meaning of configuration keys, defaults included. It knows no weights and no files, so
a node that only holds a cache can ask for ``kv_specs`` from a configuration alone. What a
configuration asks for and the dense halves cannot do is refused here, by name.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import msgspec

from ..core.errors import ModelError
from ..kvcache.layout import KVSpec
from .base import ModelArch
from .rope import context_limit, normalize_scaling

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "OPTForCausalLM": "opt",
}
FAMILIES = tuple(ARCHITECTURES.values())
COMPILED = "compiled"
"""The family of models that the compiler split; their KV specs are listed in ``extra``."""

Config = Mapping[str, Any]


# What transformers assumes where a family's ``config.json`` is silent.
_VOCAB = {"llama": 32000, "mistral": 32000, "qwen2": 151936, "qwen3": 151936, "opt": 50272}
_MAX_POSITION = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768, "opt": 2048}
# A count of KV heads that is absent means all heads, but for the families born with fewer.
_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}


def arch_from_config(config: Config, generation: Config | None = None) -> ModelArch:
    """The model that ``config.json`` describes; ``generation``: its ``generation_config.json``.

    Raises ``ModelError`` naming an architecture, a key or a value that is not supported.
    """
    family = family_of(config)
    read = _opt if family == "opt" else functools.partial(_llama_like, family)
    try:
        arch = read(config, generation)
        _check_shape(arch)
    except ModelError:
        raise
    except (TypeError, ValueError, AttributeError) as error:  # a key's value is of another type
        raise ModelError(f"config.json: a value makes no sense: {error}") from error
    return arch


def family_of(config: Config) -> str:
    """The family of a ``config.json``; ``ModelError`` listing the known ones."""
    names = config.get("architectures") or []
    names = [names] if isinstance(names, str) else names
    for name in names:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    model_type = config.get("model_type")
    if not names and model_type in FAMILIES:
        return str(model_type)
    named = ", ".join(map(str, names)) or f"model_type {model_type!r}"
    raise ModelError(
        f"the architecture {named} is not supported; supported: {', '.join(ARCHITECTURES)}"
    )


def kv_specs(arch: ModelArch, dtype: str) -> tuple[KVSpec, ...]:
    """Keys and values of each layer of ``arch``, stored as ``dtype``; needs no weights."""
    if arch.family == COMPILED:
        specs = msgspec.convert(arch.extra["layers"], tuple[KVSpec, ...])
        return tuple(msgspec.structs.replace(spec, dtype=dtype) for spec in specs)
    return tuple(
        KVSpec(
            kv_heads=arch.num_kv_heads,
            k_dim=arch.head_dim,
            v_dim=arch.head_dim,
            dtype=dtype,
            scale=arch.head_dim**-0.5,
            window=_window(arch, layer),
        )
        for layer in range(arch.num_layers)
    )


def _window(arch: ModelArch, layer: int) -> int | None:
    if arch.windowed_layers is not None and layer not in arch.windowed_layers:
        return None
    return arch.sliding_window


def _llama_like(family: str, config: Config, generation: Config | None) -> ModelArch:
    _refuse_llama(config)
    heads = _int(config, "num_attention_heads")
    kv_heads = config.get("num_key_value_heads")
    if kv_heads is None:
        kv_heads = heads if "num_key_value_heads" in config else _KV_HEADS.get(family, heads)
    hidden, layers = _int(config, "hidden_size"), _int(config, "num_hidden_layers")
    head_dim = config.get("head_dim") or (128 if family == "qwen3" else hidden // heads)
    theta, scaling = _rope(config, _int(config, "max_position_embeddings", family))
    window, windowed = _sliding(family, config, layers)
    return ModelArch(
        family=family,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=_int(config, "intermediate_size"),
        vocab_size=_int(config, "vocab_size", family),
        max_position=context_limit(scaling, _int(config, "max_position_embeddings", family)),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        sliding_window=window,
        windowed_layers=windowed,
        attention_bias=family == "qwen2" or bool(config.get("attention_bias", False)),
        mlp_bias=family == "llama" and bool(config.get("mlp_bias", False)),
        hidden_act=str(config.get("hidden_act", "silu")),
        eos_token_ids=_eos(config, generation),
        bos_token_id=config.get("bos_token_id"),
    )


def _opt(config: Config, generation: Config | None) -> ModelArch:
    heads, hidden = _int(config, "num_attention_heads"), _int(config, "hidden_size")
    before = bool(config.get("do_layer_norm_before", True))
    affine = bool(config.get("layer_norm_elementwise_affine", True))
    bias = bool(config.get("enable_bias", True))
    return ModelArch(
        family="opt",
        num_layers=_int(config, "num_hidden_layers"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        intermediate_size=_int(config, "ffn_dim"),
        vocab_size=_int(config, "vocab_size", "opt"),
        max_position=_int(config, "max_position_embeddings", "opt"),
        tie_embeddings=bool(config.get("tie_word_embeddings", True)),
        attention_bias=bias,
        mlp_bias=bias,
        hidden_act=str(config.get("activation_function", "relu")),
        eos_token_ids=_eos(config, generation),
        bos_token_id=config.get("bos_token_id"),
        extra={
            "word_embed_proj_dim": config.get("word_embed_proj_dim") or hidden,
            "do_layer_norm_before": before,
            "final_layer_norm": before and not config.get("_remove_final_layer_norm", False),
            "layer_norm_affine": affine,
        },
    )


def _refuse_llama(config: Config) -> None:
    partial = config.get("partial_rotary_factor")
    if partial not in (None, 1, 1.0):
        raise ModelError(f"partial_rotary_factor {partial} is not supported (only 1)")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise ModelError(
            f"weights quantised by {method!r} (quantization_config) are not supported; "
            "use unquantised weights or a GGUF file"
        )
    act = config.get("hidden_act", "silu")
    if act not in ("silu", "swish"):
        raise ModelError(f"hidden_act {act!r} is not supported in this family; supported: silu")
    unknown = set(config.get("layer_types") or ()) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ModelError(f"layer_types {', '.join(sorted(unknown))} are not supported")


def _rope(config: Config, max_position: int) -> tuple[float, dict[str, Any] | None]:
    """Theta and scaling, from ``rope_parameters`` (newer) or ``rope_scaling`` (older files)."""
    given = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    theta = given.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    if "original_max_position_embeddings" in config:
        given["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    return float(theta), normalize_scaling(given, max_position)


def _sliding(family: str, config: Config, layers: int) -> tuple[int | None, tuple[int, ...] | None]:
    """The window and the layers that have it (None: all), as transformers reads them."""
    window = config.get("sliding_window", 4096 if family != "llama" else None)
    if family == "llama" or window is None:
        return None, None
    if family == "mistral":
        return int(window), None
    if not config.get("use_sliding_window", False):
        return None, None
    types = config.get("layer_types")
    if types is None:
        first = config.get("max_window_layers", 28)
        chosen = tuple(range(min(first, layers), layers))
    else:
        chosen = tuple(i for i, kind in enumerate(types) if kind == "sliding_attention")
    return (int(window), chosen) if chosen else (None, None)


def _eos(config: Config, generation: Config | None) -> tuple[int, ...]:
    """End-of-sequence ids of both files, the generation's first, each once."""
    found: list[int] = []
    for source in (generation or {}, config):
        value = source.get("eos_token_id")
        found += [value] if isinstance(value, int) else list(value or ())
    return tuple(dict.fromkeys(found))


def _int(config: Config, key: str, family: str = "") -> int:
    defaults = {"vocab_size": _VOCAB, "max_position_embeddings": _MAX_POSITION}
    value = config.get(key, defaults.get(key, {}).get(family))
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"config.json: {key} must be a positive integer, not {value!r}")
    return value


def _check_shape(arch: ModelArch) -> None:
    if arch.num_heads % arch.num_kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads ({arch.num_heads}) is not a multiple of "
            f"num_key_value_heads ({arch.num_kv_heads})"
        )
    if arch.family == "opt" and arch.head_dim * arch.num_heads != arch.hidden_size:
        raise ModelError(
            f"config.json: hidden_size ({arch.hidden_size}) is not a multiple of "
            f"num_attention_heads ({arch.num_heads})"
        )
    if arch.family != "opt" and arch.head_dim % 2:
        raise ModelError(
            f"config.json: head_dim must be even for rotary positions, not {arch.head_dim}"
        )
