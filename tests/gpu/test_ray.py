"""Nodes as Ray actors on a GPU: the same tokens as transformers on the GPU. `make test-gpu`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.same_tokens import check, reference, run
from tests.tiny_models import make_tiny
from transformers import AutoModelForCausalLM

from cloverinfer.attention.cuda import missing

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(bool(missing()), reason=missing()),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
    pytest.mark.timeout(300),
]
MAX_TOKENS = 12


@pytest.mark.parametrize(
    "fields",
    [
        {"topology": "colocated"},
        {"topology": "pd", "transport": "auto"},
        {"topology": "pd", "transport": "shm"},
        {"topology": "pda", "transport": "tcp", "attention_backend": "cuda"},
        {"topology": "pda", "transport": "shm", "attention_backend": "cpu"},
    ],
)
def test_actors_use_the_gpu(fields: dict[str, Any], tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path)
    peer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().to("cuda")
    generator = torch.Generator().manual_seed(5)
    lengths = (1, 2, 15, 17, 33, 120)
    prompts = [torch.randint(1, 90, (n,), generator=generator).tolist() for n in lengths]
    cases = reference(peer, prompts, MAX_TOKENS)
    common = {"executor": "ray", "device": "cuda", "num_blocks": 96, "block_size": 16}
    check(cases, run(str(folder), cases, MAX_TOKENS, **(common | fields)))
