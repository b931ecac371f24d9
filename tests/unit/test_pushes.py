"""The puts of a step: made in order beside computing, ended before the step is reported."""

import threading

import numpy as np
import pytest

from cloverinfer.core.errors import TransportError
from cloverinfer.nodes.pushes import PushJob, Sender, StepPushes, plan_push
from cloverinfer.nodes.rows import Row
from cloverinfer.transport.base import Ticket
from cloverinfer.wire.messages import Push, Sampling

GREEDY = Sampling(0.0, 0, 1.0, 0)


class Pusher:
    """Hands out tickets that end when the test says so."""

    def __init__(self, name, fails_at=None, largest=100):
        self.name = name
        self.largest = largest
        self.fails_at = fails_at
        self.seen = []
        self.tickets = []

    def announce(self, job):
        self.seen.append("chunk")

    def put_layers(self, job, layers, ready, track):
        for layer in layers:
            self.put_layer(job, layer, track)

    def put_layer(self, job, layer, track):
        if layer == self.fails_at:
            raise TransportError("cut")
        self.seen.append(layer)
        self.tickets.append(Ticket())
        track(self.tickets[-1], 10)


def job(pusher):
    return PushJob(pusher, None, 0, 0, np.zeros(1, np.int32), 4)


@pytest.fixture
def sender():
    made = threading.Event()
    sender = Sender("prefill-0", made.set)
    sender.made = made
    yield sender
    sender.close()
    assert not sender._errands._thread.is_alive()


def run(sender, pushes, layers=3):
    sender.begin(pushes)
    for layer in range(layers):
        sender.layers(pushes, (layer,))
    pushes.seal()
    assert pushes.made or sender.made.wait(60)
    assert pushes.made


def test_a_step_has_not_ended_before_its_last_put_has(sender):
    pusher = Pusher("decode-0")
    pushes = StepPushes([job(pusher)])
    assert not pushes.ended
    run(sender, pushes)
    assert pusher.seen == ["chunk", 0, 1, 2]
    for ticket in pusher.tickets:
        assert not pushes.ended
        ticket.done = True
    assert pushes.ended
    assert pushes.failures() == []
    assert pushes.nbytes == 30


@pytest.mark.parametrize("late", [False, True])
def test_a_receiver_that_is_gone_ends_its_own_jobs_alone(sender, late):
    lost, fine = Pusher("decode-0", None if late else 1), Pusher("decode-1")
    pushes = StepPushes([job(lost), job(fine), job(lost)])
    run(sender, pushes)
    assert fine.seen == ["chunk", 0, 1, 2]
    for ticket in lost.tickets:
        ticket.done, ticket.error = True, TransportError("cut") if late else None
    assert not pushes.ended
    for ticket in fine.tickets:
        ticket.done = True
    (failure,) = pushes.failures()
    assert failure.peer == "decode-0"
    assert "cut" in str(failure)


def test_a_mistake_of_ours_ends_that_step_and_not_the_sender(sender):
    broken = StepPushes([job(None)])
    run(sender, broken)
    assert broken.ended
    assert isinstance(broken.problem, AttributeError)
    sender.made.clear()
    pusher = Pusher("decode-0")
    run(sender, StepPushes([job(pusher)]))
    assert pusher.seen == ["chunk", 0, 1, 2]


def test_blocks_that_the_receiver_holds_are_not_sent():
    push = Push("decode-0", 3, [10, 11, 12, 13], skip=2, start=8)
    row = Row(1, 0, [], 0, GREEDY, "", push, pushed=push.skip)
    blocks = np.array([5, 6, 7, 8], np.int32)
    assert plan_push(row, blocks, 9, False, 4, Pusher("decode-0")) == []
    (first,) = plan_push(row, blocks, 13, False, 4, Pusher("decode-0"))
    (last,) = plan_push(row, blocks, 14, True, 4, Pusher("decode-0"))
    assert (first.blocks.tolist(), first.first, first.number) == ([7], 2, 0)
    assert (last.blocks.tolist(), last.first, last.number) == ([8], 3, 1)


def test_a_job_has_no_more_blocks_than_its_pusher_takes_at_once():
    row = Row(1, 0, [], 0, GREEDY, "", Push("decode-0", 3, list(range(9)), skip=0, start=0))
    blocks = np.arange(20, 29, dtype=np.int32)
    jobs = plan_push(row, blocks, 33, True, 4, Pusher("decode-0", largest=4))
    assert [job.blocks.tolist() for job in jobs] == [[20, 21, 22, 23], [24, 25, 26, 27], [28]]
    assert [(job.number, job.first) for job in jobs] == [(0, 0), (1, 4), (2, 8)]
    assert (row.pushed, row.chunks) == (9, 3)
