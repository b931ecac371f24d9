"""Caches on GPUs, of a fake driver, over wires that reach host memory alone: all arrives, nothing
is taken for whole before the device has it, and room on the way comes back."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from tests.cuda_kit import FakeDriver
from tests.vllm_gpu_kit import SPOILT, FakeGpu, WaitingCopies
from tests.vllm_kit import ALL_HEADS, DIM, LAYERS, FakeEngine, until

from cloverinfer.core.errors import ConfigError, TransportError
from cloverinfer.integrations.vllm import courier, staged
from cloverinfer.integrations.vllm.staged import Circle
from cloverinfer.nodes.copies import Copies
from cloverinfer.transport import Ticket, cuda_ipc, rdma
from cloverinfer.transport.registry import create_endpoint

BLOCK_BYTES = 16 * ALL_HEADS * 2 * DIM * 4
"""Of one layer, with blocks of 16 tokens."""


@pytest.fixture
def driver(monkeypatch):
    made = FakeDriver()
    monkeypatch.setattr(cuda_ipc, "Driver", lambda: made)
    monkeypatch.setattr(cuda_ipc, "missing", lambda: "libcuda.so.1 is missing")
    monkeypatch.setattr(rdma, "missing", lambda: "this host has no RDMA device")
    return made


@pytest.fixture
def engines(driver):
    made, gpus = [], []

    def make(role, ranks=1, **options):
        gpus.append(FakeGpu(driver, slow=0.002))
        made.append(FakeEngine(role, ranks, **({"transport": "tcp"} | options), memory=gpus[-1]))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
    for gpu in gpus:
        gpu.stream.end()


def params(decode, transfer="t", attempt=0):
    return {"transfer_id": transfer, "attempt": attempt, "decode_address": decode.address}


def landings(engine):
    return [stage.landing for worker in engine.workers for stage in worker.half._courier.stages]


def room_is_back(engine):
    until(lambda: all(len(each._free) == each.blocks for each in landings(engine)), "room")


@pytest.fixture
def little_room(monkeypatch):
    """Four blocks on the way, and one at a time from the device."""
    monkeypatch.setattr(courier, "MIB", 4 * LAYERS * BLOCK_BYTES)
    monkeypatch.setattr(staged, "CIRCLE_BYTES", 2 * BLOCK_BYTES)
    return {"staging_mib": 1}


@pytest.mark.parametrize("transport", ["tcp", "shm", "auto"])
@pytest.mark.parametrize(
    ("sender", "receiver"),
    [
        ({}, {}),
        ({"order": "NH", "size": 32}, {"size": 16}),
        ({"size": 16}, {"order": "NH", "size": 32}),
        ({"ranks": 2}, {}),
        ({}, {"ranks": 2, "order": "NH"}),
    ],
)
def test_a_prompt_arrives_whole(engines, transport, sender, receiver):
    prefill = engines("prefill", transport=transport, **sender)
    decode = engines("decode", transport=transport, **receiver)
    decode.wait_for_remote("d", 75, "t")
    prefill.prefill("p", 75, params(decode), chunk=30)
    prefill.finish("p")
    decode.until_loaded("d")
    prefill.until_sent("p")
    assert decode.holds("d", 0, 75)
    assert decode.bad == set()
    room_is_back(decode)


def test_what_was_computed_before_is_pushed_in_parts_that_fit(engines, little_room):
    prefill, decode = engines("prefill", **little_room), engines("decode", **little_room)
    prefill.prefill("p", 60, params(decode))
    prefill.finish("p")
    decode.wait_for_remote("d", 60, "t")
    decode.until_loaded("d")
    prefill.until_sent("p")
    assert decode.holds("d", 0, 60)


def test_transfers_wait_for_room_in_order(engines, little_room):
    prefill, decode = engines("prefill", **little_room), engines("decode", **little_room)
    names = [f"{i}" for i in range(6)]
    for name in names:
        decode.wait_for_remote(f"d{name}", 48, name)
    for name in reversed(names):
        prefill.prefill(f"p{name}", 48, params(decode, name))
        prefill.finish(f"p{name}")
    for name in names:
        decode.until_loaded(f"d{name}")
        prefill.until_sent(f"p{name}")
        assert decode.holds(f"d{name}", 0, 48)
    assert decode.bad == set()
    room_is_back(decode)


def test_one_that_waits_for_room_and_is_aborted_lets_the_next_in(engines, little_room):
    prefill, decode = engines("prefill", **little_room), engines("decode", **little_room)
    for name in ("first", "second", "third"):
        decode.wait_for_remote(f"d-{name}", 64, name)
        prefill.begin(f"p-{name}", 64, params(decode, name))
        prefill.compute(f"p-{name}", chunk=32, upto=32)
    inbox = decode.workers[0].half._inbox
    until(lambda: list(inbox._queue) == ["second", "third"], "two wait")
    decode.finish("d-second")
    decode.until_loaded("d-second")
    for name in ("first", "third"):
        prefill.step(f"p-{name}", 32, 32)
        decode.until_loaded(f"d-{name}")
        assert decode.holds(f"d-{name}", 0, 64)
    room_is_back(decode)


def test_one_that_waits_for_room_and_loses_its_prefill_lets_the_next_in(engines, little_room):
    prefill, lost = engines("prefill", **little_room), engines("prefill", **little_room)
    decode = engines("decode", lease=1000.0, retry_timeout=1000.0, **little_room)
    inbox = decode.workers[0].half._inbox

    def claimed(name):
        return name in inbox._transfers and inbox._transfers[name].claimed

    asked = [("first", 32, prefill), ("second", 64, lost), ("third", 32, prefill)]
    for name, tokens, which in asked:
        decode.wait_for_remote(f"d-{name}", tokens, name)
        which.begin(f"p-{name}", tokens, params(decode, name))
        which.compute(f"p-{name}", chunk=16, upto=16)
        until(lambda name=name: claimed(name), "the claim")
    until(lambda: list(inbox._queue) == ["second", "third"], "two wait")
    lost.close()
    prefill.step("p-third", 16, 16)
    decode.until_loaded("d-third")
    assert decode.holds("d-third", 0, 32)
    assert claimed("first")


def test_a_prompt_that_never_has_room_fails_with_what_to_do(engines, little_room):
    prefill, decode = engines("prefill", **little_room), engines("decode", **little_room)
    decode.wait_for_remote("d", 65, "t")
    prefill.prefill("p", 65, params(decode))
    decode.until_loaded("d")
    assert "5 blocks, and 4 have room" in decode.finish("d")["error"]
    assert decode.bad == set(decode.tables["d"])


def test_blocks_are_not_given_back_while_they_are_copied_to(engines, monkeypatch):
    begun, go_on = threading.Event(), threading.Event()

    def store(self, *args):
        begun.set()
        assert go_on.wait(60)
        return Copies.store(self, *args)

    monkeypatch.setattr(WaitingCopies, "store", store)
    prefill, decode = engines("prefill"), engines("decode")
    decode.wait_for_remote("d", 64, "t")
    prefill.prefill("p", 64, params(decode))
    assert begun.wait(60)
    decode.finish("d")
    prefill.finish("p")
    prefill.until_sent("p")
    inbox = decode.workers[0].half._inbox
    until(lambda: not inbox._slots, "prefill has left")
    decode.step()
    assert decode.loaded == set()
    go_on.set()
    decode.until_loaded("d")
    for worker in decode.workers:  # another request's from here on
        worker.storage[:] = SPOILT
    room_is_back(decode)
    inbox._errands.close()
    assert all((worker.storage == SPOILT).all() for worker in decode.workers)


def test_after_a_prefill_died_another_may_serve(engines):
    prefill, other = engines("prefill"), engines("prefill")
    decode = engines("decode", lease=1000.0, retry_timeout=60.0)
    decode.wait_for_remote("d", 64, "t")
    prefill.begin("p", 64, params(decode))
    prefill.compute("p", chunk=32, upto=32)
    until(lambda: decode.holds("d", 0, 32), "the first blocks")
    prefill.close()
    other.prefill("p", 64, params(decode, attempt=1))
    decode.until_loaded("d")
    assert decode.holds("d", 0, 64)
    assert decode.bad == set()
    room_is_back(decode)


def test_memory_that_cannot_be_shared_goes_through_the_host(engines, driver, monkeypatch):
    def denied(base):
        raise TransportError("cuIpcGetMemHandle: invalid argument (1)")

    monkeypatch.setattr(driver, "export", denied)
    monkeypatch.setattr(cuda_ipc, "missing", lambda: "")
    decode = engines("decode", transport="auto")
    assert decode.workers[0].half._courier.data == ["tcp"]


def test_room_for_no_block_is_refused(engines, monkeypatch):
    monkeypatch.setattr(courier, "MIB", LAYERS * BLOCK_BYTES - 1)
    with pytest.raises(ConfigError, match=r"a block has 6144 bytes, and 6143.*staging_mib"):
        engines("decode", staging_mib=1)


def test_a_circle_gives_no_stretch_that_is_being_put():
    endpoint = create_endpoint("inproc", "circle")
    try:
        circle, tickets = Circle(WaitingCopies(None), endpoint.register(1024)), []
        draw = np.random.default_rng(0)
        live = []
        for _ in range(200):
            unit = int(draw.choice([1, 8, 24, 64]))
            nbytes = unit * int(draw.integers(1, 512 // unit + 1))
            while tickets and not circle._room(_end_of(circle, nbytes, unit)):
                tickets.pop(0).done = True
                live.pop(0)
            at = circle.take(nbytes, unit)
            assert at % unit == 0
            assert at + nbytes <= 1024
            assert all(at + nbytes <= a or b <= at for a, b in live)
            live.append((at, at + nbytes))
            tickets.append(Ticket())
            circle.put(tickets[-1])
        circle.close()
        with pytest.raises(TransportError, match="closing"):
            circle.take(512, 64)
    finally:
        endpoint.close()


def _end_of(circle, nbytes, unit):
    """Where such a stretch would end."""
    lap, at = divmod(circle._end, 1024)
    at = -(-at // unit) * unit
    if at + nbytes > 1024:
        lap, at = lap + 1, 0
    return lap * 1024 + at + nbytes
