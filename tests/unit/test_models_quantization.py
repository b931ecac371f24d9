"""Quantised weights: a GGUF file's codes as they are stored, and what a half makes of a setting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tests.tiny_models import make_tiny
from tests.unit.test_models_gguf import permute
from tests.unit.test_models_halves import PROMPT, Runner

from cloverinfer import _native
from cloverinfer.config import ModelConfig
from cloverinfer.core.errors import ConfigError, ModelError
from cloverinfer.models import load_half, resolve_model
from cloverinfer.models.fp8 import fp8_fits, interleave, quantise
from cloverinfer.models.gguf_codes import GGUFCheckpoint, read_codes
from cloverinfer.models.gguf_file import GGUFFile
from cloverinfer.models.packed import Format, QuantizedLinear

TYPES = gguf.GGMLQuantizationType
FORMATS = {"Q4_0": Format.INT4, "Q4_1": Format.INT4, "Q8_0": Format.INT8}
Q_NAME, UP_NAME = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLOVER_CACHE", str(tmp_path / "cache"))


def write_gguf(path: Path, stored: dict[str, tuple[np.ndarray, str]]) -> GGUFFile:
    """Two heads; tensors by llama.cpp's name, and the types to store them in."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    for name, (values, kind) in stored.items():
        packed = gguf.quantize(values, TYPES[kind])
        writer.add_tensor(name, packed, raw_dtype=TYPES[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFFile(path)


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(2).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("kind", FORMATS)
def test_codes_are_what_the_file_says(kind: str, tmp_path: Path) -> None:
    """Equal to what ``load`` makes of the file, rows in Hugging Face's order."""
    weights = {"blk.0.attn_q.weight": (permute(random(64, 96), 2), kind)}
    weights["blk.0.ffn_up.weight"] = (random(48, 96), kind)
    file = write_gguf(tmp_path / "x.gguf", weights)
    for name, rows in ((Q_NAME, 64), (UP_NAME, 48)):
        codes = read_codes(file, name)
        assert codes is not None
        assert codes.format is FORMATS[kind]
        assert codes.codes_oi.shape == (rows, 96)
        plain = file.load(name, (rows, 96)).double()
        assert (codes.dequantized() - plain).abs().max() <= 2.0**-23 * plain.abs().max()


def test_a_code_of_minus_128_is_kept(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "x.gguf", {"blk.0.ffn_up.weight": (random(16, 32), "Q8_0")})
    blocks = np.array(file.stored(UP_NAME)[1])  # type: ignore[index]
    blocks[3, 7] = 0x80
    file.stored = lambda name: ("Q8_0", blocks)  # type: ignore[method-assign]
    codes = read_codes(file, UP_NAME)
    assert codes is not None
    assert codes.codes_oi[3, 5] == -128


def test_matrices_of_other_types_are_read_plainly(tmp_path: Path) -> None:
    up, gate = "blk.0.ffn_up.weight", "blk.0.ffn_gate.weight"
    stored = {up: (random(16, 32), "F16"), gate: (random(16, 32), "Q4_1")}
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "x.gguf", stored), torch.bfloat16)
    at = "model.layers.0.mlp."
    alone = checkpoint.linear([(at + "gate_proj", 16)], 32, False)
    assert isinstance(alone, QuantizedLinear)
    both = checkpoint.linear([(at + "gate_proj", 16), (at + "up_proj", 16)], 32, False)
    assert not isinstance(both, QuantizedLinear)
    with pytest.raises(ModelError, match="has shape"):
        checkpoint.linear([(at + "gate_proj", 8)], 32, False)


def settings(folder: Path, **fields: Any) -> ModelConfig:
    return ModelConfig(model_path=str(folder), **fields)


@pytest.mark.skipif(_native.dense_isas() == ["portable"], reason="needs vectors")
@pytest.mark.parametrize("tied", [False, True])
def test_int8_is_near_bfloat16_in_half_the_bytes(tied: bool, tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path, initializer_range=0.1, tie_word_embeddings=tied)
    halves = [
        load_half(resolve_model(settings(folder, dtype="bfloat16"))),
        load_half(resolve_model(settings(folder, quantization="int8"))),
    ]
    assert halves[1].dtype == torch.bfloat16
    assert halves[1].weight_bytes < 0.6 * halves[0].weight_bytes
    plain, int8 = (Runner(half).forward(PROMPT) for half in halves)
    error = (int8 - plain).abs().max() / plain.abs().max()
    assert 1e-4 < error < 0.05


def test_fp8_is_near_bfloat16_in_half_the_bytes(tmp_path: Path) -> None:
    folder = make_tiny("qwen2", tmp_path, initializer_range=0.1)
    halves = [
        load_half(resolve_model(settings(folder, dtype="bfloat16"))),
        load_half(resolve_model(settings(folder, quantization="fp8"))),
    ]
    assert halves[1].dtype == torch.bfloat16
    assert halves[1].weight_bytes < 0.7 * halves[0].weight_bytes, "the head stays as it was"
    plain, fp8 = (Runner(half).forward(PROMPT) for half in halves)
    error = (fp8 - plain).abs().max() / plain.abs().max()
    assert 1e-3 < error < 0.15


def test_rows_in_float8_have_their_largest_at_the_type_s() -> None:
    torch.manual_seed(0)
    rows = torch.randn(5, 48) * torch.tensor([[1e-6], [1.0], [1e6], [0.0], [3.0]])
    quantised, scale = quantise(rows)
    assert quantised.float().abs().amax(1).tolist() == [448.0, 448.0, 448.0, 0.0, 448.0]
    error = (quantised.double() * scale - rows).abs() / rows.abs().amax(1, keepdim=True).clamp(1e-9)
    assert error.max() <= 16 / 448  # half a step below the largest
    assert fp8_fits(32, 48)
    assert not fp8_fits(32, 40)


def test_a_weight_that_is_no_number_is_not_hidden_by_float8() -> None:
    _, scale = quantise(torch.tensor([[float("nan"), 1.0], [2.0, 1.0]]))
    assert scale.isnan().flatten().tolist() == [True, False]


def test_the_order_that_the_gpu_kernel_reads_float8_in() -> None:
    columns = torch.arange(32)[None].to(torch.uint8)
    order = [0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15]
    assert interleave(columns).flatten().tolist() == [*order, *(16 + i for i in order)]


def test_what_does_not_go_with_quantisation_is_refused(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "llama")
    with pytest.raises(ConfigError, match=r"model\.quantization must be one of int8, gguf, fp8"):
        settings(folder, quantization="int3")
    with pytest.raises(ConfigError, match=r"needs model\.dtype bfloat16, not float32"):
        resolve_model(settings(folder, dtype="float32", quantization="int8"))
    with pytest.raises(ModelError, match="'gguf' needs a GGUF file"):
        resolve_model(settings(folder, quantization="gguf"))
    with pytest.raises(ConfigError, match="serves models of Llama's family"):
        resolve_model(settings(make_tiny("opt", tmp_path / "opt"), quantization="int8"))


def test_models_quantised_otherwise_are_not_taken_for_the_same(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path)
    marks = {
        resolve_model(settings(folder, quantization=kind)).fingerprint for kind in (None, "int8")
    }
    assert len(marks) == 2
