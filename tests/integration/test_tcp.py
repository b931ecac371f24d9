"""The same tokens where every node and the scheduler talk over sockets."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest
import torch
from tests.same_tokens import Case, check, check_idle, reference, run
from tests.tiny_models import make_tiny
from transformers import AutoModelForCausalLM

from cloverinfer import LLM, ModelConfig, SamplingParams
from cloverinfer.config.network import NetworkConfig
from cloverinfer.core.errors import CloverError
from cloverinfer.transport import tcp
from cloverinfer.transport.tcp import TcpEndpoint

pytestmark = pytest.mark.timeout(600)
MAX_TOKENS = 12
LENGTHS = [1, 15, 16, 17, 33, 64, 5, 9]
"""Around the edges of blocks of 16."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[Case]]:
    folder = make_tiny("llama", tmp_path_factory.mktemp("llama"))
    peer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(1, 90, (n,), generator=generator).tolist() for n in LENGTHS]
    return str(folder), reference(peer, prompts, MAX_TOKENS)


SEVERAL = {"num_prefill_workers": 2, "num_decode_dense_nodes": 2, "num_attention_nodes": 2}


@pytest.mark.parametrize(
    ("executor", "topology", "nodes"),
    [
        ("local", "pda", {}),
        ("process", "pd", {}),
        ("process", "pda", SEVERAL),
        pytest.param("ray", "pda", {}, marks=pytest.mark.ray),
    ],
    ids=lambda value: value if isinstance(value, str) else str(sum(value.values())),
)
def test_same_tokens_over_tcp(
    tiny: tuple[str, list[Case]], executor: str, topology: str, nodes: dict[str, int]
) -> None:
    model, cases = tiny
    outputs = run(
        model,
        cases,
        MAX_TOKENS,
        executor=executor,
        topology=topology,
        transport="tcp",
        block_size=16,
        num_blocks=200,
        max_num_batched_tokens=32,
        num_wavefronts=2,
        **nodes,
    )
    check(cases, outputs)


GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
ONE_HOST = {"executor": "local", "transport": "tcp", "num_blocks": 50, "step_timeout": 20.0}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, TcpEndpoint]:
    """Endpoints by the names of their nodes."""
    kept: dict[str, TcpEndpoint] = {}

    class Kept(TcpEndpoint):
        def __init__(self, name: str, network: NetworkConfig | None = None) -> None:
            super().__init__(name, network)
            kept[name] = self

    monkeypatch.setattr(tcp, "TcpEndpoint", Kept)
    return kept


def cut(there: TcpEndpoint, other: TcpEndpoint) -> None:
    """Ends the link that leads from one to the other, as a put that missed its deadline does."""
    peer = there._peers[other.address()]
    assert peer.link is not None
    there._engine.drop_outgoing(peer.link)


@pytest.mark.parametrize(("there", "other"), [("dense-0", "attention-0"),
                         ("attention-0", "dense-0"), ("prefill-0", "attention-0")])  # fmt: skip
def test_links_between_nodes_that_live_are_made_anew(
    tiny: tuple[str, list[Case]], made: dict[str, TcpEndpoint], there: str, other: str
) -> None:
    model = ModelConfig(model_path=tiny[0], dtype="float32")
    with LLM(model, topology="pda", **ONE_HOST) as llm:
        (wanted,) = llm.generate([[1, 2, 3]], GREEDY)
        cut(made[there], made[other])
        with pytest.raises(CloverError, match=f"{other}|{there}"):
            llm.generate([[1, 2, 3]], GREEDY)
        (again,) = llm.generate([[1, 2, 3]], GREEDY)
    assert again.token_ids == wanted.token_ids


def test_slots_of_a_ring_come_back_over_a_new_link(
    tiny: tuple[str, list[Case]], made: dict[str, TcpEndpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cloverinfer.nodes.inlet.MIB", 6000)
    model, prompt = ModelConfig(model_path=tiny[0], dtype="float32"), list(range(1, 65))
    ring = {"prefill_block_size": 4, "staging_mib": 1, "enable_prefix_caching": False}
    with LLM(model, topology="pd", **ring, **ONE_HOST) as llm:
        (wanted,) = llm.generate([prompt], GREEDY)
        cut(made["decode-0"], made["prefill-0"])
        (again,) = llm.generate([prompt], GREEDY)
    assert again.token_ids == wanted.token_ids


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_blocks_of_a_killed_prefill_node_wait_for_their_receiver(
    tiny: tuple[str, list[Case]],
) -> None:
    """The receiver sleeps, so that what is put stays in its sockets, until the request has ended:
    its blocks are taken until then and no longer."""
    path, cases = tiny
    fields = {"topology": "pd", "executor": "process", "transport": "tcp", "block_size": 16}
    greedy = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
    model = ModelConfig(model_path=path, dtype="float32")
    with LLM(model, num_blocks=8, num_prefill_workers=2, **fields) as llm:
        pids = {row["name"]: row["pid"] for row in llm.engine.nodes()}
        scheduler = llm.engine._engine._scheduler
        ends: list[str | None] = []
        os.kill(pids["decode-0"], signal.SIGSTOP)
        try:
            prompt = [1 + i % 90 for i in range(64)]
            llm.engine.submit(prompt, greedy, lambda item: ends.append(item.finish_reason))
            until(lambda: scheduler.free_blocks()["decode-0"] < 8)
            os.kill(pids["prefill-0"], signal.SIGKILL)
            until(lambda: "error" in ends)
            assert scheduler.free_blocks()["decode-0"] == 4
        finally:
            os.kill(pids["decode-0"], signal.SIGCONT)
        check_idle(llm, without=["prefill-0"])
        done = llm.generate([case.prompt for case in cases], greedy)
    assert [one.token_ids for one in done] == [case.tokens for case in cases]
