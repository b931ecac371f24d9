"""Reads a GGUF file as if it were a Hugging Face folder: its config and its tensors by HF name.

It owns the translation of llama.cpp's names and of its row order for rotary positions. The
tokenizer in the metadata is ``gguf_tokenizer``'s.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..core.errors import ModelError
from .rope import llama3_divisors
from .weights import Shape, WeightSource

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
COMPILED_ONLY = ("gemma3",)
"""Architectures without a dense half of ours."""
_ENDS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_IN_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_IN_GEMMA = _IN_LAYER | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_GEMMA_PATTERN = 6
"""Every so many layers one has no window, where a file does not say."""
_ROPE_FACTORS = "rope_freqs.weight"
_BROKEN = (ValueError, IndexError, KeyError, OverflowError, TypeError, OSError)
"""What the reader raises over a damaged file, depending on where the damage is."""


class GGUFFile(WeightSource):
    """An open GGUF file. Tensors are dequantised to float32 as they are asked for."""

    def __init__(self, path: Path) -> None:
        """``ModelError`` where the file is damaged or of an architecture that is not supported."""
        from .gguf_header import GGUFHeader

        self.where = str(path)
        try:
            self._header = GGUFHeader(path)
        except _BROKEN as error:
            raise self._damaged(repr(error)) from error
        self.architecture = str(self.value("general.architecture", ""))
        if self.architecture not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise ModelError(
                f"{path}: GGUF architecture {self.architecture!r} is not supported; "
                f"supported: {known}"
            )
        self._tensors = self._header.tensors

    def value(self, key: str, default: Any = None) -> Any:
        """A metadata value: int, float, bool, str or a list of these."""
        try:
            value = self._header.value(key)
        except _BROKEN as error:
            raise self._damaged(f"metadata {key!r}: {error!r}") from error
        return default if value is None else value

    def names(self) -> list[str]:
        """Hugging Face names of all weights, in file order; ``ModelError`` on unknown ones."""
        stored = [name for name in self._tensors if name != _ROPE_FACTORS]
        unknown = [name for name in stored if _hf_name(name, self._in_layer) is None]
        if unknown:
            raise ModelError(
                f"{self.where}: tensor {unknown[0]!r} is of a kind that is not supported"
            )
        return [_hf_name(name, self._in_layer) or "" for name in stored]

    def has(self, name: str) -> bool:
        return _gguf_name(name, self._in_layer) in self._tensors

    def shape(self, name: str) -> Shape:
        return self._tensors[_gguf_name(name, self._in_layer)].shape

    def load(self, name: str, shape: Shape) -> torch.Tensor:
        values = self._in_order(name, self._dequantize(_gguf_name(name, self._in_layer)))
        if self.architecture == "gemma3" and name.endswith("norm.weight"):
            values = values - 1.0  # stored as what they multiply by, which is one more
        return torch.from_numpy(np.array(values, dtype=np.float32, order="C"))

    def stored(self, name: str) -> tuple[str, npt.NDArray[np.uint8]] | None:
        """A quantised matrix's type and the bytes of its rows; None for one of numbers."""
        stored = _gguf_name(name, self._in_layer)
        data = self._header.data(stored)
        if data.dtype != np.uint8 or data.ndim != 2:
            return None
        kind = self._tensors[stored].kind.name
        return kind, np.ascontiguousarray(self._in_order(name, data))

    def _in_order(self, name: str, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Rows as Hugging Face has them."""
        if self.architecture == "llama" and name.endswith((".q_proj.weight", ".q_proj.bias")):
            return _unpermute(rows, self._heads())
        if self.architecture == "llama" and name.endswith((".k_proj.weight", ".k_proj.bias")):
            return _unpermute(rows, self._kv_heads())
        return rows

    def config(self) -> dict[str, Any]:
        """The file's metadata as a ``config.json``."""
        heads, hidden = self._heads(), self._own("embedding_length")
        head_dim = self._own("attention.key_length", None)
        head_dim = head_dim or self._own("rope.dimension_count", hidden // heads)
        if self._own("rope.dimension_count", head_dim) != head_dim:
            raise ModelError(
                f"{self.where}: rotary positions on a part of a head are not supported"
            )
        window = self._own("attention.sliding_window", None)
        config = {
            "architectures": [ARCHITECTURES[self.architecture]],
            "model_type": self.architecture,
            "num_hidden_layers": self._own("block_count"),
            "hidden_size": hidden,
            "intermediate_size": self._own("feed_forward_length"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._kv_heads(),
            "head_dim": head_dim,
            "vocab_size": self.shape("model.embed_tokens.weight")[0],
            "max_position_embeddings": self._own("context_length"),
            "rms_norm_eps": float(self._own("attention.layer_norm_rms_epsilon")),
            "rope_theta": float(self._own("rope.freq_base", 10000.0)),
            "rope_scaling": self._scaling(head_dim),
            "hidden_act": "silu",
            "tie_word_embeddings": not self.has("lm_head.weight"),
            "torch_dtype": "float32",
        }
        if self.architecture == "llama":
            config |= self._llama_features(window)
        if self.architecture == "gemma3":
            config |= self._gemma_features(window, head_dim)
        return config | self._special_ids()

    def _llama_features(self, window: int | None) -> dict[str, Any]:
        """Mistrals are stored as llama; biases show only in the tensors."""
        if window:
            mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
            return {**mistral, "sliding_window": window}
        return {
            "attention_bias": self.has("model.layers.0.self_attn.q_proj.bias"),
            "mlp_bias": self.has("model.layers.0.mlp.up_proj.bias"),
        }

    def _gemma_features(self, window: int | None, head_dim: int) -> dict[str, Any]:
        """As transformers' text model of Gemma 3 reads them."""
        every = int(self._own("attention.sliding_window_pattern", _GEMMA_PATTERN))
        kinds = ("full_attention", "sliding_attention")
        layers = range(1, int(self._own("block_count")) + 1)
        return {
            "model_type": "gemma3_text",
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": head_dim,
            "sliding_window": window,
            "layer_types": [kinds[bool(layer % every)] for layer in layers],
            "rope_local_base_freq": 10000.0,
        }

    @property
    def _in_layer(self) -> dict[str, str]:
        return _IN_GEMMA if self.architecture == "gemma3" else _IN_LAYER

    def _special_ids(self) -> dict[str, Any]:
        ends = [self.value(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
        found = list(dict.fromkeys(int(end) for end in ends if end is not None))
        return {
            "bos_token_id": self.value("tokenizer.ggml.bos_token_id"),
            "eos_token_id": found[0] if len(found) == 1 else (found or None),
            "pad_token_id": self.value("tokenizer.ggml.padding_token_id"),
        }

    def _scaling(self, head_dim: int) -> dict[str, Any] | None:
        trained = self._own("rope.scaling.original_context_length", None)
        if _ROPE_FACTORS in self._tensors:
            return self._llama3_scaling(head_dim, trained)
        kind = self._own("rope.scaling.type", "none")
        if kind == "none":
            return None
        found = {
            "rope_type": kind,
            "factor": float(self._own("rope.scaling.factor", 1.0)),
            "original_max_position_embeddings": trained,
            "attention_factor": self._own("rope.scaling.attn_factor", None),
        }
        return {key: value for key, value in found.items() if value is not None}

    def _llama3_scaling(self, head_dim: int, trained: int | None) -> dict[str, Any]:
        """Llama 3's scaling is stored as divisors of the frequencies: find what made them."""
        stored = torch.from_numpy(np.array(self._dequantize(_ROPE_FACTORS), dtype=np.float32))
        theta = float(self._own("rope.freq_base", 10000.0))
        scaling = {
            "rope_type": "llama3",
            "factor": float(stored.max()),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": trained or 8192,
        }
        expected = llama3_divisors(head_dim, theta, scaling)
        if stored.shape != expected.shape or not torch.allclose(stored, expected, rtol=1e-3):
            raise ModelError(f"{self.where}: the factors in {_ROPE_FACTORS} are not Llama 3's")
        return scaling

    def _heads(self) -> int:
        return int(self._own("attention.head_count"))

    def _kv_heads(self) -> int:
        return int(self._own("attention.head_count_kv", self._heads()))

    def _own(self, key: str, *default: Any) -> Any:
        """A metadata value of the architecture; required where no default is given."""
        value = self.value(f"{self.architecture}.{key}", *default)
        if value is None and not default:
            raise self._damaged(f"metadata {self.architecture}.{key} is missing")
        return value

    def _dequantize(self, name: str) -> npt.NDArray[np.float32]:
        from gguf import dequantize

        kind = self._tensors[name].kind
        try:
            values: npt.NDArray[np.float32] = dequantize(self._header.data(name), kind)
        except NotImplementedError as error:
            raise ModelError(
                f"{self.where}: tensor {name!r} is quantised as {kind.name}, which is not supported"
            ) from error
        except _BROKEN as error:
            raise self._damaged(f"tensor {name!r}: {error!r}") from error
        return values

    def _damaged(self, reason: str) -> ModelError:
        return ModelError(f"{self.where}: not a whole GGUF file ({reason}): download it again")


def _unpermute(values: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Rows from llama.cpp's order (pairs adjacent) to Hugging Face's (halves of a head)."""
    rest = values.shape[1:]
    pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, *rest)
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _gguf_name(name: str, in_layer: dict[str, str]) -> str:
    if name in _ENDS:
        return _ENDS[name]
    parts = name.split(".", 3)
    if parts[:2] != ["model", "layers"] or len(parts) < 4:
        return ""
    inner, _, kind = parts[3].rpartition(".")
    return f"blk.{parts[2]}.{in_layer[inner]}.{kind}" if inner in in_layer else ""


def _hf_name(name: str, in_layer: dict[str, str]) -> str | None:
    """None for a tensor that no supported architecture has."""
    for here, there in _ENDS.items():
        if there == name:
            return here
    parts = name.split(".")
    from_gguf = {there: here for here, there in in_layer.items()}
    if parts[0] != "blk" or len(parts) != 4 or parts[2] not in from_gguf:
        return None
    return f"model.layers.{parts[1]}.{from_gguf[parts[2]]}.{parts[3]}"
