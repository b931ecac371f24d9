"""The Llama family's stages on a GPU: products by ``linear.py``, what lies between them by our
kernels.

A stage is products and as few launches between them as there can be: the norm takes the
residual's addition along, rotation and the gate's product are one launch each. All of it can be
captured in a CUDA graph. A product that can take an addition or the gate along says so
(``Linear.fuses_add``, ``Linear.fuses_gate``), and is then left to.

The carry is (hidden rows ``[t, c]``); after the last stage it may have a second part, the last
FFN's output, which ``logits`` adds to them: so that the final norm is one launch too, of the
selected rows alone. Shapes as in ``llama.py``.
"""

from __future__ import annotations

import torch

from ..attention.base import FusedRows
from .base import QKV, Carry, ModelArch, UnrotatedStages
from .cuda_kernels import DenseKernels
from .linear import Linear
from .native import ModelWeights


class CudaStages(UnrotatedStages):
    """``DenseHalf.stage`` and ``logits`` of ``weights``, which it reads where they are.

    ``rope``: cos and sin by position, ``[p, 1, d]``. ``kernels``: for the weights' type and device.
    """

    def __init__(
        self,
        arch: ModelArch,
        weights: ModelWeights,
        rope: tuple[torch.Tensor, torch.Tensor],
        kernels: DenseKernels,
    ) -> None:
        self._weights, self._rope, self._eps = weights, rope, arch.norm_eps
        self._kernels = kernels
        self._shape = (arch.num_heads + 2 * arch.num_kv_heads, arch.head_dim)
        self._kv_heads = arch.num_kv_heads

    def stage(
        self,
        i: int,
        attn_out_the: torch.Tensor | None,
        carry: Carry | None,
        token_ids_t: torch.Tensor | None,
        positions_t: torch.Tensor,
        out: QKV | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, Carry]:
        if i == len(self._weights.layers):
            assert attn_out_the is not None
            assert carry is not None
            down, x_tf, hidden_tc = self._up_to_down(i - 1, attn_out_the, carry[0])
            if down.fuses_add(x_tf.shape[0]):
                return None, None, None, (down.add(x_tf, hidden_tc),)
            return None, None, None, (hidden_tc, down(x_tf))
        rows, carry = self.stage_unrotated(i, attn_out_the, carry, token_ids_t, positions_t)
        parts = out or rows.parts  # they may stay where the product wrote them
        self._kernels.rotate(rows.qkv_thd, parts, positions_t, self._rope, rows.norm_hd, self._eps)
        return *parts, carry

    def stage_unrotated(
        self,
        i: int,
        attn_out_the: torch.Tensor | None,
        carry: Carry | None,
        token_ids_t: torch.Tensor | None,
        positions_t: torch.Tensor,
    ) -> tuple[FusedRows, Carry]:
        layer = self._weights.layers[i]
        if i == 0:
            assert token_ids_t is not None
            hidden_tc, x_tc = self._kernels.embed_norm(
                self._weights.embedding, token_ids_t, layer.input_norm, self._eps
            )
        else:
            assert attn_out_the is not None
            assert carry is not None
            down, x_tf, hidden_tc = self._up_to_down(i - 1, attn_out_the, carry[0])
            hidden_tc, x_tc = self._add_norm(down, x_tf, hidden_tc, layer.input_norm)
        qkv_thd = layer.qkv(x_tc).view(-1, *self._shape)
        rows = FusedRows(
            qkv_thd, self._kv_heads, positions_t, self._rope, layer.qk_norm_hd, self._eps
        )
        return rows, (hidden_tc,)

    def logits(self, carry: Carry) -> torch.Tensor:
        """``[t, vocab]`` float32."""
        return self.raw_logits(carry).float()

    def raw_logits(self, carry: Carry) -> torch.Tensor:
        """``[t, vocab]`` in the weights' type, as the product gives them."""
        weight = self._weights.final_norm
        if len(carry) == 2:
            x_tc = self._kernels.add_norm(*carry, weight, self._eps)[1]
        else:
            x_tc = self._kernels.norm(carry[0], weight, self._eps)
        return self._weights.head(x_tc)

    def _up_to_down(
        self, index: int, attn_out_the: torch.Tensor, hidden_tc: torch.Tensor
    ) -> tuple[Linear, torch.Tensor, torch.Tensor]:
        """The layer's last product, what it is to take, and the hidden rows it adds to."""
        layer = self._weights.layers[index]
        attended = attn_out_the.reshape(attn_out_the.shape[0], -1)
        hidden_tc, x_tc = self._add_norm(layer.out, attended, hidden_tc, layer.post_norm)
        if layer.gate_up.fuses_gate(x_tc.shape[0]):
            return layer.down, layer.gate_up.gated(x_tc), hidden_tc
        return layer.down, self._kernels.gate(layer.gate_up(x_tc)), hidden_tc

    def _add_norm(
        self, linear: Linear, x: torch.Tensor, hidden_tc: torch.Tensor, norm_c: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The hidden rows with the product added, and their norm."""
        if linear.fuses_add(x.shape[0]):
            hidden_tc = linear.add(x, hidden_tc)
            return hidden_tc, self._kernels.norm(hidden_tc, norm_c, self._eps)
        return self._kernels.add_norm(hidden_tc, linear(x), norm_c, self._eps)
