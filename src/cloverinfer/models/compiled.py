"""A dense half that the compiler made: graphs and weights in a folder, loaded without tracing.

It owns the folder's format and what makes one stale. It knows neither transformers nor how graphs
are captured and cut; only ``compiler`` writes such folders.

A folder holds ``clover-compiled.json`` (a ``Manifest``), one file per distinct graph (stages that
differ by their weights only share one), ``model.safetensors`` with each weight once, and the
configuration and tokenizer of the model.

Shapes: t tokens, h query heads, n KV heads, d key size, e value size.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.export.passes import move_to_device_pass

from ..attention.base import FusedRows
from ..core.errors import ConfigError, ModelError
from ..kvcache.layout import KVSpec
from .arch import kv_specs
from .arena import Arenas
from .base import QKV, Carry, DenseHalf, ModelArch, UnrotatedStages, place
from .cache import sha256_of
from .chain import Direct, is_by_token
from .fuse import Fused, fuse, kernels_serve, turns_serve, unchanged
from .kernel_operators import turn
from .lowering import WARM_TOKENS, compiling, lower, require
from .operators import exporting  # and registers what graphs call
from .places import Bound, Place
from .turning import equal_halves
from .weights import CPU, SAFETENSORS, SafetensorsSource

MANIFEST = "clover-compiled.json"
FORMAT = 2
"""Raised with every change of what the compiler writes or how it cuts."""
LOAD_TIMEOUT = 300.0
"""Seconds to wait for other threads that load graphs."""
_LOADING = threading.Lock()
_SAMPLE = 1 << 16
_ORDER = 1 << 14
"""Tokens of a step whose numbers, from 0 on, are kept on the device."""


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
    transformers: str
    """The version of transformers whose code the graphs are of."""
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
        same = (self.format, self.transformers, self.source_fingerprint, self.dtype, self.arch)
        return hashlib.sha256(msgspec.json.encode(same, order="sorted")).hexdigest()

    def content_hash(self) -> str:
        """Of all that the folder holds."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()

    def model_arch(self) -> ModelArch:
        return ModelArch(**{**self.arch, "eos_token_ids": tuple(self.arch["eos_token_ids"])})


class _Stored(msgspec.Struct, frozen=True, kw_only=True):
    content: str
    manifest: Manifest


class _Format(msgspec.Struct, frozen=True):
    format: int


class _Started(msgspec.Struct, frozen=True):
    """What of a stored manifest is the same in every format."""

    manifest: _Format


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
        text = (folder / MANIFEST).read_bytes()
        written = msgspec.json.decode(text, type=_Started).manifest.format
        if written != FORMAT:
            raise ModelError(f"{folder}: stale: format {written}, not {FORMAT}: {again}")
        stored = msgspec.json.decode(text, type=_Stored)
    except (OSError, msgspec.MsgspecError) as problem:
        raise ModelError(
            f"{folder / MANIFEST}: not a compiled model ({problem}): {again}"
        ) from None
    manifest = stored.manifest
    _check_versions(folder, manifest, again)
    if stored.content != manifest.content_hash():
        raise ModelError(f"{folder}: its content hash does not belong to its content: {again}")
    return manifest


def _check_versions(folder: Path, manifest: Manifest, again: str) -> None:
    """A host without transformers can compile nothing else, so it takes what it is given."""
    made, here = _minor(manifest.torch), _minor(torch.__version__)
    if made != here:
        raise ModelError(f"{folder}: stale: made with PyTorch {made}, this is {here}: {again}")
    made, here = manifest.transformers, transformers_version()
    if here and made != here:
        raise ModelError(f"{folder}: stale: made with transformers {made}, here is {here}: {again}")


def transformers_version() -> str:
    """Of the transformers that is installed; empty where there is none."""
    try:
        return importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return ""


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


class CompiledHalf(DenseHalf, UnrotatedStages):
    """The stages of a compiled model. Weights are in memory once, whoever reads them."""

    def __init__(
        self,
        folder: Path,
        lowering: str = "eager",
        device: torch.device = CPU,
    ) -> None:
        """``lowering``: how graphs run, eager or inductor, which compiles them now."""
        require(lowering, device)
        manifest = read_manifest(folder)
        check_whole(folder, manifest)
        self.arch = manifest.model_arch()
        self.dtype = getattr(torch, manifest.dtype)
        self.device = device
        self.specs: tuple[KVSpec, ...] = kv_specs(self.arch, manifest.dtype)
        self._read_bytes = manifest.read_bytes
        weights = _Weights(SafetensorsSource.of_file(folder / SAFETENSORS), device)
        counts = {entry.graph: len(entry.weights) for entry in manifest.stages}
        graphs = {name: _load_graph(folder / name, device) for name in counts}
        fused = self._fuse(graphs, manifest.stages, lowering)
        lowered = {
            name: one.direct or lower(one.graph, lowering, one.small) for name, one in fused.items()
        }
        self._stages = [
            (lowered[entry.graph], weights.of(entry, fused[entry.graph].places))
            for entry in manifest.stages
        ]
        self._turns = [fused[entry.graph].turn for entry in manifest.stages]
        self._order_t = torch.arange(_ORDER if any(self._turns) else 0, device=device)
        self._kept = weights.all()
        if lowering != "eager":
            with _loading(folder), compiling(folder):
                self._warm()

    def _fuse(
        self,
        graphs: dict[str, torch.fx.GraphModule],
        stages: Sequence[StageEntry],
        lowering: str,
    ) -> dict[str, Fused]:
        """The graphs for the device, each for all stages that share it."""
        counts = {entry.graph: len(entry.weights) for entry in stages}
        if not kernels_serve(self.dtype, self.device):
            return {name: unchanged(graph, counts[name]) for name, graph in graphs.items()}
        if not turns_serve(self.device):
            chained = self.device.type == "cpu"
            return {
                name: fuse(graph, counts[name], lowering, chained) for name, graph in graphs.items()
            }
        halves: dict[str, frozenset[int]] = {}
        carried: frozenset[int] = frozenset()
        for entry in stages:
            halves[entry.graph] = halves.get(entry.graph, carried) & carried
            carried = equal_halves(graphs[entry.graph].graph, len(entry.weights), carried)
        return {
            name: fuse(graph, counts[name], lowering, halves=halves[name])
            for name, graph in graphs.items()
        }

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
        if self._turns[i] is not None:
            fused, carry = self.stage_unrotated(i, attn_out_the, carry, token_ids_t, positions_t)
            parts = out or fused.parts  # they may stay where the product wrote them
            turn(fused, parts)
            return *parts, carry
        graph, weights = self._stages[i]
        rows = self._inputs(i, attn_out_the, carry, token_ids_t, positions_t)
        if isinstance(graph, Direct):
            return self._run_direct(i, rows, out)
        results = graph(weights, rows)
        if i == self.num_layers:
            return None, None, None, tuple(results)
        q, k, v, *rest = results
        if out is None:
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        return *place((q, k, v), out), tuple(rest)

    def stage_unrotated(
        self,
        i: int,
        attn_out_the: torch.Tensor | None,
        carry: Carry | None,
        token_ids_t: torch.Tensor | None,
        positions_t: torch.Tensor,
    ) -> tuple[FusedRows, Carry]:
        """Each token has a row of its own in the tables that the graph gives."""
        cut = self._turns[i]
        assert cut is not None
        run, weights = self._stages[i]
        rows = self._inputs(i, attn_out_the, carry, token_ids_t, positions_t)
        qkv_thd, cos, sin, *rest = run(weights, rows)
        tokens, rope = len(qkv_thd), (cos.contiguous(), sin.contiguous())
        order_t = self._order_t[:tokens]
        if tokens > len(order_t):
            order_t = torch.arange(tokens, device=self.device)
        return FusedRows(qkv_thd, cut.kv_heads, order_t, rope), tuple(rest)

    def unrotated(self) -> UnrotatedStages | None:
        every = all(cut is not None for cut in self._turns[: self.num_layers])
        return self if every and self.device.type == "cuda" else None

    def _inputs(
        self,
        i: int,
        attn_out_the: torch.Tensor | None,
        carry: Carry | None,
        token_ids_t: torch.Tensor | None,
        positions_t: torch.Tensor,
    ) -> Carry:
        """What a stage's graph takes after its weights."""
        first = token_ids_t if i == 0 else attn_out_the
        assert first is not None
        return positions_t, first, *(carry or ())

    def _run_direct(
        self, i: int, rows: Carry, out: QKV | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, Carry]:
        """A stage that is one chain, which writes q, k and v to where they are wanted."""
        run, weights = self._stages[i]
        assert isinstance(run, Direct)
        if i == self.num_layers:
            return None, None, None, run(weights, rows)
        fits = out is not None and run.makes_first(3) and all(is_by_token(one) for one in out)
        results = run(weights, rows, out if fits else None)
        q, k, v, *carry = results
        return *place((q, k, v), None if fits else out), tuple(carry)

    def _warm(self) -> None:
        """Has every graph compiled for one token and for any number, before a step needs it."""
        for tokens in WARM_TOKENS:
            positions_t = torch.arange(tokens, device=self.device)
            first: torch.Tensor = torch.zeros_like(positions_t)
            carry: Carry = ()
            for i in range(self.num_layers + 1):
                *_, carry = self.stage(i, first, carry, first, positions_t)
                if i < self.num_layers:
                    shape = (tokens, self.arch.num_heads, self.specs[i].v_dim)
                    first = torch.zeros(shape, dtype=self.dtype, device=self.device)

    def logits(self, carry: Carry) -> torch.Tensor:
        return self.raw_logits(carry).float()

    def raw_logits(self, carry: Carry) -> torch.Tensor:
        (logits_tc,) = carry
        return logits_tc


class _Weights:
    """Of a file, on a device, each made once, whichever stages read it."""

    def __init__(self, source: SafetensorsSource, device: torch.device) -> None:
        self._source, self._device = source, device
        self._shapes = source.shapes()
        self._made: dict[Any, torch.Tensor] = {}
        self._arenas = Arenas()

    def of(self, entry: StageEntry, places: Sequence[Place | Bound]) -> list[torch.Tensor]:
        """What the stage's graph takes first."""
        return [
            self._addresses(entry, place) if isinstance(place, Bound) else self._of(entry, place)
            for place in places
        ]

    def all(self) -> list[torch.Tensor]:
        """What was made so far."""
        return list(self._made.values())

    def _addresses(self, entry: StageEntry, bound: Bound) -> torch.Tensor:
        """Whoever calls with them keeps ``all`` of them alive."""
        tensors = [self._of(entry, place) for place in bound.places]
        return torch.tensor([one.data_ptr() for one in tensors], dtype=torch.int64)

    def _of(self, entry: StageEntry, place: Place) -> torch.Tensor:
        names = tuple(entry.weights[i] for i in place.parts)
        key = names, place.folds, place.transposed, place.floats, place.experts, place.computed
        if key not in self._made:
            parts = [self._source.load(name, self._shapes[name]) for name in names]
            self._made[key] = place.make([part.to(self._device) for part in parts], self._arenas)
        return self._made[key]


def _load_graph(path: Path, device: torch.device) -> torch.fx.GraphModule:
    try:
        with _loading(path), exporting():
            program = torch.export.load(path)
            if device.type != "cpu":  # what a graph makes anew is on the device it was traced on
                program = move_to_device_pass(program, str(device))
            return program.graph_module
    except (RuntimeError, OSError, ValueError, KeyError) as problem:
        raise ModelError(f"{path}: cannot be loaded ({problem}): compile again") from problem


@contextlib.contextmanager
def _loading(path: Path) -> Iterator[None]:
    """Not safe in several threads at a time, and nodes of one process load in theirs."""
    if not _LOADING.acquire(timeout=LOAD_TIMEOUT):
        raise ModelError(f"{path}: another node of this process has been loading for too long")
    try:
        yield
    finally:
        _LOADING.release()


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
