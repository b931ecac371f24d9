"""Compiled models: split equals whole, and served they give the tokens that transformers gives."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch._inductor.config
from tests import compiled_models, same_tokens, tiny_models
from torch._dynamo.utils import counters

from cloverinfer import LLM, ModelConfig, SamplingParams
from cloverinfer.compiler import huggingface
from cloverinfer.compiler.ensure import Source, cached_folder, check_huggingface
from cloverinfer.compiler.find import capture_huggingface
from cloverinfer.compiler.partition import split_at_attention
from cloverinfer.compiler.run import Parts
from cloverinfer.core.errors import CloverError, ConfigError, ModelError
from cloverinfer.models import load_half, resolve_model
from cloverinfer.models.compiled import FORMAT, MANIFEST, read_manifest

ALWAYS = ("falcon", "qwen2_moe", "gemma2", "bloom")
"""Torch's own attention; experts; windows and soft-caps; written out with ALiBi. The others run in
``make test-models``."""
TOKENS = 32


def architectures() -> list[Any]:
    return [
        pytest.param(name, marks=[] if name in ALWAYS else pytest.mark.models)
        for name in compiled_models.ARCHITECTURES
    ]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLOVER_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", architectures())
def test_split_is_whole_and_serves_the_same_tokens(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    model = compiled_models.make_model(name, folder)
    cases = same_tokens.reference(model, [list(range(3, 40)), [5, 6, 7]], TOKENS)
    outputs = same_tokens.run(str(folder), cases, TOKENS, topology="pda", executor="local")
    same_tokens.check(cases, outputs)
    huggingface.prepare(model)
    captured = capture_huggingface(model)
    stages = split_at_attention(captured)
    check_huggingface(model, captured, stages)
    ids = torch.randint(0, 96, (50,), generator=torch.Generator().manual_seed(3))
    split = Parts(captured, stages).run(ids, torch.arange(50))
    assert torch.equal(split, captured.run(ids, torch.arange(50)))
    if huggingface.attention_of(type(model)) == huggingface.NAME:
        with torch.no_grad():  # the module itself, with the operator for its attention
            assert torch.equal(split, model(ids[None]).logits[0])


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_native_and_compiled_halves_give_the_same_tokens(family: str, tmp_path: Path) -> None:
    folder = str(tiny_models.make_tiny(family, tmp_path / family))
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    outputs = {}
    for impl in ("native", "compiled"):
        config = ModelConfig(model_path=folder, dtype="float32", model_impl=impl)
        for topology in ("pd", "colocated"):
            with LLM(config, topology=topology, executor="local") as llm:
                found = llm.generate([list(range(3, 40)), [5, 6, 7]], params)
            outputs[impl, topology] = [one.token_ids for one in found]
    assert len({json.dumps(tokens) for tokens in outputs.values()}) == 1


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    compiled_models.make_model("gpt_neox", tmp_path / "model")
    return tmp_path / "model"


def resolve(path: Path, **fields: Any) -> Any:
    return resolve_model(ModelConfig(model_path=str(path), dtype="float32", **fields))


def logits_on(device: torch.device, model: Any) -> torch.Tensor:
    """Of a step on a device, where graphs that make tensors must make them too."""
    half, carry, out = load_half(model, device=device), None, None
    tokens = torch.zeros(5, dtype=torch.int64, device=device)
    for i in range(half.num_layers + 1):
        q, _, v, carry = half.stage(i, out, carry, tokens, tokens)
        if q is not None:
            out = torch.empty((5, q.shape[1], v.shape[2]), device=device)
    return half.logits(carry)


def test_a_model_is_compiled_once_and_stages_share_graphs(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    said: list[str] = []
    config = ModelConfig(model_path=str(folder), dtype="float32")
    model = resolve_model(config, said.append)
    assert any("tracing" in line for line in said)
    assert model.load_format == "compiled"
    again = resolve_model(config, said.append)
    assert sum("tracing" in line for line in said) == 1
    assert again.fingerprint == model.fingerprint
    half = load_half(model, batch_invariant=True)
    assert "batch_invariant changes nothing" in caplog.text
    assert half.num_layers == 2
    assert half.weight_bytes > 0
    assert logits_on(torch.device("meta"), model).device.type == "meta"
    assert resolve(folder, seed=1, load_format="dummy").fingerprint != model.fingerprint


def test_what_was_compiled_is_refused_when_it_no_longer_fits(folder: Path) -> None:
    made = resolve(folder).path
    with pytest.raises(ConfigError, match=r"model\.model_impl is native"):
        resolve(made, model_impl="native")
    with pytest.raises(ConfigError, match="compiled in float32"):
        resolve_model(ModelConfig(model_path=str(made), dtype="bfloat16"))
    manifest = made / MANIFEST
    text = manifest.read_text()
    for old, new, reason in (
        (f'"format": {FORMAT}', '"format": 1', "stale: format 1"),
        ('"torch": "2', '"torch": "1', "stale: made with PyTorch 1"),
        ('"transformers": "', '"transformers": "0.', "stale: made with transformers 0"),
        ('"window": null', '"window": 4', "content hash"),
    ):
        manifest.write_text(text.replace(old, new))
        with pytest.raises(ModelError, match=reason):
            resolve(made)
    manifest.write_text(text)
    resolve(made)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"layer_norm_eps": 0.5}))
    with pytest.raises(ModelError, match=r"stale: .* has changed since"):
        resolve(made)


def test_what_another_transformers_made_is_not_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source("tiny", folder, "fingerprint", "safetensors", "float32")
    model, place, real = resolve(folder), cached_folder(source), importlib.metadata.version
    manifest = read_manifest(model.path)
    assert manifest.transformers == real("transformers")
    other = msgspec.structs.replace(manifest, transformers="0.1")
    assert other.identity() != manifest.identity()  # such nodes do not belong together
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "0.1" if name == "transformers" else real(name)
    )
    assert cached_folder(source) != place
    with pytest.raises(ModelError, match=r"stale: made with transformers .*, here is 0\.1"):
        load_half(model)


@pytest.mark.models
@pytest.mark.parametrize("name", ["gpt_neox", "qwen2_moe"])
def test_inductor_gives_the_tokens_of_eager_and_compiles_in_no_step(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a folder that was saved: nothing is traced by transformers."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    compiled_models.make_model(name, tmp_path / name)
    saved = str(resolve(tmp_path / name).path)
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    outputs = []
    for lowering in ("eager", "inductor"):
        config = ModelConfig(model_path=saved, lowering=lowering)
        with LLM(config, topology="pda", executor="local") as llm:
            before = counters["stats"]["unique_graphs"]
            found = llm.generate([list(range(3, 40)), [5, 6, 7], [9]], params)
            assert counters["stats"]["unique_graphs"] == before
        outputs.append([one.token_ids for one in found])
    assert before > 0  # it was compiled, before the first step
    assert outputs[0] == outputs[1]


def test_inductor_without_a_compiler_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", (None, "/nonexistent/g++"))
    model = resolve(folder, lowering="inductor")
    with pytest.raises(ModelError, match=r"needs a C\+\+ compiler .* install g\+\+"):
        load_half(model)


@pytest.mark.parametrize("file", ["stage-1.pt2", "model.safetensors"])
def test_changed_files_are_refused(folder: Path, file: str) -> None:
    model = resolve(folder)
    with (model.path / file).open("r+b") as stream:
        stream.seek(200)
        stream.write(b"changed")
    with pytest.raises(CloverError, match="changed"):
        load_half(model)


@pytest.mark.parametrize(
    ("config_name", "fields", "reason"),
    [
        ("MambaConfig", {"num_hidden_layers": 2}, "Mamba: state-space"),
        ("DeepseekV3Config", {"num_hidden_layers": 2}, "DeepseekV3: latent-compressed"),
        (
            "MptConfig",
            {"n_layers": 2, "d_model": 64, "n_heads": 4},
            "MptForCausalLM: .*number of",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    config_name: str, fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    import transformers

    getattr(transformers, config_name)(vocab_size=96, hidden_size=64, **fields).save_pretrained(
        tmp_path
    )
    with pytest.raises(ModelError, match=reason):
        resolve(tmp_path, load_format="dummy")
