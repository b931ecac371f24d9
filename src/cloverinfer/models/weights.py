"""Weights by name: where tensors come from, and how a dense half takes them.

A ``WeightSource`` yields one tensor at a time under its Hugging Face name, in the type of the
file. A ``Checkpoint`` is what a dense half loads from: it checks shapes, casts and fuses. Neither
knows what a model does with its tensors.
"""

from __future__ import annotations

import hashlib
import json
import pickle
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from ..core.errors import ModelError
from .fp8 import fp8_fits, make_fp8_linear
from .linear import Linear, make_linear

Shape = tuple[int, ...]
CPU = torch.device("cpu")

SAFETENSORS = "model.safetensors"
PICKLED = "pytorch_model.bin"
_AGAIN = "download or convert the model again"
_SUM_DEVIATION = (4 * (256**2 - 1) / 12) ** 0.5
"""Of the sum of four bytes."""
_DRAWN = {True: 1 << 17, False: 1 << 26}
"""Elements drawn at a time: on a CPU as many as its cache holds, else as many as fit beside."""


class WeightSource(ABC):
    """Tensors by Hugging Face name. Reading is lazy; what is read is not kept."""

    where: str
    """The file or folder, for messages."""

    @abstractmethod
    def has(self, name: str) -> bool:
        """Whether there is such a tensor."""

    @abstractmethod
    def load(self, name: str, shape: Shape) -> torch.Tensor:
        """The tensor, in the type that is stored; ``shape`` is what the caller expects of it.

        ``ModelError`` names the file and the tensor where it cannot be read.
        """


class Checkpoint:
    """A source's tensors, checked and in ``dtype``: what a dense half is made of."""

    def __init__(
        self,
        source: WeightSource,
        dtype: torch.dtype,
        int8: bool = False,
        device: torch.device = CPU,
        fp8: bool = False,
    ) -> None:
        """``int8``: matrices are to be quantised by whoever packs them; ``device``: where tensors
        are wanted; ``fp8``: layers' matrices are kept in float8, which ``check_fp8`` allows."""
        self.source = source
        self.dtype = dtype
        self.int8 = int8
        self.device = device
        self.fp8 = fp8
        self.batch_invariant = False
        """Of products, where the device has such: to be set before anything is read."""

    def get(self, name: str, shape: Shape) -> torch.Tensor:
        """The tensor ``name``; ``ModelError`` if it is missing or not of ``shape``."""
        # Moved first: a device casts faster, and what files hold is seldom the wider type.
        return self._read(name, shape).to(self.device).to(self.dtype)

    def linear(
        self, parts: Sequence[tuple[str, int]], inputs: int, bias: bool, packed: bool = True
    ) -> Linear:
        """The projections ``parts`` (name without ``.weight``, outputs) as one product."""
        if len(parts) == 1:
            name, outputs = parts[0]
            weight = self.get(name + ".weight", (outputs, inputs)).contiguous()
        else:
            weight = self._stack([(n + ".weight", (outputs, inputs)) for n, outputs in parts])
        biases = self._biases(parts) if bias else None
        if self.fp8 and fp8_fits(*weight.shape):
            return make_fp8_linear(weight, biases, self.batch_invariant)
        return make_linear(weight, biases, packed, self.batch_invariant)

    def product(self, name: str, weight: torch.Tensor, packed: bool = True) -> Linear:
        """A product with ``weight``, which is the tensor ``name`` as ``get`` gave it."""
        return make_linear(weight, None, packed, self.batch_invariant)

    def _biases(self, parts: Sequence[tuple[str, int]]) -> torch.Tensor:
        return self._stack([(name + ".bias", (outputs,)) for name, outputs in parts])

    def _stack(self, parts: list[tuple[str, Shape]]) -> torch.Tensor:
        """The tensors one below the other, cast as they are copied."""
        rows = sum(shape[0] for _, shape in parts)
        out = torch.empty((rows, *parts[0][1][1:]), dtype=self.dtype, device=self.device)
        at = 0
        for name, shape in parts:
            out[at : at + shape[0]] = self._read(name, shape)
            at += shape[0]
        return out

    def _read(self, name: str, shape: Shape) -> torch.Tensor:
        # Checkpoints of the bare model, without its head, lack the first part of the name.
        stored = name if self.source.has(name) else name.removeprefix("model.")
        if not self.source.has(stored):
            raise ModelError(
                f"{self.source.where}: tensor {name!r} is missing; "
                f"the weights do not belong to this config.json or are incomplete: {_AGAIN}"
            )
        tensor = self.source.load(stored, shape)
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"{self.source.where}: tensor {stored!r} has shape {list(tensor.shape)}, "
                f"but config.json asks for {list(shape)}: {_AGAIN}"
            )
        return tensor


class SafetensorsSource(WeightSource):
    """One safetensors file, or the shards that an index lists."""

    def __init__(self, files: dict[str, Path], where: str) -> None:
        """``files``: which file holds each tensor."""
        self.where = where
        self._files = files
        self._open: dict[Path, safe_open] = {}

    @classmethod
    def of_file(cls, path: Path) -> SafetensorsSource:
        """All tensors of one file."""
        names = _open_safetensors(path).keys()
        return cls(dict.fromkeys(names, path), str(path))

    def has(self, name: str) -> bool:
        return name in self._files

    def load(self, name: str, shape: Shape) -> torch.Tensor:
        path = self._files[name]
        if path not in self._open:
            self._open[path] = _open_safetensors(path)
        try:
            return self._open[path].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path}: cannot read tensor {name!r} ({error}): {_AGAIN}") from error

    def shapes(self) -> dict[str, Shape]:
        """Of all tensors, in the order of the names."""
        found = {}
        for name in sorted(self._files):
            path = self._files[name]
            if path not in self._open:
                self._open[path] = _open_safetensors(path)
            found[name] = tuple(self._open[path].get_slice(name).get_shape())
        return found


class PickledSource(WeightSource):
    """``pytorch_model.bin``, or its shards; read without running what a pickle may ask for."""

    def __init__(self, files: dict[str, Path], where: str) -> None:
        self.where = where
        self._files = files
        self._loaded: dict[Path, dict[str, torch.Tensor]] = {}

    @classmethod
    def of_file(cls, path: Path) -> PickledSource:
        """All tensors of one file."""
        tensors = _load_pickled(path)
        source = cls(dict.fromkeys(tensors, path), str(path))
        source._loaded[path] = tensors
        return source

    def has(self, name: str) -> bool:
        return name in self._files

    def load(self, name: str, shape: Shape) -> torch.Tensor:
        path = self._files[name]
        if path not in self._loaded:
            self._loaded[path] = _load_pickled(path)
        if name not in self._loaded[path]:
            raise ModelError(
                f"{path}: tensor {name!r} is missing, but the index lists it: {_AGAIN}"
            )
        return self._loaded[path][name]


class DummySource(WeightSource):
    """Random weights of any name and shape, made on ``device``: the same bits for the same seed on
    every device, so that nodes on different ones have one model.

    Matrices have variance 1 / inputs, so that the hidden rows and the logits stay of order one;
    norms are one, biases small.
    """

    def __init__(self, seed: int, device: torch.device = CPU) -> None:
        self.where = f"random weights of seed {seed}"
        self._seed = seed
        self._device = device

    def has(self, name: str) -> bool:
        return True

    def load(self, name: str, shape: Shape) -> torch.Tensor:
        if "norm" in name and name.endswith(".weight"):
            return torch.ones(shape, device=self._device)
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        key = int.from_bytes(digest[:4], "little", signed=True)
        salt = int.from_bytes(digest[4:8], "little", signed=True)
        scale = shape[-1] ** -0.5 if len(shape) > 1 else 0.02
        return _draw((key, salt), shape, scale, self._device)


def _draw(key: tuple[int, int], shape: Shape, scale: float, device: torch.device) -> torch.Tensor:
    """float32 of about a normal distribution with that deviation: the sum of the four bytes of
    each element's hash. Integers up to the one product, so every device has the same bits."""
    out = torch.empty(shape, device=device)
    flat, size = out.view(-1), _DRAWN[device.type == "cpu"]
    for at in range(0, out.numel(), size):
        part = flat[at : at + size]
        x = torch.arange(at, at + part.numel(), dtype=torch.int32, device=device)
        _hash(x, key)
        pairs = (x & 0x00FF00FF).add_((x >> 8).bitwise_and_(0x00FF00FF))
        sums = (pairs & 0xFFFF).add_(pairs.bitwise_right_shift_(16))
        torch.mul(sums.sub_(510), _float32(scale / _SUM_DEVIATION), out=part)
    return out


def _hash(x: torch.Tensor, key: tuple[int, int]) -> None:
    """In place, of int32: Wellons' lowbias32, whose shifts are of unsigned numbers. The key enters
    twice: once alone, tensors would be windows of one sequence."""
    x.add_(key[0])
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(0x7FEB352D).bitwise_xor_(key[1])
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(0x846CA68B - (1 << 32))
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def _float32(value: float) -> float:
    """Rounded, so that no device multiplies by more digits than another."""
    return float(torch.tensor(value, dtype=torch.float32))


def open_weights(folder: Path, load_format: str) -> WeightSource:
    """The weights of a Hugging Face folder; ``load_format``: auto, safetensors or pt.

    auto takes safetensors where there are any. ``ModelError`` says which files were looked for.
    """
    kinds: dict[str, tuple[str, type[SafetensorsSource] | type[PickledSource]]] = {
        "safetensors": (SAFETENSORS, SafetensorsSource),
        "pt": (PICKLED, PickledSource),
    }
    tried = list(kinds) if load_format == "auto" else [load_format]
    for kind in tried:
        name, source = kinds[kind]
        index = folder / f"{name}.index.json"
        if index.exists():
            return source(_read_index(index), str(folder))
        if (folder / name).exists():
            return source.of_file(folder / name)
    names = " or ".join(f"{kinds[kind][0]}[.index.json]" for kind in tried)
    raise ModelError(f"{folder}: there is no {names}; load_format 'dummy' runs without weights")


def weight_files(folder: Path, load_format: str) -> list[Path]:
    """The files that ``open_weights`` would read, the index included, sorted."""
    tried = {"safetensors": (SAFETENSORS,), "pt": (PICKLED,)}.get(
        load_format, (SAFETENSORS, PICKLED)
    )
    for name in tried:
        index = folder / f"{name}.index.json"
        if index.exists():
            return [index, *sorted(set(_read_index(index).values()))]
        if (folder / name).exists():
            return [folder / name]
    return []


def _read_index(index: Path) -> dict[str, Path]:
    """Tensor name to shard; every shard must be there."""
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {name: index.parent / str(file) for name, file in names.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index}: not a weights index ({error!r}): {_AGAIN}") from error
    missing = sorted({path.name for path in files.values() if not path.is_file()})
    if missing:
        raise ModelError(f"{index}: shards are missing: {', '.join(missing)}: {_AGAIN}")
    return files


def _open_safetensors(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: damaged or truncated safetensors ({error}): {_AGAIN}") from error


def _load_pickled(path: Path) -> dict[str, torch.Tensor]:
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise ModelError(f"{path}: damaged or truncated weights ({reason}): {_AGAIN}") from error
    if not isinstance(tensors, dict) or not all(torch.is_tensor(t) for t in tensors.values()):
        raise ModelError(f"{path}: not a dictionary of tensors, as a model's weights should be")
    return tensors
