"""Fresh prompts on a GPU: rows that are whole prompts, which PyTorch's fused kernels attend over.

It finds them from what the host knows of a step, puts those of one length that follow each other
into one call, and knows which layers and devices the kernels serve.

Shapes: p prompts, t tokens of each, h query heads, n KV heads, d the key size, e the value size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..kvcache.layout import KVSpec

PROMPT_LEAST = 256
"""Fresh prompts of fewer tokens are left to our kernel."""


@dataclass(frozen=True)
class Prompts:
    """Fresh prompts of one length, one after the other."""

    row: int
    """The first one's."""
    count: int
    start: int
    """Its first token's index in the step."""
    length: int

    @property
    def end(self) -> int:
        return self.start + self.count * self.length


@dataclass(frozen=True)
class Planned:
    """What the host knew of a step before its layers."""

    lengths_r: torch.Tensor
    """The step's, on the device, by which its calls are known."""
    prompts: list[Prompts]
    rest_r: torch.Tensor
    """``lengths_r`` with 0 for the prompts."""
    all_prompts: bool
    """There are no other rows."""


def find_prompts(starts: Sequence[int], lengths: Sequence[int]) -> list[Prompts]:
    found: list[Prompts] = []
    for row, length in enumerate(lengths):
        if not length == starts[row + 1] - starts[row] >= PROMPT_LEAST:
            continue
        last = found[-1] if found else None
        if last and last.length == length and last.row + last.count == row:
            found[-1] = Prompts(last.row, last.count + 1, last.start, length)
        else:
            found.append(Prompts(row, 1, starts[row], length))
    return found


def plan_prompts(
    starts: Sequence[int], lengths: Sequence[int], lengths_r: torch.Tensor
) -> Planned | None:
    """None where there are no fresh prompts. ``lengths_r``: the same as ``lengths``."""
    prompts = find_prompts(starts, lengths)
    if not prompts:
        return None
    count = sum(some.count for some in prompts)
    rest = lengths_r
    if count < len(lengths):
        rest = lengths_r.clone()
        for some in prompts:
            rest[some.row : some.row + some.count] = 0
    return Planned(lengths_r, prompts, rest, count == len(lengths))


def sdpa_serves(spec: KVSpec, stored: torch.dtype) -> bool:
    plain = spec.window is None and spec.softcap is None and spec.alibi_slopes is None
    return plain and stored != torch.float32 and spec.k_dim == spec.v_dim


def sdpa(
    q_phtd: torch.Tensor, k_pntd: torch.Tensor, v_pnte: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal ``o`` and ``lse [p, h, t]``: the kernels behind ``F.scaled_dot_product_attention``
    that also give lse.
    """
    if torch.cuda.get_device_capability(q_phtd.device) >= (9, 0) and q_phtd.shape[3] <= 128:
        cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q_phtd, k_pntd, v_pnte, None, True, 0.0, True, scale=scale
        )
        return cudnn[0], cudnn[1].reshape(q_phtd.shape[:3])
    flash = torch.ops.aten._scaled_dot_product_flash_attention(
        q_phtd, k_pntd, v_pnte, 0.0, True, scale=scale
    )
    return flash[0], flash[1]
