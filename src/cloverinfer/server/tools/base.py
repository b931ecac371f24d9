"""What every parser of tool calls does: text comes in pieces, content and calls go out.

Whatever the pieces, the same text gives the same content and calls. What looked like a call and is
none is content; nothing is lost. A parser knows no HTTP and no tools: whether a call makes sense is
for whoever answers it.
"""

from __future__ import annotations

import json
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ToolDelta:
    """What is new of one call: its name comes first, once; pieces of ``arguments`` join."""

    index: int
    id: str | None
    name: str | None
    arguments: str
    """JSON text."""

    def as_delta(self) -> dict[str, Any]:
        """OpenAI's form in a stream."""
        if self.name is None:
            return {"index": self.index, "function": {"arguments": self.arguments}}
        function = {"name": self.name, "arguments": self.arguments}
        return {"index": self.index, "id": self.id, "type": "function", "function": function}


@dataclass
class Parsed:
    """What a piece of text came to."""

    content: str = ""
    calls: list[ToolDelta] = field(default_factory=list)


class NotACallError(Exception):
    """The text at hand only looked like a call."""


class ToolParser(ABC):
    """One answer's text. ``add`` pieces of it, then ``flush`` once."""

    keeps_special_tokens = False
    """The marker is a special token of the model's, so special tokens must stay in the text."""

    def __init__(self) -> None:
        self._buffer = ""
        self._blank = ""
        self.called = 0
        """Calls begun so far."""

    def add(self, text: str) -> Parsed:
        self._buffer += text
        parsed = Parsed()
        while self._step(parsed, final=False):
            continue
        return parsed

    def flush(self) -> Parsed:
        """What is left: no more text comes."""
        parsed = Parsed()
        while self._step(parsed, final=True):
            continue
        self._content(parsed, self._buffer)
        self._buffer = ""
        if not self.called:
            parsed.content, self._blank = parsed.content + self._blank, ""
        return parsed

    @abstractmethod
    def _step(self, parsed: Parsed, final: bool) -> bool:
        """Takes something off the buffer; False where it can do no more until text comes."""

    def _content(self, parsed: Parsed, text: str) -> None:
        """Shows ``text``. White space waits for what follows it, and goes where that is a call."""
        shown = text.rstrip()
        if shown:
            parsed.content += self._blank + shown
            self._blank = ""
        self._blank += text[len(shown) :]

    def _call(self, parsed: Parsed, name: str, arguments: str) -> None:
        self._blank = ""
        parsed.calls.append(ToolDelta(self.called, self._new_id(), name, arguments))
        self.called += 1

    def _new_id(self) -> str:
        return f"call_{secrets.token_hex(12)}"


class MarkedParser(ToolParser):
    """Calls that a marker announces; ``_calls`` reads what follows it."""

    marker: str

    def __init__(self) -> None:
        super().__init__()
        self._inside = False
        self._span = JsonSpan()

    def _step(self, parsed: Parsed, final: bool) -> bool:
        return self._read(parsed) if self._inside else self._seek(parsed, final)

    def _seek(self, parsed: Parsed, final: bool) -> bool:
        at = self._buffer.find(self.marker)
        if at < 0:
            held = 0 if final else overlap(self._buffer, self.marker)
            shown = len(self._buffer) - held
            self._content(parsed, self._buffer[:shown])
            self._buffer = self._buffer[shown:]
            return False
        self._content(parsed, self._buffer[:at])
        self._buffer = self._buffer[at:]
        self._inside, self._span = True, JsonSpan()
        return True

    def _read(self, parsed: Parsed) -> bool:
        try:
            found = self._calls(self._buffer, len(self.marker))
        except NotACallError:
            self._content(parsed, self.marker)
            self._buffer = self._buffer[len(self.marker) :]
            self._inside = False
            return True
        if found is None:
            return False
        calls, end = found
        for name, arguments in calls:
            self._call(parsed, name, arguments)
        self._buffer = self._buffer[end:]
        self._inside = False
        return True

    @abstractmethod
    def _calls(self, text: str, at: int) -> tuple[Iterable[tuple[str, str]], int] | None:
        """Names and arguments of the calls at ``at``, and where they end; None: they are not whole
        yet. ``NotACallError`` where there are none."""


_MARKS = re.compile(r'["\\{}\[\]]')


class JsonSpan:
    """Finds where a JSON object or array ends, in a text that grows."""

    def __init__(self) -> None:
        self._at = 0
        self._depth = 0
        self._quoted = False
        self._end: int | None = None

    def end(self, text: str, start: int) -> int | None:
        """The index after the value that begins at ``start``; None while it is not whole."""
        if self._end is not None:
            return self._end
        at = max(self._at, start)
        while (found := _MARKS.search(text, at)) is not None:
            at = found.end()
            mark = found[0]
            if mark == "\\" and self._quoted:
                if at == len(text):
                    at -= 1  # what it escapes is still to come
                    break
                at += 1
            elif mark == '"':
                self._quoted = not self._quoted
            elif not self._quoted:
                self._depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(mark, 0)
                if self._depth == 0:
                    self._end = at
                    return at
        else:
            at = len(text)
        self._at = at
        return None


def overlap(text: str, marker: str) -> int:
    """Length of the longest proper prefix of ``marker`` that ``text`` ends with."""
    sizes = range(min(len(marker) - 1, len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(marker[:size])), 0)


def skip_blank(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def read_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise NotACallError from error


def as_call(value: Any) -> tuple[str, str]:
    """Name and arguments of a call written as an object."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        raise NotACallError
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # written as text already
        arguments = read_json(arguments)
    if not isinstance(arguments, dict):
        raise NotACallError
    return value["name"], json.dumps(arguments, ensure_ascii=False)
