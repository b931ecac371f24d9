"""What the orchestrator reads of a request; all else passes as the client wrote it.

A body is taken apart into its fields, not their values, so that what it does not understand it does
not change either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from ..core.errors import RequestError

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
_T = TypeVar("_T")
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(frozen=True)
class Asked:
    """A completion or a chat."""

    path: str
    body: bytes
    fields: dict[str, msgspec.Raw]
    id: str
    """Of the client's request, for logs and answers."""
    authorization: str | None = None
    """The client's, where it is passed on."""

    @property
    def model(self) -> str | None:
        """The model's name; None: whichever is served. ``RequestError`` where it is no name."""
        raw = self.fields.get("model")
        if raw is None:
            return None
        try:
            return msgspec.json.decode(raw, type=str | None)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise RequestError("model must be a string", "model") from error

    @property
    def include_usage(self) -> bool:
        """Whether a stream is to end with its usage."""
        options = self._read("stream_options", dict[str, Any], {})
        return self._read("stream", bool, False) and options.get("include_usage") is True

    def paired(self) -> bool:
        """Whether a prefill and a decode instance can share it: one sequence, whose prompt's
        log-probabilities nobody asks for."""
        if self._read("n", int, 1) > 1 or self._read("best_of", int, 1) > 1:
            return False
        if self._read("use_beam_search", bool, False) or self._read("echo", bool, False):
            return False
        if "prompt_logprobs" in self.fields and bytes(self.fields["prompt_logprobs"]) != b"null":
            return False
        prompt = self._read("prompt", list[msgspec.Raw], [])
        several = len(prompt) > 1 and bytes(prompt[0])[:1] in (b'"', b"[")
        return not several and "prompt_embeds" not in self.fields

    def with_fields(self, **changed: Any) -> bytes:
        """The body with some fields set, those of None left out."""
        fields: dict[str, Any] = {**self.fields, **changed}
        return msgspec.json.encode({k: v for k, v in fields.items() if v is not None})

    def _read(self, name: str, kind: type[_T], otherwise: _T) -> _T:
        """A field's value, where it is of that kind; the instance refuses it where it is not."""
        raw = self.fields.get(name)
        if raw is None:
            return otherwise
        try:
            return msgspec.json.decode(raw, type=kind)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return otherwise


def read(path: str, body: bytes, id: str, authorization: str | None) -> Asked:
    """``RequestError`` for a body that is no JSON object, or one that tells instances what only
    the orchestrator may."""
    try:
        fields = _fields.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        text = str(error) or type(error).__name__
        raise RequestError(f"the body is not a JSON object: {text}") from error
    if "kv_transfer_params" in fields:
        text = "kv_transfer_params is set by the orchestrator: leave it out"
        raise RequestError(text, "kv_transfer_params")
    return Asked(path, body, fields, id, authorization)
