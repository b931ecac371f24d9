"""Prefill nodes whose blocks are not as the receivers': converted on arrival, the same tokens."""

import pytest
from tests.late_wire import LateEndpoint
from tests.same_tokens import check_idle
from tests.tiny_models import make_tiny

from cloverinfer import LLM, ModelConfig, SamplingParams
from cloverinfer.attention.torch import TorchAttention
from cloverinfer.core.errors import CloverError, NodeStartError

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
SHARED = [3 + i % 50 for i in range(40)]
PROMPTS = [[1 + (7 * i + j) % 90 for j in range(5 + 9 * i % 60)] for i in range(8)]
PROMPTS += [[*SHARED[: 20 + 3 * i], 7 + i] for i in range(6)]
POOL = {"num_blocks": 16, "max_num_seqs": 4, "max_num_batched_tokens": 40}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(make_tiny("llama", tmp_path_factory.mktemp("m")))


@pytest.fixture(scope="module")
def wanted(path):
    return outputs(path, topology="colocated", block_size=16)


def outputs(path, prefill_dtype=None, dtype="float32", **fields):
    model = ModelConfig(model_path=path, dtype=dtype, prefill_dtype=prefill_dtype)
    with LLM(model, **(POOL | fields)) as llm:
        done = llm.generate(PROMPTS, GREEDY)
        again = llm.generate(PROMPTS, GREEDY)  # by now prefixes are held
        check_idle(llm)
    assert [one.token_ids for one in done] == [one.token_ids for one in again]
    return [one.token_ids for one in done]


@pytest.mark.parametrize(("prefill", "home"), [(16, 32), (32, 16), (8, 16), (1, 32)])
@pytest.mark.parametrize("topology", ["pd", "pda"])
def test_other_block_sizes_give_the_same_tokens(path, wanted, topology, prefill, home):
    sizes = {"block_size": home, "prefill_block_size": prefill, "num_blocks": 256 // home}
    assert outputs(path, topology=topology, checksum="crc32c", **sizes) == wanted


@pytest.mark.parametrize("executor", ["process"])
def test_between_processes_and_several_nodes(path, wanted, executor):
    nodes = {"num_prefill_workers": 2, "num_attention_nodes": 2, "topology": "pda"}
    sizes = {"block_size": 16, "prefill_block_size": 32}
    assert outputs(path, executor=executor, **nodes, **sizes) == wanted


def test_a_ring_smaller_than_a_chunk_holds_the_sender_back(path, wanted, monkeypatch):
    """Three slots for chunks of up to five blocks; compute goes on, credits come between layers."""
    monkeypatch.setattr("cloverinfer.transport.inproc.InprocEndpoint", LateEndpoint)
    monkeypatch.setattr(LateEndpoint, "delay", 0.001)
    monkeypatch.setattr("cloverinfer.nodes.inlet.MIB", 3 * block_bytes(path, 8))
    sizes = {"block_size": 16, "prefill_block_size": 8, "staging_mib": 1}
    assert outputs(path, topology="pd", checksum="crc32c", **sizes) == wanted


def block_bytes(path, size):
    """Of one layer."""
    model = ModelConfig(model_path=path, dtype="float32")
    with LLM(model, topology="colocated", num_blocks=4) as llm:
        layout = llm.engine._engine.cluster.infos[0].peer.layout
    return layout.specs[0].token_bytes * size


def test_a_block_larger_than_the_ring_is_refused_with_both_numbers(path, monkeypatch):
    one = block_bytes(path, 16)
    monkeypatch.setattr("cloverinfer.nodes.inlet.MIB", one - 1)
    with pytest.raises(NodeStartError, match=f"{one} bytes in a layer.*{one - 1} bytes"):
        outputs(path, topology="pd", block_size=32, prefill_block_size=16, staging_mib=1)


@pytest.mark.parametrize(("prefill", "home"), [("bfloat16", "float32"), ("float32", "bfloat16"),
                                               ("float16", "float32")])  # fmt: skip
def test_other_types_convert_and_nearly_the_same_is_said(path, wanted, prefill, home):
    """A prefill in 16 bits rounds; most prompts' tokens survive it."""
    made = outputs(path, topology="pda", dtype=home, prefill_dtype=prefill, block_size=16)
    firsts = sum(a[0] == b[0] for a, b in zip(made, wanted, strict=True))
    assert firsts >= len(wanted) - 2


class OwnLayout(TorchAttention):
    """Holds its pool as nobody may put into it."""

    capabilities = TorchAttention.capabilities.__class__(
        **(vars(TorchAttention.capabilities) | {"direct_puts": False})
    )


def test_a_pool_of_another_layout_is_filled_by_its_backend(path, wanted, monkeypatch):
    import cloverinfer.nodes.attention as attention

    def own(config, layout, num_heads, region):
        backend = OwnLayout(config.threads)
        backend.allocate(layout, num_heads, region.buffer)
        return backend

    monkeypatch.setattr(attention, "make_backend", own)
    assert outputs(path, topology="pda", block_size=16) == wanted


def test_corruption_on_the_way_fails_the_request_and_is_counted(path, monkeypatch):
    from cloverinfer import _native

    real, calls = _native.crc32c_slices, []

    def once_wrong(*args):
        calls.append(1)
        return real(*args) ^ (len(calls) == 1)

    monkeypatch.setattr(_native, "crc32c_slices", once_wrong)
    model = ModelConfig(model_path=path, dtype="float32")
    with LLM(model, topology="pd", checksum="crc32c", block_size=16, num_blocks=32) as llm:
        with pytest.raises(CloverError, match="checksum"):
            llm.generate([PROMPTS[4]], GREEDY)
        assert len(llm.generate([PROMPTS[4]], GREEDY)[0].token_ids) == 6
        check_idle(llm)
        assert sum(row["failed_transfers"] for row in llm.engine.nodes()) == 1
