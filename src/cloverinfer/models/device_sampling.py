"""Chooses tokens on a GPU: the draw of ``sampling.py``, without a round trip to the host.

A row's parameters are numbers, known before its logits are: its uniform number follows from the
seed and the position. Nothing is allocated by what the numbers are and nothing waits, so a call
can be captured in a CUDA graph, whose replays read the numbers anew.

Tokens are those of ``sampling.sample``, but where a draw falls within rounding of the boundary
between two tokens: both add up in float64, in different orders.

Shapes: r rows, c vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .. import _native
from .cuda_kernels import CODES

DRAW_DTYPES = {
    "temperature": torch.float64,
    "top_k": torch.int64,
    "top_p": torch.float64,
    "min_p": torch.float64,
    "uniform": torch.float64,
}
"""What a draw is made of, ``[r]`` each. ``uniform``: ``sampling.uniform`` of seed and position; the
others as in ``Sampling``, and of no account where the temperature is 0."""


class DeviceSampler:
    """On one device; it holds nothing else. ``clusters`` False: a block alone has each row, as on
    devices without clusters, for tests."""

    def __init__(self, device: torch.device, clusters: bool = True) -> None:
        assert device.type == "cuda"
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)
        self._native = _native.CudaDense(device=index, clusters=clusters)

    def __call__(
        self, logits_rc: torch.Tensor, draws: Mapping[str, torch.Tensor], out_r: torch.Tensor
    ) -> None:
        """Writes a token of each row of ``logits_rc`` (float32, bfloat16 or float16; rows may have
        a stride) to ``out_r`` (int64): ``NO_TOKEN`` where the row's largest logit is no finite
        number. ``draws``: tensors by the names of ``DRAW_DTYPES``, among others; their first r
        numbers count.
        """
        rows, columns = logits_rc.shape
        assert logits_rc.device == self._device
        assert logits_rc.dtype in CODES
        assert logits_rc.stride(1) == 1
        self._check(out_r, torch.int64, rows)
        for name, dtype in DRAW_DTYPES.items():
            self._check(draws[name], dtype, rows)
        if not rows:
            return
        self._native.sample(
            torch.cuda.current_stream(self._device).cuda_stream,
            CODES[logits_rc.dtype],
            rows,
            columns,
            logits_rc.data_ptr(),
            logits_rc.stride(0),
            *(draws[name].data_ptr() for name in DRAW_DTYPES),
            out_r.data_ptr(),
        )

    def _check(self, x: torch.Tensor, dtype: torch.dtype, rows: int) -> None:
        assert x.dtype == dtype
        assert x.device == self._device
        assert x.ndim == 1
        assert x.shape[0] >= rows
        assert x.is_contiguous()
