"""Shaping on a GPU: the numbers of the host's way, without waiting for the GPU."""

from __future__ import annotations

import pytest
import torch
from tests.shaping_play import Play

from cloverinfer.attention.cuda import missing
from cloverinfer.nodes.device import CudaDevice

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


@pytest.mark.parametrize("seed", range(3))
def test_logits_are_those_of_the_hosts_way(seed: int) -> None:
    device = CudaDevice(torch.device("cuda", 0))
    with torch.inference_mode(), device.use():
        Play(seed, device, "cuda:0").check(60)
