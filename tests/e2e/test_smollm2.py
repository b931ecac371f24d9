"""The default model in float32: the same greedy tokens as transformers, in every topology."""

import pytest
from tests.same_tokens import check, pairwise, reference, run, settings_id
from transformers import AutoModelForCausalLM

from cloverinfer import ModelConfig
from cloverinfer.models import load_tokenizer, resolve_model

pytestmark = pytest.mark.timeout(900)
MODEL = "smollm2-135m"
MAX_TOKENS = 64
TEXTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a village by the sea,",
    "1, 1, 2, 3, 5, 8,",
    "Der schnelle braune Fuchs",
    "What is photosynthesis?\n",
    "SELECT name, age FROM users WHERE",
    "Q: Why is the sky blue?\nA:",
    "<html>\n<head>\n",
    "The three laws of thermodynamics are as follows.",
    "Ingredients: two eggs, flour, milk.\nMethod:",
    "\u65e5\u672c\u306e\u9996\u90fd\u306f",
    "Dear Sir or Madam,\n\nI am writing to",
    "import numpy as np\n\nx = np.",
    "2 + 2 =",
    "A haiku about autumn:\n",
]


@pytest.fixture(scope="module")
def cases():
    """16 texts and 4 prompts around the edge of a block of 32 (which is one of 16 as well)."""
    model = resolve_model(ModelConfig(model_path=MODEL, dtype="float32"))
    tokenizer = load_tokenizer(model)
    prompts = [tokenizer.encode(text) for text in TEXTS]
    long = tokenizer.encode(" ".join(TEXTS[2:10]) * 2)
    prompts += [long[:1], long[:63], long[:64], long[:65]]
    assert len(prompts) == 20
    peer = AutoModelForCausalLM.from_pretrained(model.path, dtype="float32").eval()
    return reference(peer, prompts, MAX_TOKENS, together=True)


@pytest.mark.parametrize("topology", ["colocated", "pd", "pda"])
def test_twenty_prompts_in_one_process(cases, topology):
    outputs = run(MODEL, cases, MAX_TOKENS, topology=topology, executor="local")
    check(cases, outputs)


FACTORS = {
    "executor_transport": ["process-shm", "process-tcp", "ray-tcp", "local-shm"],
    "max_num_seqs": [1, 7, 32],
    "num_attention_nodes": [1, 2, 3],
    "block_size": [16, 32],
    "chunked": [True, False],
}
SELECTION = pairwise(FACTORS, most=4)
"""Each value; pairs of them, and Ray's other transports, are met by models that start sooner, in
``tests/integration/test_tiny_models.py``."""
FEWER_TOKENS = 24
"""Of each prompt here; all of them are compared in the three topologies above."""


@pytest.mark.slow
@pytest.mark.parametrize("setting", SELECTION, ids=settings_id)
def test_three_nodes_in_other_settings(cases, setting):
    executor, transport = setting["executor_transport"].split("-")
    few = cases[::5] if setting["max_num_seqs"] == 1 or executor == "ray" else cases + cases[:12]
    outputs = run(
        MODEL,
        few,
        FEWER_TOKENS,
        topology="pda",
        executor=executor,
        transport=transport,
        num_attention_nodes=setting["num_attention_nodes"],
        block_size=setting["block_size"],
        num_blocks=600,
        max_num_seqs=setting["max_num_seqs"],
        enable_chunked_prefill=setting["chunked"],
        max_num_batched_tokens=64 if setting["chunked"] else 2048,
    )
    check(few, outputs)


@pytest.mark.parametrize("factor", FACTORS)
def test_each_value_is_met(factor):
    assert {setting[factor] for setting in SELECTION} == set(FACTORS[factor])
