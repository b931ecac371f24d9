"""A running engine for the length of a command, with its progress on stderr."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..config import Config, ServedModel
from ..core.errors import ConfigError

if TYPE_CHECKING:
    from ..orchestrator.llm import AsyncLLM


def only_model(config: Config) -> ServedModel:
    """The one model that a command runs, which a file may list; ``ConfigError`` where it lists
    several."""
    if len(config.models) > 1:
        names = ", ".join((one.names or (one.model.model_path,))[0] for one in config.models)
        raise ConfigError(f"the file lists several models ({names}), which serve alone can run")
    return config.models[0]


@contextlib.contextmanager
def running(config: ServedModel, quiet: bool) -> Iterator[AsyncLLM]:
    """A running engine, closed whatever happens; signals wait while it closes."""
    progress = None if quiet else _progress
    if not quiet:
        _progress(f"loading {config.model.model_path}")
    from ..orchestrator.llm import AsyncLLM

    engine = AsyncLLM(config.model, config.cluster, progress)
    try:
        yield engine
    finally:
        with _signals_ignored():
            engine.close()


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _signals_ignored() -> Iterator[None]:
    """A second Ctrl-C must not cut the closing short and leave processes behind."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
