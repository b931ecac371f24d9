"""Fresh prompts by PyTorch's fused kernels: rows that are whole prompts, where that pays.

It puts those of one length that follow each other into one call, and knows which layers and devices
the kernels serve, and when they pay: cuDNN, the fastest on compute capability 9.0, takes seconds to
load, and long to prepare for each new shape.

Shapes: p prompts, t tokens of each, h query heads, n KV heads, d the key size, e the value size.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ...kvcache.layout import KVSpec
from ..rows import merge_sinks
from .base import DeviceRows, PromptAttention, PromptPool, Span

log = logging.getLogger(__name__)
PROMPT_LEAST = 256
"""Fresh prompts of fewer tokens are left to our kernel."""
SDPA_LEAST = 4096
"""Tokens of a call from which on cuDNN is quicker than our kernel for prompts."""
PREPARE_SECONDS = 0.07
"""What cuDNN takes before its first call of a shape."""
_MOST_SHAPES = 4096
_LOADING = 1024
"""Tokens of the call that loads cuDNN; a call of a few leaves some of it to be loaded."""
_SIZES = (64, 80, 96, 128, 256)
"""Head sizes of our kernels."""


@dataclass(frozen=True)
class Saving:
    """What PyTorch's kernels save against ours."""

    least: int
    """Tokens of a call below which they save nothing."""
    seconds_per_flop: float


_AGAINST_PROMPT_KERNEL = Saving(SDPA_LEAST, 2e-15)
"""175 TFLOP/s against 455 (16 prompts of 1,024 tokens), 440 against 640 (2 of 8,192)."""
_AGAINST_DECODE_KERNEL = Saving(PROMPT_LEAST, 15e-15)
"""60 against 550."""


class Library:
    """What PyTorch's kernels need loaded: cuDNN, seconds of work that no request should wait for.
    It is loaded by a thread beside the steps, from when it is first asked for."""

    def __init__(self, load: Callable[[], None]) -> None:
        self._load = load
        self._loaded = threading.Event()
        self._thread: threading.Thread | None = None

    def loaded(self) -> bool:
        """Never where loading fails, which is logged once."""
        if self._thread is None:
            # The interpreter waits for it at its end: a library must not be left half loaded.
            self._thread = threading.Thread(target=self._run, name="load-sdpa")
            self._thread.start()
        return self._loaded.is_set()

    def _run(self) -> None:
        try:
            self._load()
        except RuntimeError as problem:
            log.warning("PyTorch's kernels for prompts fail, ours are used: %s", problem)
        else:
            self._loaded.set()


class Shapes:
    """When a shape of prompts is worth PyTorch's kernels: from when they would have saved as much
    as it takes to prepare them. So prompts of a length that comes once do not wait for that, and
    those of one that comes again and again wait once."""

    def __init__(self, flops: float, saving: Saving | None, library: Library | None = None) -> None:
        """``flops``: of a step's attention, for each pair of tokens. ``saving`` None: nothing need
        be prepared, or ours is far too slow."""
        self._flops = flops
        self._saving = saving
        self._library = library
        self._saved: dict[tuple[int, int], float] = {}

    def pay(self, prompts: Span) -> bool:
        """Asked once for each step that has them."""
        saving, count, length = self._saving, len(prompts.counts), prompts.lengths[0]
        if saving is None:
            return True
        if count * length < saving.least:
            return False
        saved = self._saved.get((count, length), 0.0)
        if saved >= PREPARE_SECONDS:
            return self._library is None or self._library.loaded()
        if len(self._saved) >= _MOST_SHAPES:
            self._saved.clear()
        more = self._flops * count * length * length / 2 * saving.seconds_per_flop
        self._saved[count, length] = saved + more
        return False


class SdpaPrompts(PromptAttention):
    """What ``auto`` stands for: all other rows are left to our kernels."""

    least = PROMPT_LEAST

    @staticmethod
    def missing() -> str:
        return ""

    def __init__(self, pool: PromptPool) -> None:
        self._pool = pool
        layout, device = pool.layout, pool.memory.device
        self._shapes = shapes_for(layout.specs, pool.num_heads, layout.block_size, device)

    def serves(self, spec: KVSpec) -> bool:
        plain = spec.window is None and spec.softcap is None and spec.alibi_slopes is None
        return plain and spec.dtype != "float32" and spec.k_dim == spec.v_dim

    def spans(self, starts: Sequence[int], lengths: Sequence[int]) -> list[Span]:
        return [some for some in find_prompts(starts, lengths) if self._shapes.pay(some)]

    def attend(
        self, layer: int, span: Span, q_thd: torch.Tensor, rows: DeviceRows
    ) -> tuple[torch.Tensor, torch.Tensor]:
        spec, shape = self._pool.layout.specs[layer], (len(span.counts), span.lengths[0])
        k_pntd, v_pnte, scale = self._pool.keys_values(layer, span, q_thd.dtype, rows)
        q_phtd = q_thd.unflatten(0, shape).transpose(1, 2)
        o_phte, lse_pht = sdpa(q_phtd, k_pntd, v_pnte, scale)
        if spec.v_scale != 1.0:
            o_phte = o_phte * spec.v_scale
        o_the, lse_th = o_phte.transpose(1, 2).flatten(0, 1), lse_pht.mT.flatten(0, 1)
        return merge_sinks(spec, o_the, lse_th)


def find_prompts(starts: Sequence[int], lengths: Sequence[int]) -> list[Span]:
    """Whole prompts; those of one length that follow each other are one span."""
    found: list[Span] = []
    for row, length in enumerate(lengths):
        if not length == starts[row + 1] - starts[row] >= PROMPT_LEAST:
            continue
        last = found[-1] if found else None
        if last and last.lengths[0] == length and last.rows.stop == row:
            both = (*last.lengths, length)
            found[-1] = Span(last.row, last.start, both, both)
        else:
            found.append(Span(row, starts[row], (length,), (length,)))
    return found


def shapes_for(
    specs: Sequence[KVSpec], num_heads: int, block_size: int, device: torch.device
) -> Shapes:
    """Of a pool on that device."""
    flops = 4.0 * num_heads * sum(spec.k_dim for spec in specs)
    if torch.cuda.get_device_capability(device) < (9, 0):
        return Shapes(flops, None)
    if not all(spec.k_dim == spec.v_dim in _SIZES for spec in specs) or block_size % 16:
        return Shapes(flops, None)
    wide = all(spec.dtype in ("bfloat16", "float16") for spec in specs)
    saving = _AGAINST_PROMPT_KERNEL if wide else _AGAINST_DECODE_KERNEL
    return Shapes(flops, saving, Library(lambda: _load_sdpa(specs[0], num_heads, device)))


@torch.inference_mode()
def _load_sdpa(spec: KVSpec, num_heads: int, device: torch.device) -> None:
    """By a first call, on a stream of its own."""
    stream = torch.cuda.Stream(device)
    dtype = torch.float16 if spec.dtype == "float16" else torch.bfloat16
    with torch.cuda.stream(stream):
        q_phtd = torch.zeros(1, num_heads, _LOADING, spec.k_dim, dtype=dtype, device=device)
        k_pntd = q_phtd[:, : spec.kv_heads]
        sdpa(q_phtd, k_pntd, k_pntd, spec.scale)
    stream.synchronize()


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
