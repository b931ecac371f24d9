"""What a device keeps of its rows shapes logits to the very numbers that the host's way gives."""

from __future__ import annotations

import torch
from tests.device_kit import HostDevice
from tests.shaping_play import SEATS, VOCAB, Play

from cloverinfer.nodes.device_shaping import DeviceShaping
from cloverinfer.nodes.rows import RowTable
from cloverinfer.wire.messages import Join, Sampling, Shaping, StepPlan


def test_logits_are_those_of_the_hosts_way() -> None:
    with torch.inference_mode():
        for seed in range(4):
            Play(seed, HostDevice()).check(60)


def test_words_that_end_alike_are_all_looked_for() -> None:
    there, rows = DeviceShaping(HostDevice(), SEATS), RowTable(4, True, on_device=True)
    shaping = Shaping(num_prompt=1, bad_words=[[1, 2, 7], [3, 7], [2, 7]])
    joins = [Join(1, 0, [9, 1, 2], 0, [0], Sampling(0, 0, 1, 0, shaping=shaping))]
    plan = StepPlan(0, 0, [1], [2], [1], [True], joins, [], [])
    rows.apply(plan)
    batch = rows.batch(plan)
    there.tell(batch, VOCAB)
    shaped = there.shape(batch, torch.zeros((1, VOCAB)))
    assert shaped[0, 7] == -torch.inf
    assert shaped.isinf().sum() == 1
