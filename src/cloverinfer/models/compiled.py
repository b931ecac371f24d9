"""A dense half that the compiler made: graphs and weights in a folder, loaded without tracing.

It owns the folder's format and what makes one stale. It knows neither transformers nor how graphs
are captured and cut; only ``compiler`` writes such folders.

A folder holds ``clover-compiled.json`` (a ``Manifest``), one file per distinct graph (stages that
differ by their weights only share one), ``model.safetensors`` with each weight once, and the
configuration and tokenizer of the model.

Shapes: t tokens, h query heads, n KV heads, d key size, e value size.
"""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.export.passes import move_to_device_pass

from ..core.errors import ConfigError, ModelError
from ..kvcache.layout import KVSpec
from .arch import kv_specs
from .base import QKV, Carry, DenseHalf, ModelArch, place
from .cache import sha256_of
from .operators import exporting  # and registers what graphs call
from .weights import CPU, SAFETENSORS, SafetensorsSource

MANIFEST = "clover-compiled.json"
FORMAT = 1
"""Raised with every change of what the compiler writes or how it cuts."""
LOAD_TIMEOUT = 300.0
"""Seconds to wait for other threads that load graphs."""
_LOADING = threading.Lock()
_SAMPLE = 1 << 16


class StageEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One stage: which graph, with which weights in its first places."""

    graph: str
    weights: tuple[str, ...]
    reads_tokens: bool
    reads_attention: bool
    asks_attention: bool


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a compiled model is."""

    format: int
    torch: str
    """PyTorch's version when it was made; graphs are of that version."""
    name: str
    """Of the model, as it was given."""
    source: str
    """Folder of the model that it was made from."""
    source_fingerprint: str
    source_format: str
    """How the model's weights were read."""
    seed: int | None
    """Of random weights."""
    dtype: str
    arch: dict[str, Any]
    """Fields of ``ModelArch``; ``extra.layers`` are the KV specs."""
    stages: tuple[StageEntry, ...]
    read_bytes: int
    """Of weights per decode step."""
    graphs: dict[str, str]
    """Each graph's file and its SHA-256."""
    weights: str
    """Size and samples of the weights, hashed."""

    def identity(self) -> str:
        """The same for the same model cut by the same rules, wherever it was compiled: nodes that
        each compiled it for themselves belong together."""
        same = (self.format, self.source_fingerprint, self.dtype, self.arch)
        return hashlib.sha256(msgspec.json.encode(same, order="sorted")).hexdigest()

    def content_hash(self) -> str:
        """Of all that the folder holds."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()

    def model_arch(self) -> ModelArch:
        return ModelArch(**{**self.arch, "eos_token_ids": tuple(self.arch["eos_token_ids"])})


class _Stored(msgspec.Struct, frozen=True, kw_only=True):
    content: str
    manifest: Manifest


def is_compiled(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    stored = _Stored(content=manifest.content_hash(), manifest=manifest)
    text = json.dumps(msgspec.to_builtins(stored), indent=1)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> Manifest:
    """``ModelError`` where the folder is damaged, or made by other versions: compile again."""
    again = "compile the model again"
    try:
        stored = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=_Stored)
    except (OSError, msgspec.MsgspecError) as problem:
        raise ModelError(
            f"{folder / MANIFEST}: not a compiled model ({problem}): {again}"
        ) from None
    manifest = stored.manifest
    if manifest.format != FORMAT:
        raise ModelError(f"{folder}: stale: format {manifest.format}, not {FORMAT}: {again}")
    if _minor(manifest.torch) != _minor(torch.__version__):
        made, here = _minor(manifest.torch), _minor(torch.__version__)
        raise ModelError(f"{folder}: stale: made with PyTorch {made}, this is {here}: {again}")
    if stored.content != manifest.content_hash():
        raise ModelError(f"{folder}: its content hash does not belong to its content: {again}")
    return manifest


def check_whole(folder: Path, manifest: Manifest) -> None:
    """``ModelError`` where graphs or weights are not those that the manifest was written for."""
    for name, digest in manifest.graphs.items():
        path = folder / name
        if not path.is_file() or sha256_of(path) != digest:
            raise ModelError(f"{path}: missing or changed since it was made: compile again")
    if not (folder / SAFETENSORS).is_file() or sampled(folder / SAFETENSORS) != manifest.weights:
        raise ModelError(f"{folder / SAFETENSORS}: missing or changed: compile again")


def sampled(path: Path) -> str:
    """A hash of a file's size, and of its bytes at the start, the middle and the end."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for at in (0, size // 2, max(0, size - _SAMPLE)):
            file.seek(at)
            digest.update(file.read(_SAMPLE))
    return digest.hexdigest()


def check_dtype(folder: Path, manifest: Manifest, wanted: str) -> None:
    """``ConfigError`` where another type is asked for than the graphs were traced in."""
    if wanted not in ("auto", manifest.dtype):
        raise ConfigError(
            f"model.dtype is {wanted}, but {folder} was compiled in {manifest.dtype}: leave it out "
            "or compile again"
        )


class CompiledHalf(DenseHalf):
    """The stages of a compiled model. Weights are in memory once, whoever reads them."""

    def __init__(
        self,
        folder: Path,
        lowering: str = "eager",
        device: torch.device = CPU,
    ) -> None:
        """``lowering``: how graphs run, eager or inductor."""
        manifest = read_manifest(folder)
        check_whole(folder, manifest)
        self.arch = manifest.model_arch()
        self.dtype = getattr(torch, manifest.dtype)
        self.device = device
        self.specs: tuple[KVSpec, ...] = kv_specs(self.arch, manifest.dtype)
        self._read_bytes = manifest.read_bytes
        source = SafetensorsSource.of_file(folder / SAFETENSORS)
        weights = {
            name: source.load(name, shape).to(device) for name, shape in source.shapes().items()
        }
        graphs = {name: _load_graph(folder / name, lowering, device) for name in manifest.graphs}
        self._stages = [
            (graphs[entry.graph], [weights[name] for name in entry.weights])
            for entry in manifest.stages
        ]

    @property
    def weight_bytes(self) -> int:
        return self._read_bytes

    def stage(
        self,
        i: int,
        attn_out_the: torch.Tensor | None,
        carry: Carry | None,
        token_ids_t: torch.Tensor | None,
        positions_t: torch.Tensor,
        out: QKV | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, Carry]:
        """The carry of stage L is the logits."""
        graph, weights = self._stages[i]
        first = token_ids_t if i == 0 else attn_out_the
        assert first is not None
        results = graph(*weights, positions_t, first, *(carry or ()))
        if i == self.num_layers:
            return None, None, None, tuple(results)
        q, k, v, *rest = results
        if out is None:
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        return *place((q, k, v), out), tuple(rest)

    def logits(self, carry: Carry) -> torch.Tensor:
        (logits_tc,) = carry
        return logits_tc.float()


def _load_graph(path: Path, lowering: str, device: torch.device) -> Any:
    # Loading is not safe in several threads at a time, and nodes of one process load in theirs.
    if not _LOADING.acquire(timeout=LOAD_TIMEOUT):
        raise ModelError(f"{path}: another node of this process has been loading for too long")
    try:
        with exporting():
            program = torch.export.load(path)
            if device.type != "cpu":  # what a graph makes anew is on the device it was traced on
                program = move_to_device_pass(program, str(device))
            module = program.graph_module
    except (RuntimeError, OSError, ValueError, KeyError) as problem:
        raise ModelError(f"{path}: cannot be loaded ({problem}): compile again") from problem
    finally:
        _LOADING.release()
    return module if lowering == "eager" else torch.compile(module, dynamic=True)


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
