"""The compile command: its report, its page, what it saves, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests import compiled_models

from cloverinfer.cli.entry import main
from cloverinfer.config import ModelConfig
from cloverinfer.models import resolve_model
from cloverinfer.models.compiled import read_manifest


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    compiled_models.make_model("gemma2", path)
    return str(path)


def test_report_page_and_artifact(
    folder: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    page, out = tmp_path / "page.html", tmp_path / "out"
    command = ["compile", folder, "--dtype", "float32", "--json", "--quiet"]
    assert main([*command, "--html", str(page), "-o", str(out)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [call["spec"]["window"] for call in report["calls"]] == [8, None, 8]
    assert report["kv_bytes"] == 3 * 2 * (16 + 16) * 4
    assert report["hop_bytes"] == 3 * (4 * 16 + 2 * 2 * 16 + 4 * 16) * 4
    q, kv, o, mlp = 64 * 64, 2 * 64 * 32, 64 * 64, 3 * 64 * 96
    assert report["parts"][1]["flops"] == 2 * (o + mlp + q + kv)
    frequencies, scale = 16 // 2, 1
    held = 96 * 64 + 64 + q + kv + frequencies + scale
    assert report["parts"][0]["weight_bytes"] == 4 * held
    text = page.read_text()
    assert text.count("<rect") == 4 + 3
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    model = resolve_model(ModelConfig(model_path=str(out)))
    assert model.dtype == "float32"
    assert read_manifest(out).content_hash() == report["content"]
    monkeypatch.setenv("CLOVER_CACHE", str(tmp_path / "cache"))
    cached = resolve_model(ModelConfig(model_path=folder, dtype="float32"))
    assert cached.fingerprint == model.fingerprint  # nodes with one or the other belong together


def test_a_page_without_a_folder_is_refused_before_the_work(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compile", folder, "--html", str(tmp_path / "none/page.html"), "--quiet"]) == 2
    assert "its folder is not there: make it first" in capsys.readouterr().err


def test_the_report_as_tables(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["compile", folder, "--dtype", "float32", "--report", "--target", "ffn", "--quiet"]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "4 heads on 2, 16, window 8, soft-cap 50" in text


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ([], "nothing to do"),
        (["--report", "--target", "nowhere"], "attention, ffn, or module:function"),
        (["-o", "x", "--target", "ffn"], "saves models split at attention"),
    ],
)
def test_what_makes_no_sense_is_refused(
    folder: str, flags: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compile", folder, "--quiet", *flags]) == 2
    assert reason in capsys.readouterr().err
