"""Weights of every kind of folder, whole and damaged; resolving a configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.tiny_models import make_tiny

from cloverinfer.config import ModelConfig
from cloverinfer.core.errors import ConfigError, ModelError
from cloverinfer.models import load_half, load_tokenizer, resolve_model
from cloverinfer.models.llama import LlamaHalf
from cloverinfer.models.weights import PickledSource, SafetensorsSource


def head_of(folder: Path, **settings: str) -> torch.Tensor:
    config = ModelConfig(model_path=str(folder), dtype="float32", **settings)
    half = load_half(resolve_model(config))
    assert isinstance(half, LlamaHalf)
    return half._weights.head.weight


def pickled(folder: Path, shards: int) -> None:
    """The folder's weights as ``pytorch_model.bin``, or as shards of it with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    if shards == 1:
        torch.save(tensors, folder / "pytorch_model.bin")
        return
    index = {}
    for number in range(shards):
        name = f"pytorch_model-{number + 1:05d}.bin"
        part = dict(list(tensors.items())[number::shards])
        torch.save({key: value.clone() for key, value in part.items()}, folder / name)
        index |= dict.fromkeys(part, name)
    text = json.dumps({"weight_map": index})
    (folder / "pytorch_model.bin.index.json").write_text(text)


def sharded(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    index = {}
    for number in (1, 2):
        name = f"model-{number:05d}-of-00002.safetensors"
        part = dict(list(tensors.items())[number - 1 :: 2])
        save_file(part, folder / name)
        index |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny("llama", tmp_path / "model")


@pytest.mark.parametrize("kind", ["sharded", "bin", "bin-sharded"])
def test_every_form_of_the_same_weights(folder: Path, kind: str) -> None:
    expected = head_of(folder).clone()
    sharded(folder) if kind == "sharded" else pickled(folder, 3 if "-" in kind else 1)
    assert torch.equal(head_of(folder), expected)
    named = {"sharded": "safetensors"}.get(kind, "pt")
    assert torch.equal(head_of(folder, load_format=named), expected)
    with pytest.raises(ModelError, match="there is no"):
        head_of(folder, load_format="pt" if named == "safetensors" else "safetensors")


def test_names_without_their_prefix_are_found(folder: Path) -> None:
    expected = head_of(folder).clone()
    path = folder / "model.safetensors"
    renamed = {key.removeprefix("model."): value for key, value in load_file(path).items()}
    save_file(renamed, path)
    assert torch.equal(head_of(folder), expected)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path)
    with pytest.raises(ModelError, match=r"model\.safetensors.*layers\.1\.mlp\.up_proj.*missing"):
        head_of(folder)


def test_a_wrong_shape_is_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    save_file(load_file(path) | {"model.norm.weight": torch.ones(63)}, path)
    with pytest.raises(ModelError, match=r"model\.norm\.weight.*\[63\].*\[64\]"):
        head_of(folder)


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
@pytest.mark.parametrize("keep", [0, 5, 0.5, 0.99])
def test_truncated_weights_are_refused(folder: Path, kind: str, keep: float) -> None:
    if kind == "bin":
        pickled(folder, 1)
    path = folder / ("pytorch_model.bin" if kind == "bin" else "model.safetensors")
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data)) if 0 < keep < 1 else int(keep)])
    with pytest.raises(ModelError, match=f"{path.name}.*damaged"):
        head_of(folder)


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return (print, ("run by the pickle",))


def test_a_pickle_may_not_run_code(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Evil()}, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin"):
        head_of(folder)
    assert "run by" not in capsys.readouterr().out


def test_a_missing_shard_is_named(folder: Path) -> None:
    sharded(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match="model-00002-of-00002"):
        head_of(folder)


def test_sources_say_what_they_have(folder: Path) -> None:
    source = SafetensorsSource.of_file(folder / "model.safetensors")
    assert source.shapes()["model.norm.weight"] == (64,)
    pickled(folder, 1)
    assert PickledSource.of_file(folder / "pytorch_model.bin").has("model.norm.weight")


def test_fingerprints_tell_models_apart(folder: Path, tmp_path: Path) -> None:
    def of(path: Path, dtype: str = "float32") -> str:
        return resolve_model(ModelConfig(model_path=str(path), dtype=dtype)).fingerprint

    same = make_tiny("llama", tmp_path / "same")
    other = make_tiny("llama", tmp_path / "other", seed=1)
    assert of(folder) == of(folder) == of(same)
    assert of(folder) != of(other)
    assert of(folder) == of(folder, "bfloat16"), "the type is compared by itself"


def test_lengths(folder: Path) -> None:
    def limit(wanted: int | None) -> int:
        return resolve_model(
            ModelConfig(model_path=str(folder), max_model_len=wanted)
        ).max_model_len

    assert limit(None) == 512
    assert limit(100) == 100
    with pytest.raises(ConfigError, match=r"max_model_len is 513.*512"):
        limit(513)


def test_eos_ids_come_from_both_files(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 0]}))
    assert resolve_model(ModelConfig(model_path=str(folder))).eos_token_ids == (7, 0)


def test_bad_paths_say_what_is_known(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="did you mean 'smollm2-135m'"):
        resolve_model(ModelConfig(model_path="smollm-135m"))
    with pytest.raises(ModelError, match="names on a hub are not downloaded"):
        resolve_model(ModelConfig(model_path="meta-llama/Llama-3.2-1B"))
    with pytest.raises(ModelError, match=r"known name.*smollm2-135m"):
        resolve_model(ModelConfig(model_path=str(tmp_path / "nothing")))
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve_model(ModelConfig(model_path=str(tmp_path)))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json.*JSON"):
        resolve_model(ModelConfig(model_path=str(tmp_path), load_format="dummy"))


def test_a_folder_without_tokenizer_says_so(folder: Path) -> None:
    with pytest.raises(ModelError, match="token ids"):
        load_tokenizer(resolve_model(ModelConfig(model_path=str(folder))))
