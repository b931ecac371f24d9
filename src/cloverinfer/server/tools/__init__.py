"""Tool calls in a model's text: one parser per way of writing them."""

from __future__ import annotations

from .base import Parsed, ToolDelta, ToolParser
from .registry import create_parser

__all__ = ["Parsed", "ToolDelta", "ToolParser", "create_parser"]
