"""``[TOOL_CALLS]`` and a list of calls, or ``[TOOL_CALLS]name{...}``, as Mistral writes them."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Iterable

from .base import MarkedParser, NotACallError, as_call, read_json, skip_blank

ID_LETTERS = string.ascii_letters + string.digits
_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,256}")


class Parser(MarkedParser):
    marker = "[TOOL_CALLS]"
    keeps_special_tokens = True

    def _calls(self, text: str, at: int) -> tuple[Iterable[tuple[str, str]], int] | None:
        start = skip_blank(text, at)
        if start == len(text):
            return None
        if text[start] == "[":
            end = self._span.end(text, start)
            return None if end is None else (self._listed(text[start:end]), end)
        return self._named(text, start)

    def _listed(self, text: str) -> list[tuple[str, str]]:
        values = read_json(text)
        if not values:
            raise NotACallError
        return [as_call(value) for value in values]

    def _named(self, text: str, start: int) -> tuple[list[tuple[str, str]], int] | None:
        name = _NAME.match(text, start)
        if name is None:
            raise NotACallError
        brace = skip_blank(text, name.end())
        if brace == len(text):
            return None
        if text[brace] != "{":
            raise NotACallError
        end = self._span.end(text, brace)
        if end is None:
            return None
        return [as_call({"name": name[0], "arguments": read_json(text[brace:end])})], end

    def _new_id(self) -> str:
        # Its templates take ids of nine letters and digits only.
        return "".join(secrets.choice(ID_LETTERS) for _ in range(9))
