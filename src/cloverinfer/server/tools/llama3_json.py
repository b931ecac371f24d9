"""An answer that is nothing but ``{"name": ..., "parameters": {...}}``, as Llama 3 writes calls.

Several are separated by semicolons; ``<|python_tag|>`` may come first.
"""

from __future__ import annotations

from .base import JsonSpan, NotACallError, Parsed, ToolParser, as_call, overlap, read_json

TAG = "<|python_tag|>"


class Parser(ToolParser):
    def __init__(self) -> None:
        super().__init__()
        self._plain = False
        """The answer turned out to be text."""
        self._span = JsonSpan()
        self._lead = ""
        """What was skipped before the next call: content, if none follows."""

    def _step(self, parsed: Parsed, final: bool) -> bool:
        if self._plain:
            self._content(parsed, self._buffer)
            self._buffer = ""
            return False
        return self._read(parsed) if self._buffer.startswith("{") else self._skip()

    def _skip(self) -> bool:
        """Past white space, a semicolon between calls, the tag; anything else is text."""
        text = self._buffer
        if not text:
            return False
        if text.startswith(TAG) and not self.called:
            size = len(TAG)
        elif text[0].isspace() or (text[0] == ";" and self.called):
            size = 1
        elif not self.called and overlap(text, TAG) == len(text):
            return False
        else:
            return self._give_up()
        self._lead, self._buffer = self._lead + text[:size], text[size:]
        return True

    def _read(self, parsed: Parsed) -> bool:
        end = self._span.end(self._buffer, 0)
        if end is None:
            return False
        try:
            name, arguments = as_call(read_json(self._buffer[:end]))
        except NotACallError:
            return self._give_up()
        self._call(parsed, name, arguments)
        self._buffer, self._span, self._lead = self._buffer[end:], JsonSpan(), ""
        return True

    def _give_up(self) -> bool:
        self._plain = True
        self._buffer, self._lead = self._lead + self._buffer, ""
        return True

    def flush(self) -> Parsed:
        if not self._plain:
            self._give_up()  # whole calls were taken as they came
        return super().flush()
