"""``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as Hermes and Qwen write them."""

from __future__ import annotations

from collections.abc import Iterable

from .base import MarkedParser, NotACallError, as_call, read_json, skip_blank

END = "</tool_call>"


class Parser(MarkedParser):
    marker = "<tool_call>"

    def _calls(self, text: str, at: int) -> tuple[Iterable[tuple[str, str]], int] | None:
        start = skip_blank(text, at)
        if start == len(text):
            return None
        if text[start] != "{":
            raise NotACallError
        end = self._span.end(text, start)
        if end is None:
            return None
        after = skip_blank(text, end)
        rest = text[after : after + len(END)]
        if rest != END:
            if END.startswith(rest):
                return None
            raise NotACallError
        return [as_call(read_json(text[start:end]))], after + len(END)
