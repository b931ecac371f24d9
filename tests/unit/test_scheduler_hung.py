"""A node that stands still: who finds it, when it is ended, and what waits for its end."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from cloverinfer.core.errors import NodeDiedError
from cloverinfer.core.request import RequestState
from cloverinfer.scheduler import HungNode
from cloverinfer.wire.messages import Alive, Fence, Fenced, Probe

sys.path.insert(0, str(Path(__file__).parent))
from test_scheduler_fakes import Cluster
from test_scheduler_fence import fences, half_transferred
from test_scheduler_random import TOPOLOGIES, build, play
from test_scheduler_rules import cluster, everything_free, finish_step, prompt, start, transferred
from tests.scheduler_kit import make_request

S = RequestState
T = 5.0


def probes(c: Cluster) -> list[tuple[str, int]]:
    return [(name, m.number) for name, m in c.schedule() if isinstance(m, Probe)]


def expire(c: Cluster, now: float) -> list[HungNode]:
    c.now = now
    hung = c.scheduler.expire(now)
    c.scheduler.check_integrity()
    return hung


def test_a_node_that_does_not_answer_is_found_after_two_timeouts() -> None:
    c = cluster("pd", step_timeout=T)
    start(c, make_request(0, prompt(4)))
    c.hang("prefill-0")
    assert expire(c, T) == []
    assert probes(c) == [("prefill-0", 1), ("decode-0", 1)]
    assert c.scheduler.next_deadline() == 2 * T
    c.deliver(c.reports.pop())  # the decode node's answer
    assert expire(c, 2 * T - 0.1) == []
    hung = [HungNode("prefill-0", "it has not answered for 5 s")]
    assert expire(c, 2 * T) == hung
    assert expire(c, 2 * T) == hung, "until it is told that the node is dead"
    c.scheduler.on_node_died("prefill-0", "hung", c.now, gone=False)
    assert expire(c, 2 * T) == []


def test_a_node_that_was_only_slow_serves_on() -> None:
    c = cluster("pd", step_timeout=T)
    start(c, make_request(0, prompt(4)))
    c.hang("prefill-0")
    expire(c, T)
    c.schedule()
    c.wake("prefill-0")
    c.deliver(Alive("prefill-0", 0))  # of another probe
    assert c.scheduler._state.nodes["prefill-0"].probed_until is not None
    c.now = 1.5 * T
    c.run()
    assert everything_free(c)
    start(c, make_request(1, prompt(4), ignore_eos=True))
    c.run()
    assert c.requests[1].state is S.FINISHED


def test_not_the_dense_node_is_ended_but_the_attention_node_that_it_waits_for() -> None:
    c = cluster("pda", nodes={"homes": 2}, step_timeout=T)
    start(c, make_request(0, prompt(4), ignore_eos=True))
    home = next(name for name in c.nodes if c.scheduler._state.nodes[name].homed)
    while not c.requests[0].output_token_ids or not c.computing:
        c.step()
    c.hang(home)
    at = c.now
    expire(c, at + T)
    assert {name for name, _ in probes(c)} == {"dense-0", home}
    c.deliver(Alive("dense-0", 1))
    c.expire()
    assert c.ending == [home]


def test_a_node_that_answers_while_its_step_does_not_end_is_ended_by_the_third_timeout() -> None:
    c = cluster("colocated", step_timeout=T)
    start(c, make_request(0, prompt(4)))
    expire(c, T)
    c.schedule()
    c.deliver(c.reports.pop())
    assert expire(c, 2 * T) == []
    (hung,) = expire(c, 3 * T)
    assert (hung.name, hung.reason) == (
        "colocated-0",
        "it answers, but its step has not ended for 15 s",
    )


def test_late_transfers_and_fences_probe_their_receiver() -> None:
    c = cluster("pda", nodes={"homes": 2}, step_timeout=T, transfer_timeout=7.0)
    start(c, make_request(0, prompt(4), ignore_eos=True))
    finish_step(c, "prefill-0")
    home = next(name for name in c.nodes if c.scheduler._state.nodes[name].homed)
    expire(c, 7.0)
    assert probes(c) == [(home, 1)]
    assert [one.name for one in expire(c, 7.0 + T)] == [home]


@pytest.mark.parametrize("topology", ["pd", "pda"])
def test_no_fence_is_asked_for_before_a_hung_writer_is_gone(topology: str) -> None:
    c = cluster(topology, 5, {"prefills": 2, "prefill_blocks": 40}, max_num_batched_tokens=4,
                step_timeout=T)  # fmt: skip
    blocks = half_transferred(c)
    home = c.scheduler._state.homes[0].name
    c.hang("prefill-0")
    expire(c, T)
    c.schedule()
    c.scheduler.on_alive(Alive(home, 1))
    c.expire()
    assert c.ending == ["prefill-0"]
    assert c.requests[0].state is S.FAILED
    assert fences(c) == []
    start(c, make_request(1, prompt(11), max_tokens=2, ignore_eos=True))
    assert c.scheduler.num_waiting == 1
    while c.late:  # it still writes
        c.land(*c.late.pop())
    c.ending.remove("prefill-0")
    c.be_gone("prefill-0")
    ((where, fence),) = fences(c)
    assert (where, fence.writer) == (home, "prefill-0")
    assert c.scheduler.free_blocks()[home] == 5 - len(blocks)
    c.be_gone("prefill-0")
    assert fences(c) == [], "asked for once"
    c.run()
    assert c.requests[1].state is S.FINISHED
    assert everything_free(c)


def test_only_who_was_in_the_step_of_a_hung_node_fails_where_others_serve() -> None:
    c = cluster("pda", nodes={"prefills": 2}, max_num_batched_tokens=4, step_timeout=T)
    start(c, *(make_request(i, prompt(4, i), max_tokens=2, ignore_eos=True) for i in range(6)))
    c.hang("prefill-0")
    stuck = c.nodes["prefill-0"].busy[0].rows
    assert len(stuck) == 1
    while c.able() or c.reports:
        c.step()
    expire(c, T)
    c.run()
    c.check_end()
    failed = [n for n, request in c.requests.items() if request.state is S.FAILED]
    assert failed == stuck
    assert c.requests[failed[0]].error == "step 0 on prefill-0 took more than 5 s"
    assert c.num_ended == 1


def lose_blocks(c: Cluster) -> str:
    """Blocks of a home whose fence does not come."""
    half_transferred(c)
    c.kill("prefill-0")
    ((home, _),) = fences(c)
    c.fencing.clear()
    return home


def test_requests_that_lost_blocks_leave_no_room_for_fail_in_time() -> None:
    c = cluster("pda", 5, {"prefills": 2, "prefill_blocks": 40}, max_num_batched_tokens=4,
                step_timeout=T)  # fmt: skip
    home = lose_blocks(c)
    start(c, make_request(1, prompt(11), max_tokens=2))
    start(c, make_request(2, prompt(3), max_tokens=2, ignore_eos=True))
    assert c.scheduler.num_waiting == 2, "the first to come is served first"
    assert c.scheduler.next_deadline() == T
    expire(c, T)
    error = c.requests[1].error
    assert error is not None
    assert f"3 of 5 blocks of {home} stay taken, since prefill-0 may still write" in error
    with pytest.raises(NodeDiedError, match="3 of 5 blocks"):
        c.add(make_request(3, prompt(11), max_tokens=2))
    c.run()
    assert c.requests[2].state is S.FINISHED
    assert c.num_ended == 0, "the home answers"
    c.deliver(Fenced(home, next(m.number for _, m in c.sent if isinstance(m, Fence))))
    assert everything_free(c)
    start(c, make_request(4, prompt(11), max_tokens=2, ignore_eos=True))
    c.run()
    assert c.requests[4].state is S.FINISHED


def test_a_request_that_outgrows_what_is_left_fails_instead_of_waiting() -> None:
    c = cluster("pda", 5, {"prefills": 2, "prefill_blocks": 40}, max_num_batched_tokens=4,
                step_timeout=T)  # fmt: skip
    # Admitted, and decoding, before the others are lost.
    request = make_request(9, prompt(3), max_tokens=14, ignore_eos=True)
    start(c, request)
    finish_step(c, "prefill-0")
    transferred(c)
    c.schedule()
    lose_blocks(c)
    c.run()
    c.ended += c.scheduler.drain_finished()
    assert request.state is S.FAILED
    assert request.error is not None
    assert "may still write" in request.error
    assert request.num_tokens == 2 * 4 + 1


def test_a_place_in_the_queue_has_a_deadline_where_asked_for() -> None:
    c = cluster("colocated", max_num_seqs=1, queue_timeout=2.0)
    start(c, *(make_request(i, prompt(3), ignore_eos=True) for i in range(3)))
    c.now = 1.0
    c.add(make_request(3, prompt(3)))
    assert c.scheduler.next_deadline() == 2.0
    expire(c, 2.0)
    assert [request.number for request in c.scheduler.drain_finished()] == [1, 2]
    assert c.requests[1].error == "no place within 2 s (queue_timeout)"
    assert c.requests[1].error_code == "queue_timeout"
    assert c.scheduler.next_deadline() == 3.0
    finish_step(c, "colocated-0")
    c.scheduler.abort(0, c.now)
    c.schedule()
    assert c.scheduler.num_waiting == 0
    assert c.scheduler.next_deadline() == 2.0 + c.config.step_timeout


def test_without_one_it_has_none() -> None:
    c = cluster("colocated", max_num_seqs=1)
    start(c, *(make_request(i, prompt(3), ignore_eos=True) for i in range(2)))
    expire(c, 200.0)
    assert c.scheduler.num_waiting == 1


def test_the_histories_hang_and_wake() -> None:
    """The random tests are worth something only if what they are about happens in them."""
    ended = woken = 0
    for seed in range(40):
        rng = random.Random(seed)
        c = build(TOPOLOGIES[seed % 3], rng)
        wake = c.wake

        def count(name: str, wake=wake) -> None:  # type: ignore[no-untyped-def]
            nonlocal woken
            woken += 1
            wake(name)

        c.wake = count  # type: ignore[method-assign]
        play(c, rng, count=12, faults=True)
        c.run()
        c.check_end()
        ended += c.num_ended
    assert ended > 10
    assert woken > 10
