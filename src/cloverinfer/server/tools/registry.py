"""Parsers by name; each is imported when it is asked for."""

from __future__ import annotations

import importlib

from ...config.server import TOOL_CALL_PARSERS
from ...core.errors import ConfigError
from .base import ToolParser


def create_parser(name: str) -> ToolParser:
    """A parser for one answer; ``ConfigError`` for a name that nobody has."""
    if name not in TOOL_CALL_PARSERS:
        known = ", ".join(TOOL_CALL_PARSERS)
        raise ConfigError(f"chat.tool_call_parser must be one of {known}, not {name!r}")
    parser: ToolParser = importlib.import_module(f"{__package__}.{name}").Parser()
    return parser
