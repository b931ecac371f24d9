"""Small random models of architectures that no dense half of ours covers, for the compiler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

_SHAPE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "eos_token_id": 0,
    "bos_token_id": 1,
    "pad_token_id": None,
}
_ALL_HEADS = {key: value for key, value in _SHAPE.items() if key != "num_key_value_heads"}
_GPT = {
    "vocab_size": 96,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 512,
    "n_inner": 96,
    "rotary_dim": 8,
    "eos_token_id": 0,
    "bos_token_id": 1,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_BLOOM = {
    "vocab_size": 96,
    "hidden_size": 64,
    "n_layer": 2,
    "n_head": 4,
    "eos_token_id": 0,
    "bos_token_id": 1,
}
_FALCON = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "eos_token_id": 0,
    "bos_token_id": 1,
}
_THREE = {"num_hidden_layers": 3, "sliding_window": 8}
"""Layers with a window and without."""

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon": ("FalconConfig", _FALCON),
    "gptj": ("GPTJConfig", _GPT),
    "codegen": ("CodeGenConfig", _GPT),
    "gpt_neox": ("GPTNeoXConfig", _ALL_HEADS),
    "stablelm": ("StableLmConfig", _SHAPE),
    "cohere": ("CohereConfig", _SHAPE),
    "cohere2": ("Cohere2Config", _SHAPE | {"sliding_window": 8, "num_hidden_layers": 4}),
    "olmo2": ("Olmo2Config", _SHAPE),
    "starcoder2": ("Starcoder2Config", _SHAPE),
    "glm4": ("Glm4Config", _SHAPE),
    "granite": ("GraniteConfig", _SHAPE),
    "qwen2_moe": ("Qwen2MoeConfig", _SHAPE | _EXPERTS | {"shared_expert_intermediate_size": 32}),
    "olmoe": ("OlmoeConfig", _SHAPE | _EXPERTS),
    "mixtral": ("MixtralConfig", _SHAPE | {"num_local_experts": 4}),
    "phi": ("PhiConfig", _SHAPE),
    "persimmon": ("PersimmonConfig", _SHAPE),
    "nemotron": ("NemotronConfig", _SHAPE),
    "smollm3": ("SmolLM3Config", _SHAPE),
    "helium": ("HeliumConfig", _SHAPE),
    "exaone4": ("Exaone4Config", _SHAPE | {"sliding_window": 8, "num_hidden_layers": 4}),
    "gemma2": ("Gemma2Config", _SHAPE | _THREE),
    "gemma3": ("Gemma3TextConfig", _SHAPE | {"num_hidden_layers": 6, "sliding_window": 8}),
    "gpt_oss": (
        "GptOssConfig",
        _SHAPE | _THREE | {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_scaling": None},
    ),
    "bloom": ("BloomConfig", _BLOOM),
}


def make_model(name: str, folder: Path, seed: int = 0) -> Any:
    """Saves a random float32 model into ``folder`` and returns it, as transformers makes it."""
    config_name, fields = ARCHITECTURES[name]
    config = getattr(transformers, config_name)(**fields)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for key, tensor in model.named_parameters():
            scale = tensor.ndim == 1 and "norm" in key and key.endswith("weight")
            tensor.normal_(1.0 if scale else 0.0, 0.2 if tensor.ndim == 1 else 0.3)
    model.save_pretrained(folder)
    return model
