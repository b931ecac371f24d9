"""`pd` and `pda` with nodes whose memory is not the host's: the same tokens, whatever is late.

Here a device is host memory that copies reach late (``tests.late_copies``); tests/gpu has
real ones.
"""

import threading

import pytest
from tests.late_copies import LateCopies, OrderedAttention
from tests.late_wire import LateEndpoint
from tests.same_tokens import check_idle
from tests.tiny_models import make_tiny

from cloverinfer import LLM, ModelConfig, SamplingParams
from cloverinfer.core.errors import CloverError
from cloverinfer.nodes.copies import copies_of

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
SHARED = [3 + i % 50 for i in range(40)]
PROMPTS = [[1 + (7 * i + j) % 90 for j in range(5 + 9 * i % 60)] for i in range(6)]
PROMPTS += [[*SHARED[: 20 + 3 * i], 7 + i] for i in range(4)]
POOL = {"num_blocks": 24, "max_num_seqs": 4, "max_num_batched_tokens": 40, "block_size": 16}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(make_tiny("llama", tmp_path_factory.mktemp("m")))


@pytest.fixture(scope="module")
def wanted(path):
    return outputs(path, topology="colocated")


@pytest.fixture
def apart(monkeypatch):
    """Takes roles, whose nodes' memory is apart from the host's; returns their copies, by name."""
    made = {}

    def choose(*roles):
        def of(device):
            name = threading.current_thread().name
            if not name.startswith(roles):
                return copies_of(device)
            made[name] = LateCopies()
            return made[name]

        monkeypatch.setattr("cloverinfer.nodes.base.copies_of", of)
        monkeypatch.setattr("cloverinfer.attention.cpu.CpuAttention", OrderedAttention)
        return made

    return choose


def outputs(path, **fields):
    with LLM(ModelConfig(model_path=path, dtype="float32"), **(POOL | fields)) as llm:
        done = llm.generate(PROMPTS, GREEDY)
        again = llm.generate(PROMPTS, GREEDY)  # by now prefixes are held
        check_idle(llm)
    assert [one.token_ids for one in done] == [one.token_ids for one in again]
    return [one.token_ids for one in done]


@pytest.mark.parametrize("roles", [("prefill",), ("decode",), ("prefill", "decode")])
def test_pd(path, wanted, apart, roles):
    made = apart(*roles)
    assert outputs(path, topology="pd") == wanted
    assert all(copies.copied for copies in made.values())


@pytest.mark.parametrize(
    ("roles", "fields"),
    [
        (("prefill", "dense"), {"transport": "shm"}),
        (("prefill", "dense"), {"num_wavefronts": 2, "num_attention_nodes": 2}),
        (("prefill", "dense", "attention"), {"num_wavefronts": 2, "checksum": "crc32c"}),
        (("attention",), {"prefill_block_size": 8, "transport": "tcp"}),
    ],
)
def test_pda(path, wanted, apart, roles, fields):
    made = apart(*roles)
    assert outputs(path, topology="pda", **fields) == wanted
    assert all(copies.copied for copies in made.values())


def test_a_mirror_smaller_than_a_chunk_and_late_puts(path, wanted, apart, monkeypatch):
    """Three slots, which puts that end late keep; they are looked for between layers."""
    apart("prefill", "decode")
    monkeypatch.setattr("cloverinfer.transport.inproc.InprocEndpoint", LateEndpoint)
    monkeypatch.setattr(LateEndpoint, "delay", 0.001)
    one = 16 * 2 * 2 * 16 * 4
    for room in ("prefill", "inlet"):
        monkeypatch.setattr(f"cloverinfer.nodes.{room}.MIB", 3 * one)
    assert outputs(path, topology="pd", staging_mib=1) == wanted


@pytest.mark.parametrize("role", ["prefill", "dense"])
def test_a_copy_that_fails_fails_the_request_and_never_hangs(path, apart, role, monkeypatch):
    apart(role)
    monkeypatch.setattr(LateCopies, "breaks_at", 3)
    model = ModelConfig(model_path=path, dtype="float32")
    with LLM(model, topology="pda", **POOL) as llm, pytest.raises(CloverError, match="CUDA error"):
        llm.generate(PROMPTS[:2], GREEDY)
