"""A node that stands still is ended, fenced and done without; its blocks come back."""

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from tests.same_tokens import check_idle
from tests.tiny_models import make_tiny

from cloverinfer import LLM, ModelConfig, SamplingParams
from cloverinfer.core.errors import CloverError
from cloverinfer.nodes.prefill import PrefillNode
from cloverinfer.orchestrator.cluster import Cluster
from cloverinfer.wire.messages import Fence, decode

GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
PROMPT = [5] * 100
STEP_TIMEOUT = 3.0
POOL = {"num_blocks": 20, "block_size": 8, "step_timeout": STEP_TIMEOUT}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = make_tiny("llama", tmp_path_factory.mktemp("m"), max_position_embeddings=8192)
    return ModelConfig(model_path=str(path), dtype="float32")


@pytest.fixture
def fences(monkeypatch):
    """(writer, its state then) of every fence that was asked for."""
    seen, send = [], Cluster.send

    def spy(cluster, name, data):
        message = decode(data)
        if isinstance(message, Fence):
            pids = {info.peer.name: info.pid for info in cluster.infos}
            seen.append((message.writer, state(pids[message.writer])))
        send(cluster, name, data)

    monkeypatch.setattr(Cluster, "send", spy)
    return seen


def state(pid):
    """As ``ps`` says it; empty for a process that is gone, of which a parent may yet have to hear:
    nothing of it runs."""
    try:
        found = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return "" if found == "Z" else found
    except FileNotFoundError:
        return ""


def stop(pid):
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: state(pid) == "T")


def wait_until(true, seconds=60):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def row(llm, name):
    return next(row for row in llm.engine.nodes() if row["name"] == name)


def try_both(llm):
    """A request for each attention node, and whether both live: where a busy machine was too slow
    for the first ones before the node was stopped, nothing has waited for it yet."""
    with contextlib.suppress(CloverError):
        ends([llm.engine.stream_sync([1 + i] * 9, GREEDY) for i in range(2)])
    return row(llm, "attention-1")["alive"]


def ends(streams):
    return [list(stream)[-1] for stream in streams]


@pytest.mark.parametrize(
    ("executor", "transport"),
    [("process", "shm"), pytest.param("ray", "tcp", marks=pytest.mark.ray)],
)
def test_a_stopped_prefill_process_is_ended_before_its_blocks_are_reused(
    model, fences, executor, transport
):
    fields = {"topology": "pd", "executor": executor, "transport": transport}
    with LLM(model, num_prefill_workers=2, **fields, **POOL) as llm:
        pid = row(llm, "prefill-0")["pid"]
        stop(pid)
        first = llm.engine.stream_sync(PROMPT, GREEDY)
        second = llm.engine.stream_sync(PROMPT[:9], GREEDY)
        third = llm.engine.stream_sync(PROMPT, GREEDY)  # waits for the blocks of the first
        lasts = ends([first, second, third])
        assert [last.finish_reason for last in lasts] == ["error", "length", "length"]
        assert "prefill-0 took more than 3 s" in lasts[0].error
        assert fences == [("prefill-0", "")], "what is gone writes to nothing"
        told = row(llm, "prefill-0")
        assert (told["alive"], told["reason"]) == (False, "it has not answered for 3 s")
        assert llm.engine.failure is None
        check_idle(llm, without=["prefill-0"])


def test_a_stopped_attention_process_is_ended_and_the_other_serves(model, fences):
    fields = {"topology": "pda", "executor": "process", "num_attention_nodes": 2}
    with LLM(model, **fields, **(POOL | {"num_blocks": 1000})) as llm:
        long = SamplingParams(max_tokens=6000, temperature=0.0, ignore_eos=True)
        streams = [llm.engine.stream_sync([1 + i] * 9, long) for i in range(2)]
        for stream in streams:
            next(stream)
            next(stream)  # the first comes from prefill, while its cache may still be on its way
        pid = row(llm, "attention-1")["pid"]
        stop(pid)
        lasts = ends(streams)
        assert {last.finish_reason for last in lasts} == {"error"}, "one step had them both"
        wait_until(lambda: not row(llm, "attention-1")["alive"] or not try_both(llm))
        # Which waited for it, and hears of its end.
        wait_until(lambda: not llm.engine._engine._scheduler._state.missing_roles())
        assert llm.generate([PROMPT], GREEDY)[0].finish_reason == "length"
        wait_until(lambda: state(pid) == "")
        check_idle(llm, without=["attention-1"])


def test_a_node_that_goes_on_in_time_is_not_ended(model):
    with LLM(model, topology="pd", executor="process", **POOL) as llm:
        pid = row(llm, "prefill-0")["pid"]
        stop(pid)
        (last,) = ends([llm.engine.stream_sync(PROMPT, GREEDY)])
        assert "took more than 3 s" in last.error
        os.kill(pid, signal.SIGCONT)
        check_idle(llm)
        assert llm.generate([PROMPT], GREEDY)[0].finish_reason == "length"
        assert row(llm, "prefill-0")["alive"]


def test_a_thread_that_stands_still_keeps_its_blocks_until_it_goes_on(model, monkeypatch):
    """Nobody can end it; when it does go on it ends, and its blocks come back."""
    compute, on, stuck = PrefillNode._compute, threading.Event(), threading.Event()

    def compute_late(node, *args):
        if node.config.name == "prefill-0":
            stuck.set()
            assert on.wait(120)
        return compute(node, *args)

    monkeypatch.setattr(PrefillNode, "_compute", compute_late)
    with LLM(model, topology="pd", num_prefill_workers=2, **POOL) as llm:
        (last,) = ends([llm.engine.stream_sync(PROMPT, GREEDY)])
        assert stuck.is_set()
        assert "took more than 3 s" in last.error
        wait_until(lambda: not row(llm, "prefill-0")["alive"])
        assert llm.generate([PROMPT[:9]], GREEDY)[0].finish_reason == "length"
        (refused,) = ends([llm.engine.stream_sync(PROMPT, GREEDY)])
        assert "blocks of decode-0 stay taken, since prefill-0 may still write" in refused.error
        on.set()
        check_idle(llm, without=["prefill-0"])
        assert llm.generate([PROMPT], GREEDY)[0].finish_reason == "length"
