"""The dense half of OPT: learned positions, layer norms, ReLU, biases, norms before or after.

The carry is (hidden ``[t, c]``,): positions are added once, with the embedding.

Shapes: t tokens, c hidden size, h heads, d head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from ..core.errors import ModelError
from .arch import kv_specs
from .base import QKV, Carry, DenseHalf, ModelArch, place
from .linear import Linear, make_linear
from .weights import Checkpoint

POSITION_OFFSET = 2
"""The first rows of OPT's position table are never used: position p is row p + 2."""
_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"relu": F.relu, "gelu": F.gelu}
_EPS = 1e-5
"""OPT's layer norms keep PyTorch's default."""


@dataclass
class _Norm:
    size: int
    weight: torch.Tensor | None
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (self.size,), self.weight, self.bias, _EPS)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.weight, self.bias) if t is not None)


@dataclass
class _Layer:
    attention_norm: _Norm
    qkv: Linear
    out: Linear
    final_norm: _Norm
    fc1: Linear
    fc2: Linear

    @property
    def nbytes(self) -> int:
        parts = (self.attention_norm, self.qkv, self.out, self.final_norm, self.fc1, self.fc2)
        return sum(part.nbytes for part in parts)


class OPTHalf(DenseHalf):
    """All weights of an OPT."""

    def __init__(self, arch: ModelArch, checkpoint: Checkpoint, max_len: int) -> None:
        """Takes ``checkpoint``'s tensors; ``max_len`` is bound by the table of positions."""
        if arch.hidden_act not in _ACTIVATIONS:
            known = ", ".join(_ACTIVATIONS)
            raise ModelError(
                f"activation_function {arch.hidden_act!r} is not supported in OPT; "
                f"supported: {known}"
            )
        assert max_len <= arch.max_position
        self.arch = arch
        self.dtype = checkpoint.dtype
        self.device = checkpoint.device
        self.specs = kv_specs(arch, str(self.dtype).removeprefix("torch."))
        self._before = arch.extra["do_layer_norm_before"]
        self._activation = _ACTIVATIONS[arch.hidden_act]
        self._load(checkpoint)

    @property
    def weight_bytes(self) -> int:
        ends = (self._project_in, self._project_out, self._final_norm, self._head)
        return sum(part.nbytes for part in (*self._layers, *ends) if part is not None)

    def stage(
        self,
        i: int,
        attn_out_the: torch.Tensor | None,
        carry: Carry | None,
        token_ids_t: torch.Tensor | None,
        positions_t: torch.Tensor,
        out: QKV | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, Carry]:
        if i == 0:
            assert token_ids_t is not None
            hidden_tc = self._embed(token_ids_t, positions_t)
        else:
            assert attn_out_the is not None
            assert carry is not None
            hidden_tc = self._finish(self._layers[i - 1], attn_out_the, carry[0])
            if i == len(self._layers):
                return None, None, None, (hidden_tc,)
        layer, arch = self._layers[i], self.arch
        x = layer.attention_norm(hidden_tc) if self._before else hidden_tc
        qkv = layer.qkv(x).view(-1, 3, arch.num_heads, arch.head_dim)
        return *place((qkv[:, 0], qkv[:, 1], qkv[:, 2]), out), (hidden_tc,)

    def logits(self, carry: Carry) -> torch.Tensor:
        (hidden_tc,) = carry
        if self._final_norm is not None:
            hidden_tc = self._final_norm(hidden_tc)
        if self._project_out is not None:
            hidden_tc = self._project_out(hidden_tc)
        return self._head(hidden_tc).float()

    def _embed(self, token_ids_t: torch.Tensor, positions_t: torch.Tensor) -> torch.Tensor:
        embedded = F.embedding(token_ids_t, self._embedding)
        if self._project_in is not None:
            embedded = self._project_in(embedded)
        return embedded + F.embedding(positions_t, self._positions)

    def _finish(
        self, layer: _Layer, attn_the: torch.Tensor, hidden_tc: torch.Tensor
    ) -> torch.Tensor:
        """Output projection and FFN; each norm stands before its block, or after the addition."""
        hidden_tc = layer.out.add(attn_the.reshape(attn_the.shape[0], -1), hidden_tc)
        if self._before:
            x = self._activation(layer.fc1(layer.final_norm(hidden_tc)))
            return layer.fc2.add(x, hidden_tc)
        hidden_tc = layer.attention_norm(hidden_tc)
        x = self._activation(layer.fc1(hidden_tc))
        return layer.final_norm(layer.fc2.add(x, hidden_tc))

    def _load(self, checkpoint: Checkpoint) -> None:
        arch, at = self.arch, "model.decoder."
        hidden, inner = arch.hidden_size, arch.extra["word_embed_proj_dim"]
        vocab = (arch.vocab_size, inner)
        self._embedding = checkpoint.get(at + "embed_tokens.weight", vocab)
        rows = (arch.max_position + POSITION_OFFSET, hidden)
        self._positions = checkpoint.get(at + "embed_positions.weight", rows)[POSITION_OFFSET:]
        self._project_in = self._project_out = None
        if inner != hidden:
            self._project_in = checkpoint.linear([(at + "project_in", hidden)], inner, False)
            self._project_out = checkpoint.linear([(at + "project_out", inner)], hidden, False)
        self._layers = [self._load_layer(checkpoint, i) for i in range(arch.num_layers)]
        final = arch.extra["final_layer_norm"]
        self._final_norm = self._norm(checkpoint, at + "final_layer_norm") if final else None
        tied = arch.tie_embeddings
        self._head = make_linear(
            self._embedding if tied else checkpoint.get("lm_head.weight", vocab),
            batch_invariant=checkpoint.batch_invariant,
        )

    def _load_layer(self, checkpoint: Checkpoint, index: int) -> _Layer:
        arch, at = self.arch, f"model.decoder.layers.{index}."
        hidden, ffn, bias = arch.hidden_size, arch.intermediate_size, arch.mlp_bias
        qkv = [(f"{at}self_attn.{name}_proj", hidden) for name in "qkv"]
        return _Layer(
            attention_norm=self._norm(checkpoint, at + "self_attn_layer_norm"),
            qkv=checkpoint.linear(qkv, hidden, bias),
            out=checkpoint.linear([(at + "self_attn.out_proj", hidden)], hidden, bias),
            final_norm=self._norm(checkpoint, at + "final_layer_norm"),
            fc1=checkpoint.linear([(at + "fc1", ffn)], hidden, bias),
            fc2=checkpoint.linear([(at + "fc2", hidden)], ffn, bias),
        )

    def _norm(self, checkpoint: Checkpoint, name: str) -> _Norm:
        size = self.arch.hidden_size
        if not self.arch.extra["layer_norm_affine"]:
            return _Norm(size, None, None)
        return _Norm(
            size,
            checkpoint.get(name + ".weight", (size,)),
            checkpoint.get(name + ".bias", (size,)),
        )
