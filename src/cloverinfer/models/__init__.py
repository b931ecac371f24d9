"""Models as dense halves: configurations, weights, tokenizers, sampling. No KV cache lives here."""

from .arch import kv_specs
from .base import Carry, DenseHalf, ModelArch
from .resolve import ResolvedModel, load_half, load_tokenizer, resolve_model
from .sampling import sample
from .size import estimated_weights
from .tokenizer import IncrementalDetokenizer, Tokenizer

__all__ = [
    "Carry",
    "DenseHalf",
    "IncrementalDetokenizer",
    "ModelArch",
    "ResolvedModel",
    "Tokenizer",
    "estimated_weights",
    "kv_specs",
    "load_half",
    "load_tokenizer",
    "resolve_model",
    "sample",
]
