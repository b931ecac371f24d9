"""Two-layer random models of every family, made through transformers' own classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SHAPE = {
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
    "initializer_range": 0.3,
}
OPT_SHAPE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "word_embed_proj_dim": 64,
    "ffn_dim": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "eos_token_id": 0,
    "bos_token_id": 1,
    "pad_token_id": 2,
    "init_std": 0.3,
}
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, SHAPE),
    "mistral": (MistralConfig, MistralForCausalLM, SHAPE | {"sliding_window": 24}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {k: v for k, v in SHAPE.items() if k != "head_dim"}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, SHAPE),
    "opt": (OPTConfig, OPTForCausalLM, OPT_SHAPE),
}


def make_tiny(family: str, folder: Path, seed: int = 0, **overrides: Any) -> Path:
    """Saves a random model (float32, safetensors) into ``folder`` and returns it."""
    config_class, model_class, shape = FAMILIES[family]
    torch.manual_seed(seed)
    model = model_class(config_class(**(shape | overrides))).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith("bias"):
                tensor.normal_(0, 0.3)
    model.save_pretrained(folder)
    return folder


def add_tokenizer(folder: Path) -> Path:
    """Gives a model of ``make_tiny`` a tokenizer: id 0 ends a text, each other id is a character,
    from the space (1) to the tilde."""
    alphabet = ["\u0120", *map(chr, range(33, 127))]
    vocab = {"</s>": 0} | {char: i + 1 for i, char in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["</s>"])
    backend.save(str(folder / "tokenizer.json"))
    return folder
