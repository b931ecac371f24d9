"""A KV cache that is not proven whole is never reported as whole."""

import itertools
import random

import pytest

from cloverinfer.kvcache.layout import KVSpec, PoolLayout
from cloverinfer.nodes.transfers import TransferReceiver
from cloverinfer.wire.messages import CancelTransfer, ExpectTransfer, KVChunk
from cloverinfer.wire.notices import KVNotice

LAYERS = 3
SPEC = KVSpec(kv_heads=1, k_dim=8, v_dim=8, dtype="float32", scale=1.0)
LAYOUT = PoolLayout((SPEC,) * LAYERS, 16, 32)
EXPECT = ExpectTransfer(5, 7, 1, "prefill-0", [3, 9, 4], 16, 48)


@pytest.fixture
def receiver():
    made = TransferReceiver("attention-0", LAYOUT, lambda done: made.reports.append(done))
    made.reports = []
    return made


def events(request=7, incarnation=1, chunks=((0, 2), (2, 1))):
    for number, (first, count) in enumerate(chunks):
        yield KVChunk(5, request, incarnation, number, first, count)
        yield from (KVNotice(5, number, layer) for layer in range(LAYERS))


def take_all(receiver, stream, source="prefill-0"):
    for event in stream:
        receiver.take(source, event)


def test_every_layer_of_every_block_makes_it_whole(receiver):
    receiver.expect(EXPECT)
    stream = list(events())
    take_all(receiver, stream[:-1])
    assert receiver.reports == []
    take_all(receiver, stream[-1:])
    (done,) = receiver.reports
    assert (done.transfer, done.request, done.incarnation, done.error) == (5, 7, 1, "")
    assert done.nbytes == 3 * LAYOUT.block_bytes
    assert len(receiver) == 0


def test_data_may_come_before_its_promise(receiver):
    take_all(receiver, events())
    assert receiver.reports == []
    receiver.expect(EXPECT)
    assert [done.error for done in receiver.reports] == [""]


@pytest.mark.parametrize("missing", range(8))
def test_one_thing_missing_is_not_whole(receiver, missing):
    receiver.expect(EXPECT)
    stream = list(events())
    take_all(receiver, stream[:missing] + stream[missing + 1 :])
    assert all(done.error for done in receiver.reports)


def test_a_doubled_notice_does_not_stand_for_a_missing_one(receiver):
    receiver.expect(EXPECT)
    chunk, *notices = events(chunks=((0, 3),))
    take_all(receiver, [chunk, notices[0], notices[0], notices[1]])
    assert receiver.reports == []
    assert receiver.dropped == 1
    take_all(receiver, [notices[2]])
    assert [done.error for done in receiver.reports] == [""]


def test_foreign_and_late_data_is_dropped(receiver):
    receiver.expect(EXPECT)
    take_all(receiver, events(incarnation=0))
    take_all(receiver, events(), source="prefill-1")
    assert receiver.reports == []
    receiver.cancel(CancelTransfer(5))
    take_all(receiver, events())
    assert receiver.reports == []


def test_a_chunk_out_of_order_is_an_error(receiver):
    receiver.expect(EXPECT)
    take_all(receiver, [KVChunk(5, 7, 1, 0, 1, 2)])
    (done,) = receiver.reports
    assert "does not follow" in done.error


def test_nothing_promised_is_whole_at_once(receiver):
    receiver.expect(ExpectTransfer(5, 7, 1, "prefill-0", [], 0, 0))
    assert [done.nbytes for done in receiver.reports] == [0]


def test_any_interleaving_of_layers_within_a_chunk_is_fine():
    for order in itertools.permutations(range(LAYERS)):
        reports = []
        receiver = TransferReceiver("a", LAYOUT, reports.append)
        receiver.expect(EXPECT)
        rng = random.Random(order[0])
        early = rng.random() < 0.5
        chunks = [KVChunk(5, 7, 1, 0, 0, 2), KVChunk(5, 7, 1, 1, 2, 1)]
        take_all(receiver, chunks if early else chunks[:1])
        take_all(receiver, [KVNotice(5, 0, layer) for layer in order])
        take_all(receiver, [] if early else chunks[1:])
        assert reports == []
        take_all(receiver, [KVNotice(5, 1, layer) for layer in reversed(order)])
        assert len(reports) == 1
