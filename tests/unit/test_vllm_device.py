"""Caches on GPUs, of a fake driver: nothing is read before it is computed, nor written, or given
back, while a device has not done with it."""

from __future__ import annotations

import threading
import time

import pytest
from tests.cuda_kit import FakeDriver
from tests.vllm_gpu_kit import SPOILT, FakeGpu
from tests.vllm_kit import FakeEngine, until

from cloverinfer.core.errors import ConfigError, TransportError
from cloverinfer.integrations.vllm import carriers
from cloverinfer.transport import cuda_ipc, rdma


@pytest.fixture
def driver(monkeypatch):
    made = FakeDriver()
    monkeypatch.setattr(cuda_ipc, "Driver", lambda: made)
    monkeypatch.setattr(cuda_ipc, "missing", lambda: "")
    monkeypatch.setattr(rdma, "missing", lambda: "this host has no RDMA device")
    return made


@pytest.fixture
def engines(driver):
    made, gpus = [], []

    def make(role, ranks=1, device=0, **options):
        gpus.append(FakeGpu(driver, device))
        made.append(FakeEngine(role, ranks, **({"transport": "auto"} | options), memory=gpus[-1]))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
    for gpu in gpus:
        gpu.stream.end()
    assert not driver.retained
    assert not driver.pinned


def gpu_of(engine):
    return engine.options.memory


def params(decode, transfer="t", attempt=0):
    return {"transfer_id": transfer, "attempt": attempt, "decode_address": decode.address}


def is_computed(engine):
    moment = gpu_of(engine).mark()
    until(lambda: moment.happened)


@pytest.mark.parametrize(
    ("sender", "receiver"),
    [
        ({}, {}),
        ({"transport": "cuda_ipc"}, {"transport": "cuda_ipc", "device": 1}),
        ({"order": "NH", "size": 32}, {"size": 16}),
        ({"ranks": 2}, {}),
    ],
)
def test_a_prompt_arrives_whole_though_layers_are_computed_later(engines, sender, receiver):
    prefill, decode = engines("prefill", **sender), engines("decode", **receiver)
    decode.wait_for_remote("d", 75, "t")
    prefill.prefill("p", 75, params(decode), chunk=30)
    prefill.finish("p")
    decode.until_loaded("d")
    prefill.until_sent("p")
    assert decode.holds("d", 0, 75)
    assert decode.bad == set()


def test_what_is_pushed_after_its_step_waits_for_the_step(engines):
    prefill, decode = engines("prefill"), engines("decode")
    gpu_of(prefill).slow = 0.3
    prefill.prefill("p", 50, params(decode))  # begun, and decode has no blocks yet
    decode.wait_for_remote("d", 50, "t")
    decode.until_loaded("d")
    assert decode.holds("d", 0, 50)


def test_blocks_are_granted_once_decode_computes_nothing_into_them_any_more(engines):
    """Those of a request that has ended, of which a step may still be under way."""
    prefill, decode = engines("prefill"), engines("decode")
    over = threading.Event()

    def step_before():
        over.wait(20)
        for worker in decode.workers:
            worker.storage[:] = SPOILT

    gpu_of(decode).later(step_before)
    decode.wait_for_remote("d", 50, "t")
    prefill.prefill("p", 50, params(decode))
    is_computed(prefill)
    time.sleep(0.2)
    over.set()
    decode.until_loaded("d")
    assert decode.holds("d", 0, 50)


def test_an_abort_comes_after_the_load_that_it_ends(engines):
    decode = engines("decode")
    over = threading.Event()
    gpu_of(decode).later(lambda: over.wait(20))
    decode.wait_for_remote("d", 50, "t")
    decode.finish("d")
    assert decode.stays
    over.set()
    decode.until_loaded("d")
    assert decode.bad == set()


def test_blocks_stay_while_the_device_copies(engines, driver):
    prefill, decode = engines("prefill"), engines("decode")
    decode.wait_for_remote("d", 64, "t")
    with driver.held():
        prefill.prefill("p", 64, params(decode))
        prefill.finish("p")
        decode.finish("d")
        for _ in range(20):
            prefill.step()
            decode.step()
            time.sleep(0.01)
        assert prefill.sent == decode.loaded == set()
    decode.until_loaded("d")
    prefill.until_sent("p")


def test_a_put_that_missed_its_deadline_holds_blocks_until_it_has_ended(engines, driver):
    """A device's copies cannot be called back."""
    prefill, decode = engines("prefill"), engines("decode", retry_timeout=0.2)
    decode.wait_for_remote("d", 64, "t")
    until(lambda: decode.workers[0].half._inbox._transfers)
    for wire in prefill.workers[0].half._courier.wires.values():
        wire.put_seconds = 0.3
    prefill.begin("p", 64, params(decode))
    prefill.compute("p", chunk=32, upto=32)
    until(lambda: decode.holds("d", 0, 32))
    with driver.held():
        prefill.step("p", 32, 32)
        prefill.finish("p")
        outbox = prefill.workers[0].half._outbox
        until(lambda: prefill.step() or outbox._transfers["p"].failed, "the put's end")
        for _ in range(30):
            prefill.step()
            decode.step()
            time.sleep(0.01)
        assert prefill.sent == decode.loaded == set()
    decode.until_loaded("d")
    prefill.until_sent("p")
    assert decode.bad == set(decode.tables["d"])


def test_preempted_blocks_are_left_alone(engines):
    prefill, decode = engines("prefill"), engines("decode")
    decode.wait_for_remote("d", 64, "t")
    prefill.begin("p", 64, params(decode))
    prefill.compute("p", chunk=32, upto=32)
    for worker in prefill.workers:
        worker.half.preempt(["p"])
        worker.storage[:] = SPOILT
    prefill.tables["p"] = [prefill._free.pop() for _ in range(4)]
    prefill.step("p", 0, 48, first=True)
    prefill.step("p", 48, 16)
    prefill.finish("p")
    decode.until_loaded("d")
    assert decode.holds("d", 0, 64)


def test_a_wire_of_gpus_is_refused_for_host_memory_with_those_that_serve():
    with pytest.raises(ConfigError, match=r"host memory.*cuda_ipc.*shm"):
        carriers.carriers("cuda_ipc", carriers.HOST)


def test_memory_that_cannot_be_shared_is_named_and_nothing_is_held(driver, monkeypatch):
    def denied(base):
        raise TransportError("cuIpcGetMemHandle: invalid argument (1)")

    monkeypatch.setattr(driver, "export", denied)
    with pytest.raises(ConfigError, match=r"cuda_ipc: .*without expandable segments"):
        FakeEngine("decode", transport="cuda_ipc", memory=FakeGpu(driver))
    assert not driver.retained
