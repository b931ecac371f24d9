"""The engine with real nodes: ends, cancellation, bad input, deaths, and what is left."""

import asyncio
import os
import signal
import threading
import time
import weakref

import pytest
import torch
from fastapi.testclient import TestClient
from tests.same_tokens import check_idle
from tests.tiny_models import make_tiny

from cloverinfer import LLM, AsyncLLM, CacheConfig, ClusterConfig, ModelConfig, SamplingParams
from cloverinfer.core.errors import (
    CloverError,
    ConfigError,
    EngineClosedError,
    ModelError,
    NodeStartError,
    QueueFullError,
    RequestError,
)
from cloverinfer.server.app import build_app
from cloverinfer.server.catalog import Catalog, Chat

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_tokens=700, temperature=0.0, ignore_eos=True)
"""Still under way seconds after its first token, when something happens to it."""
TOPOLOGIES = ["colocated", "pd", "pda"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("m")
    path = make_tiny("llama", folder, max_position_embeddings=4096)
    return ModelConfig(model_path=str(path), dtype="float32")


@pytest.fixture(params=TOPOLOGIES)
def llm(request, model):
    with LLM(model, topology=request.param, num_blocks=64, block_size=16, max_num_seqs=8) as made:
        yield made
        check_idle(made)


def test_sampling_is_repeatable_by_seed_alone(llm):
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=7, ignore_eos=True)
    alone = llm.generate([[5, 6, 7]], params)[0].token_ids
    together = llm.generate([[9], [5, 6, 7], [1, 2]], params)[1].token_ids
    other = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=12, seed=8, ignore_eos=True))[
        0
    ].token_ids
    assert alone == together
    assert alone != other


def test_prompts_of_one_call_are_read_in_one_step(model):
    one = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    with LLM(model, topology="colocated", num_blocks=64, block_size=16, max_num_seqs=8) as llm:
        assert len(llm.generate([[i, 5, 7] for i in range(1, 9)], one)) == 8
        assert llm.engine.nodes()[0]["steps"] == 1
        with pytest.raises(RequestError):
            llm.generate([[1, 2], [1] * (llm.engine.max_model_len + 1)], one)
        assert llm.engine.nodes()[0]["steps"] == 1, "no prompt is read where one is refused"


def test_a_stop_token_ends_with_stop_even_as_the_first_token(llm):
    first, second, *_ = llm.generate([[5, 6, 7]], GREEDY)[0].token_ids
    for stop, count in ((first, 1), (second, 2 if second != first else 1)):
        params = SamplingParams(
            max_tokens=8, temperature=0.0, ignore_eos=True, stop_token_ids=(stop,)
        )
        (done,) = llm.generate([[5, 6, 7]], params)
        assert done.finish_reason == "stop"
        assert len(done.token_ids) == count


def test_one_token_is_one_token(llm):
    (done,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=1, temperature=0.0))
    assert len(done.token_ids) == 1
    assert done.metrics["tpot"] is None


def test_metrics_add_up(llm):
    (done,) = llm.generate([[5, 6, 7]], GREEDY)
    metrics = done.metrics
    stages = metrics["stages"]
    assert metrics["total_tokens"] == 3 + 8
    assert stages["queue"] + stages["prefill"] == pytest.approx(metrics["ttft"])
    assert metrics["ttft"] + 7 * metrics["tpot"] <= metrics["latency"]
    assert metrics["throughput"] == pytest.approx(8 / metrics["latency"])
    assert metrics["scheduler_dense_continuous_batching"]["steps"] == 7
    layers = llm.engine._engine.cluster.model.arch.num_layers
    assert metrics["scheduler_attention_batching"]["layer_calls"] == 7 * layers
    barrier = metrics["scheduler_attention_layer_barrier"]
    assert barrier["waits"] == (7 * layers if llm.engine.topology == "pda" else 0)


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ([], "prompt"),
        ([10**6], "prompt"),
        ([-1], "prompt"),
        ([1.5], "prompt"),
        ("text", "prompt"),
        ({1: 2}, "prompt"),
        (b"bytes", "prompt"),
    ],
)
def test_a_bad_prompt_is_refused_and_the_system_serves_on(llm, prompt, param):
    with pytest.raises(RequestError) as caught:
        llm.generate([prompt] if prompt != [] else [[]], GREEDY)
    assert caught.value.param == param
    assert len(llm.generate([[1, 2]], GREEDY)[0].token_ids) == 8


@pytest.mark.parametrize("sampling", [{"max_tokens": 4}, [{"max_tokens": 4}], [GREEDY, GREEDY]])
def test_parameters_of_another_kind_or_number_are_refused(llm, sampling):
    with pytest.raises(RequestError) as caught:
        llm.generate([[1, 2]], sampling)
    assert caught.value.param == "sampling"


def test_a_prompt_past_context_or_pool_is_refused_with_numbers(llm):
    with pytest.raises(RequestError, match=str(llm.engine.max_model_len)):
        llm.generate([[1] * (llm.engine.max_model_len + 1)], GREEDY)


@pytest.mark.parametrize(
    "fields",
    [{"max_tokens": -1}, {"temperature": -1}, {"temperature": float("nan")},
     {"top_p": 0}, {"top_p": 1.1}, {"top_k": -5}, {"seed": 2**70}, {"stop": [""]},
     {"max_tokens": True}, {"max_tokens": 2**64}, {"top_k": 10**30}, {"temperature": 10**400},
     {"stop_token_ids": [2**40]}, {"min_p": 1.5}, {"presence_penalty": 2.5},
     {"frequency_penalty": "1"}, {"repetition_penalty": 0}, {"logit_bias": {1: 101}},
     {"logit_bias": {-1: 1}}, {"logit_bias": [1]}, {"bad_words": [""]}, {"bad_words": "no"},
     {"min_tokens": -1}, {"min_tokens": 200}, {"logprobs": 21}, {"logprobs": True},
     {"prompt_logprobs": -1}, {"n": 0}, {"n": 129},
     {"skip_special_tokens": 1}],
)  # fmt: skip
def test_absurd_parameters_are_refused(fields):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**fields)
    assert caught.value.param == next(iter(fields))


def test_stops_that_leave_no_token_for_min_tokens_are_refused(llm):
    params = SamplingParams(min_tokens=2, stop_token_ids=tuple(range(100_000)))
    with pytest.raises(RequestError, match="leaves none for min_tokens") as caught:
        llm.generate([[1]], params)
    assert caught.value.param == "stop_token_ids"
    first = SamplingParams(max_tokens=5, stop_token_ids=tuple(range(100_000)))
    assert llm.generate([[1]], first)[0].finish_reason == "stop"


def test_cancelling_at_any_time_leaves_nothing(llm):
    async def one(i):
        params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
        stream = llm.engine.stream([1 + i % 50] * (1 + i % 37), params)
        try:
            if i % 2:
                seen = 0
                async for chunk in stream:
                    seen += len(chunk.token_ids)
                    if seen > i % 7:
                        return
            else:
                await asyncio.wait_for(anext(stream), timeout=0.002 * (i % 5))
        except (TimeoutError, asyncio.TimeoutError):
            return
        finally:
            await stream.aclose()

    async def all_of_them():
        await asyncio.gather(*(one(i) for i in range(60)))

    asyncio.run(all_of_them())
    check_idle(llm)
    assert len(llm.generate([[1, 2]], GREEDY)[0].token_ids) == 8


def test_a_full_queue_refuses_and_serves_on(model):
    with LLM(model, topology="pda", max_queue=1, max_num_seqs=1, num_blocks=64) as llm:
        long = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
        seen, done = [], threading.Event()

        def sink(item):
            seen.append(item)
            over = [x for x in seen if isinstance(x, CloverError) or x.finish_reason]
            if len(over) == 8:
                done.set()

        for _ in range(8):
            llm.engine.submit([1, 2, 3], long, sink)
        assert done.wait(60)
        refused = [x for x in seen if isinstance(x, QueueFullError)]
        served = [x for x in seen if not isinstance(x, CloverError) and x.finish_reason == "length"]
        assert refused
        assert len(refused) + len(served) == 8


def test_no_place_in_time_is_told_as_such_over_http(model):
    scheduler = {"max_num_seqs": 1, "queue_timeout": 0.05}
    with LLM(model, topology="colocated", num_blocks=64, **scheduler) as llm:
        catalog = Catalog.of([llm.engine], [("m",)], [Chat()])
        taken = llm.engine.stream_sync([1, 2], LONG)
        next(taken)
        with TestClient(build_app(catalog)) as client:
            answer = client.post("/v1/completions", json={"prompt": [1, 2, 3]})
        taken.close()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "queue_timeout")
    assert answer.json()["error"]["message"] == "no place within 0.05 s (queue_timeout)"
    assert "retry-after" in answer.headers


@pytest.mark.parametrize("caching", [True, False])
def test_a_refused_sequence_ends_the_others_of_its_prompt(model, caching):
    params = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True, n=8)

    async def run(engine):
        with pytest.raises(QueueFullError):
            async for _ in engine.stream([1, 2, 3], params):
                pass
        # The others are ended by the engine's thread, after the refusal was handed out.
        wait_until(lambda: sum(engine.stats().counters.aborted.values()) >= 3)

    with LLM(model, max_queue=3, num_blocks=256, enable_prefix_caching=caching) as llm:
        asyncio.run(run(llm.engine))
        assert not llm.engine.stats().counters.finished
        check_idle(llm)


def test_close_ends_requests_under_way(model):
    llm = AsyncLLM(
        model, ClusterConfig(topology="pda", executor="local", cache=CacheConfig(num_blocks=64))
    )
    stream = llm.stream_sync([1, 2], LONG)
    next(stream)
    closer = threading.Thread(target=llm.close)
    closer.start()
    with pytest.raises(EngineClosedError):
        for _ in stream:
            pass
    closer.join(30)
    with pytest.raises(EngineClosedError):
        next(llm.stream_sync([1, 2], GREEDY))


def leftovers():
    return [
        name for name in os.listdir("/dev/shm") if name.startswith(f"cloverinfer-{os.getpid()}-")
    ]


def test_a_dead_node_fails_its_requests_and_hangs_nobody(model):
    with LLM(model, topology="pda", executor="process", num_blocks=64) as llm:
        rows = {row["role"]: row for row in llm.engine.nodes()}
        stream = llm.engine.stream_sync([1, 2], LONG)
        next(stream)
        os.kill(rows["attention"]["pid"], signal.SIGKILL)
        chunks = list(stream)
        assert chunks[-1].finish_reason == "error"
        assert "attention-0" in chunks[-1].error
        wait_until(lambda: llm.engine.failure is not None)
        assert "attention-0" in llm.engine.failure
        with pytest.raises(EngineClosedError, match="attention-0"):
            llm.generate([[1, 2]], GREEDY)
    assert leftovers() == []
    assert not any(alive(row["pid"]) for row in rows.values())


def test_with_another_of_its_role_a_dead_node_is_done_without(model):
    with LLM(
        model, topology="pda", executor="process", num_attention_nodes=2, num_blocks=64
    ) as llm:
        rows = {row["name"]: row for row in llm.engine.nodes()}
        os.kill(rows["attention-0"]["pid"], signal.SIGKILL)
        wait_until(lambda: not all(row["alive"] for row in llm.engine.nodes()))
        assert len(llm.generate([[1, 2], [3]], GREEDY)[1].token_ids) == 8


def test_a_death_under_load_ends_only_what_lived_there(model):
    fields = {"topology": "pda", "executor": "process", "num_attention_nodes": 2, "num_blocks": 128}
    with LLM(model, **fields) as llm:
        pid = next(r["pid"] for r in llm.engine.nodes() if r["name"] == "attention-0")
        streams = [llm.engine.stream_sync([1 + i], LONG) for i in range(4)]
        for stream in streams:
            next(stream)
        os.kill(pid, signal.SIGKILL)
        lasts = [list(stream)[-1] for stream in streams]
        ends = [last.finish_reason for last in lasts]
        assert sorted(ends) == ["error", "error", "length", "length"]
        assert all("attention-0" in last.error for last in lasts if last.error)
        assert llm.engine.failure is None
        check_idle(llm, without=["attention-0"])


def test_a_closed_engine_lets_go_of_its_weights_while_another_serves(model):
    fields = {"topology": "colocated", "num_blocks": 8}
    with LLM(model, **fields):
        with LLM(model, **fields) as llm:
            llm.generate([[5]], GREEDY)
            (node,) = llm.engine._engine.cluster._executor._nodes.values()
            half = weakref.ref(node.half)
            del node
        del llm
        assert half() is None


def test_a_sink_that_raises_ends_its_own_request_alone(llm):
    def sink(item):
        raise RuntimeError("nobody listens")

    llm.engine.submit([1, 2, 3], GREEDY, sink)
    assert len(llm.generate([[1, 2]], GREEDY)[0].token_ids) == 8
    assert llm.engine.failure is None


def test_a_submission_that_races_with_close_is_always_answered(model):
    for pause in (0.0, 0.001, 0.005):
        llm = LLM(model, topology="colocated", num_blocks=64)
        answered = []

        def submit(llm=llm, answered=answered):
            try:
                while True:
                    answered.append(list(llm.engine.stream_sync([1], GREEDY)))
            except EngineClosedError as end:
                answered.append(end)

        thread = threading.Thread(target=submit)
        thread.start()
        time.sleep(pause)
        llm.close()
        thread.join(20)
        assert not thread.is_alive()
        assert isinstance(answered[-1], EngineClosedError)


def test_a_forked_child_leaves_the_cluster_alone(model):
    with LLM(model, topology="pda", executor="process", num_blocks=64) as llm:
        pid = os.fork()
        if pid == 0:
            llm.close()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert len(llm.generate([[1, 2]], GREEDY)[0].token_ids) == 8


def test_names_of_requests_are_strings_and_do_not_collide(llm):
    seen = []
    with pytest.raises(RequestError, match="request_id"):
        llm.engine.submit([1], GREEDY, seen.append, request_id=[1])
    llm.engine.submit([1], GREEDY, seen.append, request_id="request-3")
    assert [len(done.token_ids) for done in llm.generate([[1], [2], [3]], GREEDY)] == [8, 8, 8]


def wait_until(true, seconds=60):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def alive(pid):
    return os.path.exists(f"/proc/{pid}")


@pytest.mark.parametrize("executor", ["local", "process", "ray"])
def test_a_node_that_cannot_start_says_why_and_the_others_are_stopped(model, executor):
    broken = ModelConfig(model_path=model.model_path, dtype="float32")
    with pytest.raises((NodeStartError, ConfigError), match="memory_gib"):
        LLM(broken, topology="pda", executor=executor, memory_gib=1e-9)
    assert leftovers() == []
    assert not [
        t for t in threading.enumerate() if t.name.startswith(("prefill", "dense", "attention"))
    ]


def test_unknown_models_and_fields_are_named():
    with pytest.raises(ModelError, match="smollm2-135m"):
        LLM("smollm2-135")
    with pytest.raises(ConfigError, match="blok_size"):
        LLM("smollm2-135m", blok_size=3)


def test_colocated_and_pda_agree_bit_for_bit(model, monkeypatch):
    """Equal batches and threads: the logits of every step are the same bits."""
    from cloverinfer.models import llama

    def logits_of(topology):
        seen = []
        whole = llama.LlamaHalf.logits

        def spy(self, carry):
            result = whole(self, carry)
            seen.append(result.clone())
            return result

        monkeypatch.setattr(llama.LlamaHalf, "logits", spy)
        with LLM(model, topology=topology, num_blocks=64, threads=2) as llm:
            llm.generate(
                [[1, 2, 3, 4, 5]], SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
            )
        monkeypatch.undo()
        return seen

    one, other = logits_of("colocated"), logits_of("pda")
    assert len(one) == len(other) == 30
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_failing_attention_node_fails_its_requests_and_serves_on(model, monkeypatch):
    """One layer of one step raises on an attention node; whoever was in that step is told."""
    from cloverinfer.attention.cpu import CpuAttention

    whole, calls = CpuAttention.attend, []

    def attend(self, layer, *args):
        calls.append(layer)
        if len(calls) == 7:
            raise MemoryError("out of memory, says the test")
        return whole(self, layer, *args)

    with LLM(model, topology="pda", num_attention_nodes=2, num_blocks=64) as llm:
        monkeypatch.setattr(CpuAttention, "attend", attend)
        with pytest.raises(CloverError, match="out of memory, says the test"):
            llm.generate([[1, 2, 3], [4, 5]], GREEDY)
        monkeypatch.undo()
        assert len(llm.generate([[1, 2]], GREEDY)[0].token_ids) == 8
        check_idle(llm)


def test_the_cluster_tells_what_it_is_made_of(llm):
    info = llm.engine.cluster_info()
    assert info["transport"] == {"name": "inproc", "passed_over": [], "checksum": "none"}
    assert {row["transport"] for row in info["nodes"]} == {"inproc"}
    assert all(row["kv_blocks_used"] == 0 for row in info["nodes"])
    stream = llm.engine.stream_sync([5] * 40, SamplingParams(max_tokens=50, ignore_eos=True))
    next(stream)
    used = {row["role"]: row["kv_blocks_used"] for row in llm.engine.cluster_info()["nodes"]}
    assert max(used.values()) >= 3
    stream.close()
