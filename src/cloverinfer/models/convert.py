"""Turns a GGUF file into a Hugging Face folder once, and keeps its weights in other types too.

The folder is an ordinary one: transformers loads it. Weights are written tensor by tensor, so the
model is never in memory as a whole.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..core.errors import ModelError
from .arch import arch_from_config
from .cache import (
    Progress,
    cache_root,
    check_space,
    is_whole,
    locked,
    scratch_folder,
    write_stamp,
)
from .gguf_file import COMPILED_ONLY, GGUFFile
from .weights import SAFETENSORS, SafetensorsSource, Shape

CONFIG = "config.json"
GENERATION = "generation_config.json"
NO_TOKENIZER = "clover-no-tokenizer.txt"
"""In a converted folder without a tokenizer: why."""
_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

Entry = tuple[str, Shape, Callable[[], torch.Tensor]]
"""A tensor's name, shape and how to get it."""
TypedEntry = tuple[str, Shape, torch.dtype, Callable[[], torch.Tensor]]
"""The same, with the type that it is stored in."""


def folder_for_gguf(path: Path, progress: Progress) -> Path:
    """The cached folder of a user's GGUF file, converted now if it is not there or has changed."""
    status = path.stat()
    key = f"{path.resolve()}:{status.st_size}:{status.st_mtime_ns}"
    short = hashlib.sha256(key.encode()).hexdigest()[:16]
    folder = cache_root() / "gguf" / f"{path.stem}-{short}"
    convert_gguf(path, folder, progress)
    return folder


def convert_gguf(path: Path, folder: Path, progress: Progress) -> None:
    """Makes ``folder`` from the GGUF file at ``path``, unless it is there and whole."""
    needed = [CONFIG, GENERATION, SAFETENSORS]
    if is_whole(folder, needed):
        return
    with locked(folder, progress):
        if is_whole(folder, needed):
            return
        progress(f"converting {path.name} (once)")
        file = GGUFFile(path)
        config = file.config()
        if file.architecture not in COMPILED_ONLY:
            arch_from_config(config)  # refuses what is not supported before the work is done
        with scratch_folder(folder) as part:
            write_json(part / CONFIG, config)
            ids = ("bos_token_id", "eos_token_id", "pad_token_id")
            write_json(
                part / GENERATION, {key: config[key] for key in ids if config[key] is not None}
            )
            _write_tokenizer(file, part)
            _write_gguf_weights(file, part / SAFETENSORS, progress)
            made = sorted(item.name for item in part.iterdir())
            for name in made:
                (part / name).replace(folder / name)
        write_stamp(folder, made)


def dtype_file(folder: Path, dtype: torch.dtype) -> str:
    """Name of the weights of a converted ``folder`` in ``dtype``."""
    return SAFETENSORS if dtype == torch.float32 else f"clover-{str(dtype)[6:]}.safetensors"


def ensure_dtype(folder: Path, dtype: torch.dtype, progress: Progress) -> None:
    """Sees to it that a converted ``folder`` has its weights in ``dtype``."""
    name = dtype_file(folder, dtype)
    if is_whole(folder, [name]):
        return
    with locked(folder, progress):
        if is_whole(folder, [name]):
            return
        progress(f"casting the weights of {folder.name} to {str(dtype)[6:]} (once)")
        source = SafetensorsSource.of_file(folder / SAFETENSORS)
        entries = [
            (key, shape, lambda key=key, shape=shape: source.load(key, shape))
            for key, shape in source.shapes().items()
        ]
        with scratch_folder(folder) as part:
            write_safetensors(part / name, entries, dtype, progress)
            (part / name).replace(folder / name)
        write_stamp(folder, [name])


def write_safetensors(
    path: Path, entries: Iterable[Entry], dtype: torch.dtype, progress: Progress
) -> None:
    """Writes tensors one after another, cast to ``dtype``."""
    write_mixed(path, [(name, shape, dtype, load) for name, shape, load in entries], progress)


def write_mixed(path: Path, entries: Sequence[TypedEntry], progress: Progress) -> None:
    """Writes tensors one after another, each cast to its own type."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape, dtype, _ in entries:
        end = at + dtype.itemsize * int(torch.Size(shape).numel())
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    check_space(path.parent, at)
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 64)  # tensors start at a multiple of 64 bytes
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for number, (name, shape, dtype, load) in enumerate(entries):
            tensor = load().to(dtype).contiguous()
            assert tuple(tensor.shape) == tuple(shape), name
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
            if number % 32 == 31:
                progress(f"  {number + 1} of {len(entries)} tensors")


def write_json(path: Path, value: Any) -> None:
    """Readable JSON, UTF-8."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_gguf_weights(file: GGUFFile, path: Path, progress: Progress) -> None:
    entries: list[Entry] = []
    for name in file.names():
        shape = file.shape(name)
        entries.append((name, shape, lambda name=name, shape=shape: file.load(name, shape)))
    write_safetensors(path, entries, torch.float32, progress)


def _write_tokenizer(file: GGUFFile, folder: Path) -> None:
    """The tokenizer, or a note of why there is none: the model can be used with token ids."""
    from .gguf_tokenizer import save_tokenizer

    try:
        save_tokenizer(file, folder)
    except ModelError as error:
        (folder / NO_TOKENIZER).write_text(str(error), encoding="utf-8")
