"""The dense half of the Llama family, and the frame that its relatives fill in.

A layer is ``x += o(attention(norm(x)))`` and ``x += down(silu(gate(norm(x))) * up(norm(x)))``.
Weights are fused when they are loaded: q, k and v are one matrix, gate and up another.

The carry is (hidden ``[t, c]``, cos ``[t, 1, d]``, sin ``[t, 1, d]``); after the last stage only
the hidden rows remain. Where the native stages serve the weights' type they pack the weights and
run every call, leaving hidden rows in float32; on a GPU ``cuda_stages.py`` does, with a carry of
its own; else PyTorch's products do, in the weights' type.

Shapes: t tokens, c hidden size, h query heads, n KV heads, d head size, f FFN size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from .arch import kv_specs
from .base import QKV, Carry, DenseHalf, ModelArch, NativeDense, UnrotatedStages, place
from .cuda_kernels import DenseKernels, cuda_serves
from .cuda_stages import CudaStages
from .linear import Linear
from .native import LayerWeights, LlamaTable, ModelWeights, NativeStages, native_serves
from .rope import rope_table
from .weights import Checkpoint


class LlamaHalf(DenseHalf):
    """All weights of a Llama; also of whatever differs from it by the class attributes only."""

    has_out_bias: bool | None = None
    """Whether the output projection has a bias; None: where q, k and v have one."""
    has_qk_norm = False

    def __init__(self, arch: ModelArch, checkpoint: Checkpoint, max_len: int) -> None:
        """Takes ``checkpoint``'s tensors, of its type; ``max_len``: positions to prepare for."""
        self.arch = arch
        self.dtype = checkpoint.dtype
        self.device = checkpoint.device
        self.specs = kv_specs(arch, str(self.dtype).removeprefix("torch."))
        self._rotated = arch.num_heads + arch.num_kv_heads
        self._half = arch.head_dim // 2
        table = rope_table(arch.head_dim, arch.rope_theta, arch.rope_scaling, max_len, self.dtype)
        self._cos, self._sin = (part.to(self.device) for part in table)
        native = native_serves(self.dtype, self.device) and not checkpoint.fp8
        self._packed = not native
        self._weights = self._load(checkpoint)
        self._native: NativeStages | None = None
        if native:
            self._native = NativeStages(
                arch, self._weights, torch.get_num_threads(), int8=checkpoint.int8
            )
            self._weights.layers.clear()  # packed; PyTorch's way is closed from here on
        self._cuda: CudaStages | None = None
        if cuda_serves(self.dtype, self.device):
            kernels = DenseKernels(self.dtype, self.device)
            self._cuda = CudaStages(arch, self._weights, (self._cos, self._sin), kernels)

    def native(self) -> NativeDense | None:
        if self._native is None:
            return None
        return LlamaTable(self._native, (self._cos, self._sin))

    def unrotated(self) -> UnrotatedStages | None:
        return self._cuda

    @property
    def weight_bytes(self) -> int:
        if self._native is not None:
            return self._native.nbytes
        layers = sum(layer.nbytes for layer in self._weights.layers)
        return layers + self._weights.final_norm.nbytes + self._weights.head.nbytes

    def stage(
        self,
        i: int,
        attn_out_the: torch.Tensor | None,
        carry: Carry | None,
        token_ids_t: torch.Tensor | None,
        positions_t: torch.Tensor,
        out: QKV | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, Carry]:
        native = self._native
        if native is not None:
            carry = carry or (None, self._cos[positions_t], self._sin[positions_t])
            return native.stage(i, attn_out_the, carry, token_ids_t, out)
        if self._cuda is not None:
            return self._cuda.stage(i, attn_out_the, carry, token_ids_t, positions_t, out)
        if i == 0:
            assert token_ids_t is not None
            hidden_tc = F.embedding(token_ids_t, self._weights.embedding)
            cos, sin = self._cos[positions_t], self._sin[positions_t]
        else:
            assert attn_out_the is not None
            assert carry is not None
            hidden_tc, cos, sin = carry
            hidden_tc = hidden_tc.to(self.dtype)
            hidden_tc = self._finish(self._weights.layers[i - 1], attn_out_the, hidden_tc)
            if i == len(self._weights.layers):
                return None, None, None, (hidden_tc,)
        qkv = self._attention_inputs(self._weights.layers[i], hidden_tc, cos, sin)
        return *place(qkv, out), (hidden_tc, cos, sin)

    def logits(self, carry: Carry) -> torch.Tensor:
        hidden_tc = carry[0]
        if self._native is not None:
            return self._native.logits(hidden_tc)
        if self._cuda is not None:
            return self._cuda.logits(carry)
        return self._weights.head(
            self._norm(hidden_tc.to(self.dtype), self._weights.final_norm)
        ).float()

    def raw_logits(self, carry: Carry) -> torch.Tensor:
        return self.logits(carry) if self._cuda is None else self._cuda.raw_logits(carry)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        # The variance is taken in float32, whatever the type of x, as transformers does.
        return F.rms_norm(x, weight.shape, weight, self.arch.norm_eps)

    def _finish(
        self, layer: LayerWeights, attn_the: torch.Tensor, hidden_tc: torch.Tensor
    ) -> torch.Tensor:
        """Output projection and FFN, each added to the hidden rows."""
        hidden_tc = layer.out.add(attn_the.reshape(attn_the.shape[0], -1), hidden_tc)
        ffn_tf = layer.gate_up.gated(self._norm(hidden_tc, layer.post_norm))
        return layer.down.add(ffn_tf, hidden_tc)

    def _attention_inputs(
        self, layer: LayerWeights, hidden_tc: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> QKV:
        """q, k and v; queries and keys are rotated in one go."""
        arch = self.arch
        qkv = layer.qkv(self._norm(hidden_tc, layer.input_norm)).view(-1, *self._qkv_shape)
        qk = qkv[:, : self._rotated]
        if layer.qk_norm_hd is not None:
            plain = F.rms_norm(qk, (arch.head_dim,), None, arch.norm_eps)
            qk = plain.mul_(layer.qk_norm_hd)
        qk = qk.mul(cos).add_(qk.roll(self._half, -1).mul_(sin))
        return qk[:, : arch.num_heads], qk[:, arch.num_heads :], qkv[:, self._rotated :]

    def _load(self, checkpoint: Checkpoint) -> ModelWeights:
        arch = self.arch
        self._qkv_shape = (arch.num_heads + 2 * arch.num_kv_heads, arch.head_dim)
        vocab = (arch.vocab_size, arch.hidden_size)
        embedding = checkpoint.get("model.embed_tokens.weight", vocab)
        layers = [self._load_layer(checkpoint, i) for i in range(arch.num_layers)]
        final_norm = checkpoint.get("model.norm.weight", (arch.hidden_size,))
        name = "model.embed_tokens.weight" if arch.tie_embeddings else "lm_head.weight"
        head = embedding if arch.tie_embeddings else checkpoint.get(name, vocab)
        product = checkpoint.product(name, head, self._packed)
        return ModelWeights(embedding, layers, final_norm, product)

    def _load_layer(self, checkpoint: Checkpoint, index: int) -> LayerWeights:
        arch, at = self.arch, f"model.layers.{index}."
        hidden, ffn = (arch.hidden_size,), arch.intermediate_size
        q, kv = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
        bias = arch.attention_bias
        out_bias = bias if self.has_out_bias is None else self.has_out_bias

        def linear(names: dict[str, int], inputs: int, with_bias: bool) -> Linear:
            parts = [(at + name, n) for name, n in names.items()]
            return checkpoint.linear(parts, inputs, with_bias, self._packed)

        qkv = {"self_attn.q_proj": q, "self_attn.k_proj": kv, "self_attn.v_proj": kv}
        gate_up = {"mlp.gate_proj": ffn, "mlp.up_proj": ffn}
        return LayerWeights(
            input_norm=checkpoint.get(at + "input_layernorm.weight", hidden),
            qkv=linear(qkv, arch.hidden_size, bias),
            qk_norm_hd=self._load_qk_norm(checkpoint, at) if self.has_qk_norm else None,
            out=linear({"self_attn.o_proj": arch.hidden_size}, q, out_bias),
            post_norm=checkpoint.get(at + "post_attention_layernorm.weight", hidden),
            gate_up=linear(gate_up, arch.hidden_size, arch.mlp_bias),
            down=linear({"mlp.down_proj": arch.hidden_size}, ffn, arch.mlp_bias),
        )

    def _load_qk_norm(self, checkpoint: Checkpoint, at: str) -> torch.Tensor:
        arch, shape = self.arch, (self.arch.head_dim,)
        q = checkpoint.get(at + "self_attn.q_norm.weight", shape)
        k = checkpoint.get(at + "self_attn.k_norm.weight", shape)
        return torch.cat((q.expand(arch.num_heads, -1), k.expand(arch.num_kv_heads, -1)))
