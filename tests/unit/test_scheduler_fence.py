"""Blocks that a writer may still reach stay taken until their home has fenced it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cloverinfer.core.request import RequestState
from cloverinfer.wire.messages import ExpectTransfer, Fence, Fenced

sys.path.insert(0, str(Path(__file__).parent))
from test_scheduler_fakes import Cluster
from test_scheduler_rules import (
    cluster,
    everything_free,
    finish_step,
    prompt,
    start,
    transferred,
)
from tests.scheduler_kit import make_request

S = RequestState


def half_transferred(c: Cluster) -> list[int]:
    """Two chunks of a prompt of three on the first prefill node, one of them computed and put: the
    blocks at home."""
    start(c, make_request(0, prompt(9)))
    finish_step(c, "prefill-0")
    c.schedule()
    expect = next(m for _, m in c.sent if isinstance(m, ExpectTransfer))
    return list(expect.blocks)


def fences(c: Cluster) -> list[tuple[str, Fence]]:
    return [(name, m) for name, m in c.schedule() if isinstance(m, Fence)]


@pytest.mark.parametrize("topology", ["pd", "pda"])
def test_blocks_of_a_dead_writer_wait_for_its_fence(topology: str) -> None:
    c = cluster(topology, 5, {"prefills": 2, "prefill_blocks": 40}, max_num_batched_tokens=4)
    blocks = half_transferred(c)
    home = c.scheduler._state.homes[0].name
    c.kill("prefill-0")
    assert c.scheduler.drain_finished() == [c.requests[0]]
    assert c.scheduler.free_blocks()[home] == 5 - len(blocks)
    ((where, fence),) = fences(c)
    assert (where, fence.writer) == (home, "prefill-0")
    # Another that needs them waits, as long as the fence may take.
    start(c, make_request(1, prompt(11), max_tokens=2, ignore_eos=True))
    assert c.scheduler.num_waiting == 1
    assert c.scheduler.next_deadline() == c.config.step_timeout
    while c.late:
        c.land(*c.late.pop())
    c.deliver(Fenced(home, fence.number - 1))
    assert c.scheduler.free_blocks()[home] == 5 - len(blocks)
    c.deliver(Fenced(home, fence.number))
    assert c.scheduler.free_blocks()[home] == 5
    c.schedule()
    assert c.scheduler.num_waiting == 0
    c.run()
    assert c.requests[1].state is S.FINISHED


def test_an_aborted_request_s_blocks_wait_for_the_fence_of_its_writer_too() -> None:
    c = cluster("pda", nodes={"prefills": 2}, max_num_batched_tokens=4)
    half_transferred(c)
    c.scheduler.abort(0, c.now)
    c.kill("prefill-0")
    ((home, fence),) = fences(c)
    assert not everything_free(c)
    c.deliver(Fenced(home, fence.number))
    assert everything_free(c)


def test_a_receiver_that_dies_too_gives_its_blocks_back() -> None:
    c = cluster("pda", nodes={"prefills": 2, "homes": 2}, max_num_batched_tokens=4)
    half_transferred(c)
    c.kill("prefill-0")
    ((home, _),) = fences(c)
    c.kill(home)
    assert everything_free(c)
    assert fences(c) == []


def test_blocks_that_a_cut_writer_may_reach_wait_for_its_fence() -> None:
    c = cluster("pda", nodes={"homes": 2}, max_num_batched_tokens=4)
    half_transferred(c)
    home = next(name for name, m in c.sent if isinstance(m, ExpectTransfer))
    c.fail_step("prefill-0", 0, cut=(home,))
    c.deliver(c.reports.pop())
    assert c.requests[0].state is S.FAILED
    ((where, fence),) = fences(c)
    assert (where, fence.writer) == (home, "prefill-0")
    assert not everything_free(c)
    c.deliver(Fenced(home, fence.number))
    assert everything_free(c)


def test_nothing_waits_for_a_dead_writer_whose_transfer_is_whole() -> None:
    c = cluster("pda", nodes={"prefills": 2})
    start(c, make_request(0, prompt(9)))
    c.computing.remove(("prefill-0", 0))
    c.compute("prefill-0", 0)
    transferred(c)
    c.kill("prefill-0")
    assert fences(c) == []
    assert everything_free(c)
