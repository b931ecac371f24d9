"""How long the stages of a request took, as the orchestrator saw them, and how answers tell it.

A stage that was not seen is None, never a guess. Of a stream only the event with the usage is
touched; every other byte passes as it came.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from ..core.clock import Clock

LONGEST_EVENT = 1 << 20
"""Bytes that may be held while the end of an event is waited for; then they pass unread."""
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass
class Stages:
    """Times by one clock; filled in as the request goes on."""

    clock: Clock
    arrived: float
    sent: float | None = None
    """To the instance whose answer the client got."""
    prefill_sent: float | None = None
    prefilled: float | None = None
    """The prefill instance has answered."""
    first_piece: float | None = None
    """The first piece of a stream."""
    transfer: float | None = None
    """Seconds, as the decode instance told them."""

    def told(self) -> dict[str, float | None]:
        """Seconds by stage."""
        return {
            "queue": _between(self.arrived, self.sent),
            "prefill": _between(self.prefill_sent, self.prefilled),
            "transfer": self.transfer,
            "first_decode": _between(self.prefilled, self.first_piece),
            "ttft": _between(self.arrived, self.first_piece),
        }


def _between(first: float | None, last: float | None) -> float | None:
    return None if first is None or last is None else round(max(0.0, last - first), 6)


class UsageEvents:
    """Finds the event of a stream that tells its usage, and adds the stages to it."""

    def __init__(self, stages: Stages) -> None:
        self._stages = stages
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """What may pass on, the beginning of an event held back until its end has come."""
        data = self._held + data
        whole, end, self._held = data.rpartition(b"\n\n")
        # Events that end otherwise, as they may, are not ours to hold back.
        if len(self._held) > LONGEST_EVENT or b"\r\n\r\n" in self._held:
            whole, end, self._held = data, b"", b""
        if b'"usage"' not in whole:
            return whole + end
        return b"\n\n".join(self._amended(event) for event in whole.split(b"\n\n")) + end

    def rest(self) -> bytes:
        """What was held when the stream ended."""
        return self._held

    def _amended(self, event: bytes) -> bytes:
        if not event.startswith(b"data:") or b'"usage"' not in event:
            return event
        try:
            fields = _fields.decode(event[5:])
            last = not msgspec.json.decode(fields.get("choices", b"[]"), type=list[msgspec.Raw])
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return event  # not ours to judge
        return b"data: " + amend(fields, self._stages) if last else event


def amend(fields: dict[str, msgspec.Raw], stages: Stages) -> bytes:
    """An answer, taken apart, with the stages in its usage; one without usage as it is."""
    try:
        usage: dict[str, object] = dict(_fields.decode(fields.get("usage", b"null")))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return msgspec.json.encode(fields)
    return msgspec.json.encode({**fields, "usage": {**usage, "stages": stages.told()}})


def fields_of(body: bytes) -> dict[str, msgspec.Raw] | None:
    """A whole answer taken apart; None where it is no JSON object."""
    try:
        return _fields.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
