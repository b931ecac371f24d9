"""Mirrors of a device's pool, what is done later, and slots that are still being read."""

import threading
import time
import types

import numpy as np
import pytest
import torch
from tests.late_copies import LateCopies, LateMoment

from cloverinfer.core.errors import CloverError, ConfigError, TransportError
from cloverinfer.kvcache.layout import CANONICAL_LAYOUT, KVSpec, PoolLayout
from cloverinfer.nodes.copies import NOW, Copies
from cloverinfer.nodes.later import Later
from cloverinfer.nodes.pool import Pool
from cloverinfer.nodes.source import Mirror
from cloverinfer.nodes.staging import Staging, Store
from cloverinfer.nodes.stores import DeviceStore, HostStore
from cloverinfer.transport.base import Region, RegionRef, Ticket
from cloverinfer.transport.inproc import InprocEndpoint
from cloverinfer.wire.messages import ExpectTransfer, KVCredit, KVPiece, PeerInfo
from cloverinfer.wire.notices import KVNotice

WIDE = KVSpec(kv_heads=2, k_dim=4, v_dim=4, dtype="float32", scale=1.0)
NARROW = KVSpec(kv_heads=1, k_dim=4, v_dim=8, dtype="bfloat16", scale=1.0)
FLOAT8 = KVSpec(kv_heads=2, k_dim=4, v_dim=4, dtype="float8_e4m3", scale=1.0)
LAYOUT = PoolLayout((WIDE, NARROW, FLOAT8), 4, 20)
SLOT = LAYOUT.layer_block_bytes(0)


class Wire:
    """As much of an endpoint as a pool needs."""

    capabilities = InprocEndpoint.capabilities

    def register(self, nbytes):
        return Region(RegionRef("here", "r", nbytes), memoryview(bytearray(nbytes)))


@pytest.fixture
def copies():
    made = LateCopies()
    yield made
    made.going.set()
    made.close()


@pytest.fixture
def pool(copies):
    pool = Pool(Wire(), LAYOUT, copies)
    generator = torch.Generator().manual_seed(1)
    pool._memory.copy_(torch.randint(0, 256, pool._memory.shape, generator=generator))
    return pool


def mirror_of(pool, slots=6):
    return Mirror(pool, Wire().register, slots * SLOT + 1)


def bytes_of(mirror, layer, held):
    slices = mirror.slices(layer)
    memory = slices.region.buffer
    return [bytes(memory[at : at + slices.length]) for at in slices.offsets[held.rows]]


def test_blocks_of_every_layer_are_as_in_the_pool_wherever_the_circle_is(pool):
    mirror = mirror_of(pool)
    assert mirror.largest == 3
    rng = np.random.default_rng(0)
    for turn in range(12):
        layer = turn % 3
        blocks = rng.permutation(20)[: 1 + turn % 3].astype(np.int32)
        with mirror.hold(layer, blocks, NOW) as held:
            wanted = [bytes(pool.rows(layer)[i].numpy()) for i in blocks]
            assert bytes_of(mirror, layer, held) == wanted
            assert held.after.handle is None
            held.ticket = Ticket(done=True)


def test_a_slot_is_not_written_before_the_put_that_reads_it_has_ended(pool):
    mirror, tickets = mirror_of(pool, 4), []
    blocks = np.array([3, 5], np.int32)

    def hold():
        with mirror.hold(0, blocks, NOW) as held:
            held.ticket = Ticket()
            tickets.append(held)

    hold()
    hold()
    third = threading.Thread(target=hold)
    third.start()
    tickets[1].ticket.done = True
    mirror.look()
    time.sleep(0.05)
    assert len(tickets) == 2, "slots are free in the order in which they were taken"
    tickets[0].ticket.done = True
    mirror.look()
    third.join(60)
    assert tickets[2].rows.tolist() == tickets[0].rows.tolist()


def test_copies_come_after_computing_and_before_the_put(pool, copies):
    mirror, ready = mirror_of(pool), LateMoment()
    with PoolAfter(ready, pool), mirror.hold(0, np.array([2], np.int32), ready) as held:
        assert bytes_of(mirror, 0, held) == [b"\x07" * SLOT]


class PoolAfter:
    """Computes block 2 of layer 0 a little later."""

    def __init__(self, moment, pool):
        self.thread = threading.Thread(target=self.run, args=(moment, pool))

    def run(self, moment, pool):
        time.sleep(0.05)
        pool.rows(0)[2] = 7
        moment.event.set()

    def __enter__(self):
        self.thread.start()

    def __exit__(self, *_):
        self.thread.join(60)


def test_slots_of_a_copy_or_a_put_that_failed_are_free_again(pool, copies, monkeypatch):
    mirror, blocks = mirror_of(pool, 2), np.array([1], np.int32)
    monkeypatch.setattr(copies, "breaks_at", copies.copied + 1)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="CUDA error"), mirror.hold(0, blocks, NOW):
            raise AssertionError("it must not be put")
    monkeypatch.setattr(copies, "breaks_at", None)
    for _ in range(3):
        with pytest.raises(TransportError, match="cut"), mirror.hold(0, blocks, NOW):
            raise TransportError("cut")


def test_a_device_that_stands_still_is_at_fault_itself():
    with pytest.raises(CloverError, match="device did not come to an end") as caught:
        LateMoment().wait(0.01)
    assert not isinstance(caught.value, TransportError)


def test_what_is_done_while_a_device_stands_still_ends_too(monkeypatch):
    done = []
    clock = types.SimpleNamespace(monotonic=lambda: 0.01 * len(done))
    monkeypatch.setattr("cloverinfer.nodes.copies.time", clock)
    with pytest.raises(CloverError, match="did not come to an end"):
        LateMoment().wait(seconds=0.025, meanwhile=lambda: done.append(1))
    assert len(done) == 3
    NOW.wait(meanwhile=lambda: pytest.fail("there is nothing to wait for"))


def test_closing_ends_a_wait_for_slots(pool):
    mirror = mirror_of(pool, 2)
    with mirror.hold(0, np.array([1, 2], np.int32), NOW) as held:
        held.ticket = Ticket()
    threading.Timer(0.05, mirror.close).start()
    with pytest.raises(TransportError, match="closing"), mirror.hold(0, held.rows, NOW):
        raise AssertionError("there is no room")


def test_a_mirror_for_less_than_a_block_is_refused_with_both_numbers(pool):
    with pytest.raises(ConfigError, match=rf"{SLOT} bytes in a layer.*{SLOT - 1} bytes"):
        Mirror(pool, Wire().register, SLOT - 1)


def test_what_is_asked_for_later_is_done_in_order_and_without_long_sleeps():
    later, first, second, done = Later(), LateMoment(), LateMoment(), []
    assert later.patience(0.5) == 0.5
    later.after(NOW, lambda: done.append(0))
    later.after(first, lambda: done.append(1))
    later.after(NOW, lambda: done.append(2))
    later.after(second, lambda: done.append(3))
    assert done == [0]
    assert later.patience(0.5) <= 1e-3
    second.event.set()
    later.run()
    assert done == [0]
    first.event.set()
    later.run()
    assert done == [0, 1, 2, 3]
    assert later.patience(0.5) == 0.5


class SlowStore(Store):
    def __init__(self):
        self.moments = []

    def tokens(self, *_):
        raise AssertionError("whole blocks of the same kind are taken as they are")

    def blocks(self, layer, slots_bs, slots, blocks):
        self.moments.append(LateMoment())
        return self.moments[-1]


def test_slots_are_given_back_once_the_device_has_read_them():
    later, store, sent = Later(), SlowStore(), []
    send = lambda name, message: sent.append(message)  # noqa: E731
    staging = Staging(LAYOUT, Wire().register, send, store, later)
    info = PeerInfo("prefill-0", "prefill", "p", {}, LAYOUT, CANONICAL_LAYOUT, "m", "1", "float32")
    staging.meet([info], [info], 4 * SLOT)
    expect = ExpectTransfer(5, 7, 1, "prefill-0", [3, 9], 0, 8)
    for number, slots in enumerate(([0], [1])):
        piece = KVPiece(5, 7, 1, number, 0, 4 * number, 4, 0, slots)
        staging.announce("prefill-0", piece)
        assert staging.proven("prefill-0", KVNotice(5, number, 0)) is piece
        staging.import_piece("prefill-0", piece, expect)
        staging.give_back("prefill-0", piece)
    staging.reset("prefill-0")
    assert [set(m.slots) for m in sent if isinstance(m, KVCredit)] == [{2, 3}]
    for i, moment in enumerate(store.moments):
        moment.event.set()
        later.run()
        assert sent[-1] == KVCredit([i])


@pytest.mark.parametrize("layer", range(3))
def test_a_device_takes_tokens_as_the_host_does(pool, copies, layer):
    """Some tokens of some heads, in the stored type, and blocks whole."""
    spec, rng = LAYOUT.specs[layer], np.random.default_rng(layer)
    memory = bytearray(pool._memory.numpy().tobytes())
    kinds = {"float32": np.uint32, "bfloat16": np.uint16, "float8_e4m3": np.uint8}
    numbers = [rng.integers(0, 200, (5, 1, d)).astype(kinds[spec.dtype]) for d in (4, spec.v_dim)]
    numbers = [x.view(np.float32) if spec.dtype == "float32" else x for x in numbers]
    slots = np.array([8, 9, 10, 33, 79], np.int64)
    HostStore(LAYOUT, memoryview(memory)).tokens(layer, *numbers, slots, spec.kv_heads - 1)
    store = DeviceStore(pool)
    store.tokens(layer, *numbers, slots, spec.kv_heads - 1).wait(60)
    ring = rng.integers(0, 256, (6, SLOT + 8)).astype(np.uint8)
    store.blocks(layer, ring, [1, 2, 5], [4, 18, 7]).wait(60)
    rows = np.frombuffer(memory, np.uint8)[LAYOUT.layer_offsets[layer] :]
    rows = rows[: 20 * LAYOUT.layer_block_bytes(layer)].reshape(20, -1)
    rows[[4, 18, 7]] = ring[[1, 2, 5], : rows.shape[1]]
    assert (pool._memory.numpy() == np.frombuffer(memory, np.uint8)).all()


def test_the_hosts_own_copies_are_done_at_once():
    copies = Copies(torch.device("cpu"))
    assert copies.mark() is NOW
    rows, out = torch.arange(24, dtype=torch.uint8).view(3, 8), torch.zeros(2, 8, dtype=torch.uint8)
    assert copies.fetch([out], rows, np.array([2, 0], np.int32), NOW).happened
    assert out.tolist() == [rows[2].tolist(), rows[0].tolist()]
