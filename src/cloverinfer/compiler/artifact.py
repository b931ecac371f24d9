"""Writes a split model as the folder that ``models.compiled`` loads."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from ..core.errors import ModelError
from ..models.base import ModelArch
from ..models.cache import Progress, sha256_of, silent
from ..models.compiled import (
    FORMAT,
    Manifest,
    StageEntry,
    sampled,
    transformers_version,
    write_manifest,
)
from ..models.convert import write_mixed
from ..models.operators import exporting
from ..models.weights import SAFETENSORS
from .capture import MOST_TOKENS, TRACED_TOKENS, Captured
from .partition import Stage

_COPIED = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
           "special_tokens_map.json", "chat_template.jinja", "clover-no-tokenizer.txt")  # fmt: skip
"""Of the model's folder: all that serving reads beside the weights."""


@dataclass(frozen=True)
class Origin:
    """What a model was compiled from."""

    name: str
    folder: Path
    fingerprint: str
    load_format: str = "safetensors"
    seed: int | None = None


def write_artifact(
    folder: Path,
    captured: Captured,
    stages: Sequence[Stage],
    arch: ModelArch,
    origin: Origin,
    progress: Progress = silent,
) -> Manifest:
    """Fills ``folder``, which is there; returns what it holds."""
    entries, graphs = _write_graphs(folder, stages)
    used = {name for stage in stages for name in stage.weights}
    tensors = {name: captured.tensors[name] for name in captured.tensors if name in used}
    write_mixed(
        folder / SAFETENSORS,
        [(n, tuple(t.shape), t.dtype, lambda t=t: t) for n, t in tensors.items()],
        progress,
    )
    for name in _COPIED:
        if (origin.folder / name).is_file():
            shutil.copyfile(origin.folder / name, folder / name)
    manifest = Manifest(
        format=FORMAT,
        torch=str(torch.__version__),
        transformers=transformers_version(),
        name=origin.name,
        source=str(origin.folder.resolve()),
        source_fingerprint=origin.fingerprint,
        source_format=origin.load_format,
        seed=origin.seed,
        dtype=str(captured.logits.meta["val"].dtype).removeprefix("torch."),
        arch=msgspec.to_builtins(asdict(arch)),
        stages=tuple(entries),
        read_bytes=read_bytes(captured),
        graphs={name: sha256_of(folder / name) for name in sorted(graphs)},
        weights=sampled(folder / SAFETENSORS),
    )
    write_manifest(folder, manifest)
    return manifest


def read_bytes(captured: Captured) -> int:
    """Bytes of weights that a step reads: all but those that rows are only looked up in."""
    lookup = torch.ops.aten.embedding.default
    return sum(
        captured.tensors[name].nbytes
        for node, name in captured.weights.items()
        if any(user.target is not lookup for user in node.users)
    )


def _write_graphs(folder: Path, stages: Sequence[Stage]) -> tuple[list[StageEntry], set[str]]:
    """One file for all stages whose graphs are the same but for the weights."""
    files: dict[str, str] = {}
    entries = []
    for index, stage in enumerate(stages):
        key = signature(stage.graph)
        if key not in files:
            files[key] = f"stage-{index}.pt2"
            program = _exported(stage)
            program._example_inputs = None  # fake tensors, which loading need not unpickle
            with exporting():
                torch.export.save(program, folder / files[key])
        entries.append(
            StageEntry(
                graph=files[key],
                weights=stage.weights,
                reads_tokens=stage.reads_tokens,
                reads_attention=stage.reads_attention,
                asks_attention=stage.asks_attention,
            )
        )
    return entries, set(files.values())


def signature(graph: fx.Graph) -> str:
    """The graph as text, with values named by their place, and the shapes of its inputs."""
    number = {node: f"%{i}" for i, node in enumerate(graph.nodes)}
    lines = []
    for node in graph.nodes:
        named = fx.node.map_aggregate(
            (node.args, dict(node.kwargs)),
            lambda one: number[one] if isinstance(one, fx.Node) else repr(one),
        )
        line = f"{node.op} {node.target if node.op == 'call_function' else ''} {named}"
        if node.op == "placeholder":
            val = node.meta["val"]
            line += f" {val.dtype} {[n if isinstance(n, int) else 't' for n in val.shape]}"
        lines.append(line)
    return "\n".join(lines)


def _exported(stage: Stage) -> torch.export.ExportedProgram:
    module = fx.GraphModule(torch.nn.Module(), stage.graph)
    tokens = torch.export.Dim("tokens", min=1, max=MOST_TOKENS)
    fake = FakeTensorMode()
    inputs, dims = [], []
    for node in stage.graph.nodes:
        if node.op != "placeholder":
            continue
        val = node.meta["val"]
        free = [i for i, size in enumerate(val.shape) if not isinstance(size, int)]
        shape = [TRACED_TOKENS if i in free else int(n) for i, n in enumerate(val.shape)]
        with fake:
            inputs.append(torch.empty(shape, dtype=val.dtype, device=val.device))
        dims.append(dict.fromkeys(free, tokens))
    try:
        with exporting(), torch.no_grad():
            return torch.export.export(module, tuple(inputs), dynamic_shapes=tuple(dims))
    except (RuntimeError, ValueError, torch._dynamo.exc.UserError) as problem:
        raise ModelError(f"a stage cannot be exported by itself: {problem}") from problem
