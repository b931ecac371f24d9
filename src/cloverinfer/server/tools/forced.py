"""Calls that structured output made sure of: the text is the call, or a list of calls."""

from __future__ import annotations

from typing import Any

from ...core.errors import RequestError
from .base import JsonSpan, NotACallError, Parsed, ToolDelta, ToolParser, as_call, read_json


class NamedParser(ToolParser):
    """The whole text is the arguments of one call, whose name is known."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def _step(self, parsed: Parsed, final: bool) -> bool:
        text, self._buffer = self._buffer, ""
        if not text:
            return False
        if self.called:
            parsed.calls.append(ToolDelta(0, None, None, text))
        else:
            self._call(parsed, self._name, text)
        return False


class RequiredParser(ToolParser):
    """The text is a JSON list of calls."""

    def __init__(self) -> None:
        super().__init__()
        self._span = JsonSpan()

    def _step(self, parsed: Parsed, final: bool) -> bool:
        text = self._buffer.lstrip(" \t\r\n[],")
        self._buffer = text
        if not text.startswith("{"):
            return False
        end = self._span.end(text, 0)
        if end is None:
            return False
        try:
            name, arguments = as_call(read_json(text[:end]))
        except NotACallError:
            self._content(parsed, text[:end])
        else:
            self._call(parsed, name, arguments)
        self._buffer, self._span = text[end:], JsonSpan()
        return True


def required_schema(functions: list[Any], one_at_most: bool) -> dict[str, Any]:
    """The JSON schema of a list of calls of ``functions`` (with ``name`` and ``parameters``)."""
    definitions: dict[str, Any] = {}
    items = []
    for function in functions:
        parameters = dict(function.parameters or {"type": "object"})
        for key in ("$defs", "definitions"):
            # References begin at the root, so what they refer to moves there.
            for name, definition in parameters.pop(key, {}).items():
                place = definitions.setdefault(key, {})
                if place.setdefault(name, definition) != definition:
                    raise RequestError(
                        f"tools: two functions define {name!r} differently; rename one", "tools"
                    )
        properties = {"name": {"enum": [function.name]}, "parameters": parameters}
        item = {"type": "object", "properties": properties, "required": ["name", "parameters"]}
        items.append({**item, "additionalProperties": False})
    most = {"maxItems": 1} if one_at_most else {}
    return {"type": "array", "minItems": 1, **most, "items": {"anyOf": items}, **definitions}
