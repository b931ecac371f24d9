"""What the dense half's GPU kernels compute, by PyTorch in float64 and on any device."""

from __future__ import annotations

import torch

from cloverinfer.models.base import QKV


class TwinKernels:
    """``DenseKernels``' methods; results are of the type of what they are given."""

    def norm(self, x_tc: torch.Tensor, weight_c: torch.Tensor, eps: float) -> torch.Tensor:
        x = x_tc.double()
        factor = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
        return (x * factor * weight_c.double()).to(x_tc.dtype)

    def add_norm(
        self, hidden_tc: torch.Tensor, added_tc: torch.Tensor, weight_c: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden_tc = hidden_tc + added_tc
        return hidden_tc, self.norm(hidden_tc, weight_c, eps)

    def embed_norm(
        self, table_xc: torch.Tensor, ids_t: torch.Tensor, weight_c: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        known = (ids_t >= 0) & (ids_t < table_xc.shape[0])
        rows_tc = table_xc[ids_t.where(known, 0)] * known[:, None]
        return rows_tc, self.norm(rows_tc, weight_c, eps)

    def gate(self, gate_up_t2f: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up_t2f.double().chunk(2, -1)
        return (torch.nn.functional.silu(gate) * up).to(gate_up_t2f.dtype)

    def rotate(
        self,
        qkv_thd: torch.Tensor,
        parts: QKV,
        positions_t: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        norm_hd: torch.Tensor | None = None,
        eps: float = 0.0,
    ) -> None:
        q, k, v = parts
        rotated = q.shape[1] + k.shape[1]
        qk, values = qkv_thd[:, :rotated].double(), qkv_thd[:, rotated:].clone()
        if norm_hd is not None:
            qk = qk * (qk.square().mean(-1, keepdim=True) + eps).rsqrt() * norm_hd.double()
        cos, sin = (part[positions_t.clamp(0, part.shape[0] - 1)].double() for part in rope)
        qk = qk * cos + qk.roll(q.shape[2] // 2, -1) * sin
        q.copy_(qk[:, : q.shape[1]])
        k.copy_(qk[:, q.shape[1] :])
        v.copy_(values)
