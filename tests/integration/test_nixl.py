"""Engines over the nixl transport: the same tokens as the reference."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.same_tokens import check, reference, run
from tests.tiny_models import make_tiny
from transformers import AutoModelForCausalLM

from cloverinfer.transport import missing

pytestmark = pytest.mark.skipif(bool(missing("nixl")), reason=missing("nixl"))


@pytest.mark.parametrize("executor", ["local", "process"])
@pytest.mark.parametrize("topology", ["pd", "pda"])
def test_same_tokens(tmp_path: Path, topology: str, executor: str) -> None:
    folder = make_tiny("llama", tmp_path)
    peer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, 90, (n,), generator=generator).tolist() for n in (1, 16, 33, 70)]
    cases = reference(peer, prompts, 16)
    settings = {"num_blocks": 60, "block_size": 16, "executor": executor, "transport": "nixl"}
    check(cases, run(str(folder), cases, 16, topology=topology, **settings))
