"""What ``cloverinfer compile`` does: one model, split where it is asked to be, reported, saved."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import fx

from ..config import ModelConfig
from ..core.errors import ConfigError
from ..models.cache import Progress
from ..models.compiled import Manifest
from ..models.resolve import source_of
from .capture import Captured
from .check import check_parts
from .ensure import Source, compile_source, compile_to
from .partition import Stage, split_by
from .report import Report, make_report
from .run import Parts
from .targets import split_ffn


def compile_model(
    config: ModelConfig, target: str, output: Path | None, progress: Progress
) -> tuple[Report, Manifest | None]:
    """Compiles the model that ``config`` names and reports on it.

    ``target``: attention, ffn, or ``module:function``, a predicate on ``torch.fx`` nodes. Only
    what is split at attention can be saved to ``output``: that is what nodes serve.
    """
    if output is not None and target != "attention":
        raise ConfigError(f"--output saves models split at attention, not at {target!r}")
    split = splitter_of(target)
    source = Source(**source_of(config, progress))
    compiled = compile_source(source, progress)
    stages, manifest = compiled.stages, None
    if split is not None:
        stages = split(compiled.captured)
        check_parts(compiled.captured, Parts(compiled.captured, stages))
    if output is not None:
        manifest = compile_to(source, output, compiled, progress)
    return make_report(config.model_path, compiled.captured, stages), manifest


def splitter_of(target: str) -> Callable[[Captured], list[Stage]] | None:
    """None: at attention, which is done anyway."""
    if target == "attention":
        return None
    if target == "ffn":
        return split_ffn
    predicate = _predicate(target)
    return lambda captured: split_by(captured, predicate)


def _predicate(target: str) -> Callable[[fx.Node], bool]:
    module, _, name = target.partition(":")
    try:
        found: Any = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as problem:
        raise ConfigError(
            f"--target is {target!r}; it is attention, ffn, or module:function ({problem})"
        ) from problem
    if not callable(found):
        raise ConfigError(f"--target is {target!r}, which is no function")

    def predicate(node: fx.Node) -> bool:
        try:
            return bool(found(node))
        except Exception as problem:  # the boundary to the user's own code
            raise ConfigError(
                f"--target {target} fails on {node.name}: {type(problem).__name__}: {problem}"
            ) from problem

    return predicate
