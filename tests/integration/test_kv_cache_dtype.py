"""Keys and values stored in another type than computed in: every topology attends over the same."""

import pytest
from tests.same_tokens import check_idle
from tests.tiny_models import make_tiny

from cloverinfer import LLM, ModelConfig, SamplingParams
from cloverinfer.core.errors import ConfigError

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=1)
SHARED = [3 + i % 50 for i in range(40)]
PROMPTS = [[1 + (7 * i + j) % 90 for j in range(5 + 9 * i % 60)] for i in range(6)]
PROMPTS += [[*SHARED[: 20 + 3 * i], 7 + i] for i in range(4)]
POOL = {"num_blocks": 24, "max_num_seqs": 4, "max_num_batched_tokens": 40, "block_size": 16}
STORED = ["bfloat16", "float16", "int8"]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(make_tiny("llama", tmp_path_factory.mktemp("m")))


@pytest.fixture(scope="module")
def colocated(path):
    """By stored type: tokens, and the log-probability of each."""
    return {stored: outputs(path, stored, "colocated") for stored in ["auto", *STORED]}


def outputs(path, stored, topology, **fields):
    model = ModelConfig(model_path=path, dtype="float32")
    fields = POOL | fields | {"kv_cache_dtype": stored, "topology": topology}
    with LLM(model, **fields) as llm:
        done = llm.generate(PROMPTS, GREEDY)
        again = llm.generate(PROMPTS, GREEDY)  # by now prefixes are held
        specs = {spec.dtype for info in llm.engine._engine.cluster.infos
                 if info.peer.layout for spec in info.peer.layout.specs}  # fmt: skip
        check_idle(llm)
    assert specs == {"float32" if stored == "auto" else stored}
    assert [one.token_ids for one in done] == [one.token_ids for one in again]
    return [one.token_ids for one in done], [first_logprob(one) for one in done]


def first_logprob(output):
    return output.logprobs[0].logprob


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("topology", ["pd", "pda"])
def test_every_topology_gives_the_tokens_of_the_stored_values(path, colocated, topology, stored):
    made = outputs(path, stored, topology, checksum="crc32c")
    assert made[0] == colocated[stored][0]


def test_int8_between_processes(path, colocated):
    made = outputs(path, "int8", "pda", executor="process", checksum="crc32c")
    assert made[0] == colocated["int8"][0]


@pytest.mark.parametrize("stored", ["int8", "float16"])
def test_blocks_of_another_size_convert(path, colocated, stored):
    made = outputs(path, stored, "pda", prefill_block_size=8, checksum="crc32c")
    assert made[0] == colocated[stored][0]


@pytest.mark.parametrize(("stored", "most"), [("bfloat16", 0.05), ("float16", 0.01), ("int8", 0.2)])
def test_what_storing_rounds_moves_little(colocated, stored, most):
    """Of the first token's log-probability, by a random model; int8 moved one by 0.135 at most."""
    exact, made = colocated["auto"][1], colocated[stored][1]
    errors = [abs(a - b) for a, b in zip(exact, made, strict=True)]
    assert max(errors) <= most
    assert max(errors) > 0, "nothing was rounded: is the cache of that type?"


def test_an_unknown_type_is_refused_with_the_known(path):
    with pytest.raises(ConfigError, match=r"kv_cache_dtype must be one of auto, float32.*int8"):
        LLM(ModelConfig(model_path=path), kv_cache_dtype="int4")


def test_fp8_is_refused_on_cpus(path):
    on_cpu = {"topology": "colocated", "executor": "local", "device": "cpu"}
    with pytest.raises(ConfigError, match="fp8 needs nodes on GPUs, and colocated-0 is on the CPU"):
        LLM(ModelConfig(model_path=path), kv_cache_dtype="fp8", **on_cpu)
