"""Over a wire whose puts end later: the same tokens, and no block reused under a writer."""

import threading

import pytest
from tests.late_wire import LateEndpoint
from tests.same_tokens import check_idle
from tests.tiny_models import make_tiny

from cloverinfer import LLM, ModelConfig, SamplingParams
from cloverinfer.core.errors import CloverError, DeadlineError
from cloverinfer.nodes.prefill import PrefillNode

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
PROMPTS = [[1 + (7 * i + j) % 90 for j in range(5 + 9 * i % 60)] for i in range(12)]
POOL = {"num_blocks": 12, "block_size": 8, "max_num_seqs": 4, "enable_prefix_caching": False}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = make_tiny("llama", tmp_path_factory.mktemp("m"))
    return ModelConfig(model_path=str(path), dtype="float32")


@pytest.fixture(scope="module")
def wanted(model):
    with LLM(model, topology="colocated", **POOL) as llm:
        return [done.token_ids for done in llm.generate(PROMPTS, GREEDY)]


@pytest.fixture
def late(monkeypatch):
    monkeypatch.setattr("cloverinfer.transport.inproc.InprocEndpoint", LateEndpoint)
    monkeypatch.setattr(LateEndpoint, "made", [])
    return LateEndpoint


@pytest.mark.parametrize("topology", ["pd", "pda"])
def test_late_puts_give_the_same_tokens(late, model, wanted, topology):
    """A pool of few blocks: one that was reported too early would hold another prompt by then."""
    with LLM(model, topology=topology, **POOL) as llm:
        done = llm.generate(PROMPTS, GREEDY)
        check_idle(llm)
    assert [one.token_ids for one in done] == wanted


def test_aborted_requests_give_their_blocks_back_after_their_writers(late, model, wanted):
    with LLM(model, topology="pd", **POOL) as llm:
        for i in range(10):
            name = llm.engine.submit(PROMPTS[i], GREEDY, lambda item: None)
            if i % 3:
                threading.Event().wait(0.004 * i)
            llm.engine.abort(name)
        done = llm.generate(PROMPTS, GREEDY)
        check_idle(llm)
    assert [one.token_ids for one in done] == wanted


def test_puts_that_fail_late_fail_their_request_and_the_others_go_on(late, model, wanted):
    # 9 blocks a request at most; the pools of both receivers are used in turn.
    with LLM(model, topology="pd", num_decode_dense_nodes=2, **POOL) as llm:
        sender = next(one for one in late.made if one.name == "prefill-0")
        sender.refuse_from = sender.puts
        with pytest.raises(CloverError, match="decode-"):
            llm.generate([PROMPTS[0]], GREEDY)
        sender.refuse_from = None
        done = llm.generate(PROMPTS, GREEDY)
        check_idle(llm)
    assert [one.token_ids for one in done] == wanted


@pytest.mark.parametrize("sizes", [{}, {"prefill_block_size": 4}])
def test_a_wire_that_failed_is_used_again(late, model, wanted, monkeypatch, sizes):
    """Through a ring of few slots too: what failed puts had taken of it comes back."""
    monkeypatch.setattr("cloverinfer.nodes.inlet.MIB", 6000)
    monkeypatch.setattr(late, "delay", 0.002)
    with LLM(model, topology="pd", staging_mib=1, **(POOL | sizes)) as llm:
        sender = next(one for one in late.made if one.name == "prefill-0")
        for puts in (0, 1, 0):
            sender.refuse_from = sender.puts + puts
            with pytest.raises(CloverError, match="decode-0: the wire is cut"):
                llm.generate([PROMPTS[5]], GREEDY)
            sender.refuse_from = None
        done = llm.generate(PROMPTS, GREEDY)
        check_idle(llm)
    assert [one.token_ids for one in done] == wanted


def test_a_wire_that_failed_in_a_step_that_failed_itself_is_used_again(
    late, model, wanted, monkeypatch
):
    compute = PrefillNode._compute

    def compute_and_fail(node, *args):
        compute(node, *args)
        raise RuntimeError("out of luck")

    monkeypatch.setattr(late, "delay", 0.002)
    with LLM(model, topology="pd", prefill_block_size=4, **POOL) as llm:
        sender = next(one for one in late.made if one.name == "prefill-0")
        with monkeypatch.context() as broken:
            broken.setattr(PrefillNode, "_compute", compute_and_fail)
            sender.refuse_from = sender.puts
            with pytest.raises(CloverError, match="out of luck"):
                llm.generate([PROMPTS[5]], GREEDY)
            sender.refuse_from = None
        done = llm.generate(PROMPTS[:4], GREEDY)
        check_idle(llm)
    assert [one.token_ids for one in done] == wanted[:4]


def test_a_writer_that_cannot_be_fenced_yet_is_tried_again(late, model, wanted, monkeypatch):
    tries = []

    def fence(endpoint, address, timeout):
        tries.append((endpoint.name, address))
        if len(tries) < 4:
            raise DeadlineError("its threads are still at it")

    monkeypatch.setattr(late, "delay", 0.002)
    monkeypatch.setattr(late, "fence", fence)
    with LLM(model, topology="pd", **POOL) as llm:
        sender = next(one for one in late.made if one.name == "prefill-0")
        with monkeypatch.context() as broken:
            broken.setattr(PrefillNode, "_mend", lambda node, name: False)
            sender.refuse_from = sender.puts
            with pytest.raises(CloverError, match="wire is cut"):
                llm.generate([PROMPTS[5]], GREEDY)
            sender.refuse_from = None
        check_idle(llm)
        done = llm.generate(PROMPTS[:4], GREEDY)
        check_idle(llm)
    assert tries == [("decode-0", sender.address())] * 4
    assert [one.token_ids for one in done] == wanted[:4]
