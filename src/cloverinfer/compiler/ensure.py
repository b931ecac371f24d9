"""Compiles a model's folder into an artifact: into the cache once, or where a user says.

What starts nodes asks for the cached one before they do, so that nodes find it there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from ..core.errors import ModelError
from ..models.arch import COMPILED
from ..models.base import ModelArch
from ..models.cache import (
    Progress,
    cache_root,
    is_whole,
    locked,
    scratch_folder,
    silent,
    write_stamp,
)
from ..models.compiled import FORMAT, MANIFEST, Manifest, transformers_version
from . import huggingface
from .artifact import Origin, write_artifact
from .capture import Captured
from .check import check_original, check_parts, check_rows
from .find import capture_huggingface
from .partition import Stage, split_at_attention
from .run import Parts

_DEFAULT_POSITIONS = 2048
"""Longest context of a model that has no limit of its own."""


@dataclass(frozen=True)
class Source:
    """A Hugging Face folder and how its weights are read."""

    name: str
    folder: Path
    fingerprint: str
    load_format: str
    """safetensors, pt, converted or dummy."""
    dtype: str
    seed: int | None = None
    """Of random weights; None: the folder's."""
    generation: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Compiled:
    """A model split at attention, checked, in memory; its weights are the model's."""

    captured: Captured
    stages: list[Stage]
    arch: ModelArch


def compile_source(source: Source, progress: Progress = silent) -> Compiled:
    """Loads, captures, splits and checks; ``ModelError`` says what prevents it, by name."""
    config = huggingface.read_config(source.folder)
    progress(f"compiling {source.name}: loading the weights")
    dtype = getattr(torch, source.dtype)
    model = huggingface.load_model(source.folder, config, dtype, source.seed)
    progress(f"compiling {source.name}: tracing")
    try:
        captured = capture_huggingface(model)
        stages = split_at_attention(captured)
        arch = arch_of(config, captured, source.generation or {})
        progress(f"compiling {source.name}: checking against the original")
        check_huggingface(model, captured, stages)
    except ModelError as problem:
        raise ModelError(f"{type(model).__name__}: {problem}") from problem
    return Compiled(captured, stages, arch)


def check_huggingface(model: nn.Module, captured: Captured, stages: list[Stage]) -> None:
    """All checks, ``model`` with its own attention being the original."""
    _, has_positions = huggingface.inputs_of(model)

    def original(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        given = {"position_ids": positions[None]} if has_positions else {}
        with huggingface.as_written(model):
            logits: torch.Tensor = model(ids[None], **given).logits[0]
        return logits

    parts = Parts(captured, stages)
    check_parts(captured, parts)
    check_rows(captured, parts)
    check_original(captured, original)


def arch_of(config: Any, captured: Captured, generation: Mapping[str, Any]) -> ModelArch:
    """The model's shape as its graph has it; names and limits as its configuration has them."""
    specs = [captured.spec_of(call) for call in captured.calls]
    heads = {int(call.args[0].meta["val"].shape[1]) for call in captured.calls}
    if len(heads) > 1:
        raise ModelError(f"layers with different numbers of query heads ({sorted(heads)})")
    eos: list[int] = []
    for value in (generation.get("eos_token_id"), config.eos_token_id):
        eos += [value] if isinstance(value, int) else list(value or ())
    return ModelArch(
        family=COMPILED,
        num_layers=len(specs),
        hidden_size=int(getattr(config, "hidden_size", 0)),
        num_heads=heads.pop(),
        num_kv_heads=specs[0].kv_heads,
        head_dim=specs[0].k_dim,
        intermediate_size=0,
        vocab_size=int(captured.logits.meta["val"].shape[-1]),
        max_position=max_position_of(config),
        eos_token_ids=tuple(dict.fromkeys(eos)),
        bos_token_id=config.bos_token_id,
        extra={"layers": msgspec.to_builtins(specs), "model": type(config).__name__},
    )


def max_position_of(config: Any) -> int:
    for name in ("max_position_embeddings", "max_seq_len", "n_positions"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return _DEFAULT_POSITIONS


def compile_to(
    source: Source, folder: Path, compiled: Compiled, progress: Progress = silent
) -> Manifest:
    """Writes ``compiled`` into ``folder``, made if need be, whole or not at all."""
    with locked(folder, progress), scratch_folder(folder) as part:
        origin = Origin(
            source.name, source.folder, source.fingerprint, source.load_format, source.seed
        )
        manifest = write_artifact(
            part, compiled.captured, compiled.stages, compiled.arch, origin, progress
        )
        made = sorted(item.name for item in part.iterdir())
        for name in sorted(made, key=lambda name: name == MANIFEST):  # it says that all is there
            (part / name).replace(folder / name)
        write_stamp(folder, made)
    return manifest


def ensure_compiled(source: Source, progress: Progress = silent) -> Path:
    """The cached artifact of ``source``, compiled now if it is not there."""
    folder = cached_folder(source)
    if is_whole(folder, [MANIFEST]):
        return folder
    with locked(folder.with_name(folder.name + ".making"), progress):
        if not is_whole(folder, [MANIFEST]):
            compile_to(source, folder, compile_source(source, progress), progress)
    return folder


def cached_folder(source: Source) -> Path:
    """Named by all that what is compiled depends on."""
    versions = (FORMAT, str(torch.__version__), transformers_version())
    key = (source.fingerprint, source.dtype, source.seed, *versions)
    digest = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
    stem = source.folder.name or "model"
    return cache_root() / "compiled" / f"{stem}-{source.dtype}-{digest}"
