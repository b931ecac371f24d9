"""Benchmarks of an engine in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.tiny_models import make_tiny

from cloverinfer import cli


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("tiny"))


def test_offline_counts_what_the_engine_made(model: Path, tmp_path: Path, capsys: Any) -> None:
    lines = tmp_path / "r.jsonl"
    flags = ["--model", str(model), "--topology", "pda", "--num-blocks", "64", "--quiet"]
    load = ["--num-prompts", "6", "--input-len", "9", "--output-len", "4", "--ignore-eos"]
    form = ["--prompt-form", "ids", "--vocab-size", "90", "--max-concurrency", "3"]
    assert cli.main(
        ["bench", "offline", *flags, *load, *form, "--json", "-", "--requests-jsonl", str(lines)]
    ) == 0  # fmt: skip
    figures = json.loads(capsys.readouterr().out)
    assert (figures["completed"], figures["prompt_tokens"], figures["output_tokens"]) == (6, 54, 24)
    assert figures["counted_by"] == {"engine": 6}
    assert figures["max_concurrency"] <= 3
    assert figures["setting"]["engine"] == "in process, pda"
    for line in lines.read_text().splitlines():
        record = json.loads(line)
        assert record["sent"] < record["times"][0] <= record["times"][-1] <= record["ended"]


def test_offline_tells_what_the_engine_refuses(model: Path, capsys: Any) -> None:
    flags = ["--model", str(model), "--topology", "colocated", "--num-blocks", "8", "--quiet"]
    load = ["--num-prompts", "2", "--input-len", "600", "--prompt-form", "ids"]
    assert cli.main(["bench", "offline", *flags, *load, "--vocab-size", "90"]) == 1
    out = capsys.readouterr().out
    assert "| requests completed | 0 of 2 |" in out
    assert "RequestError" in out
