"""From tokens to the text that a client may see: whole characters, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Detokenizer(Protocol):
    def add(self, token_ids: Sequence[int]) -> str: ...
    def flush(self) -> str: ...


class TextStream:
    """Text of one request. ``add`` and ``flush`` return what may be shown now.

    Only a tail that could be the start of a stop string is held back.
    """

    def __init__(
        self,
        detokenizer: Detokenizer | None,
        stops: Sequence[str],
        keep_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """``keep_stop``: a stop string is shown too. The text of the first ``min_tokens`` tokens is
        not searched."""
        self._detokenizer = detokenizer
        self._stops = stops
        self._keep_stop = keep_stop
        self._unsearched = min_tokens
        self._held = ""
        self.stopped_by: str | None = None
        """The stop string that was found; nothing more will be shown."""

    @property
    def may_stop(self) -> bool:
        """Whether there is a stop string to look for."""
        return bool(self._stops)

    @property
    def stopped(self) -> bool:
        return self.stopped_by is not None

    def add(self, token_ids: Sequence[int]) -> str:
        if self._detokenizer is None or self.stopped:
            return ""
        text = self._detokenizer.add(token_ids)
        if self._unsearched > 0:
            self._unsearched -= len(token_ids)
            return text
        return self._release(text)

    def flush(self) -> str:
        """What is left once no more tokens come."""
        if self._detokenizer is None or self.stopped:
            return ""
        shown = self._release(self._detokenizer.flush())
        if not self.stopped:
            shown, self._held = shown + self._held, ""
        return shown

    def _release(self, text: str) -> str:
        if not self._stops:
            return text
        text = self._held + text
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, self.stopped_by = min(found, key=lambda one: one[0])
            self._held = ""
            return text[: at + len(self.stopped_by) if self._keep_stop else at]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of ``stop`` that ``text`` ends with."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
