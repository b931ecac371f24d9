"""What an answer must look like: JSON, a pattern, one of several texts, or a grammar."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from .errors import RequestError

MAX_GRAMMAR_CHARS = 1 << 20
MAX_CHOICES = 1024
PARAM = "structured_outputs"


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Exactly one field is given; checked on construction (``RequestError``)."""

    json: str | dict[str, Any] | None = None
    """A JSON schema, as text or as an object."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    """A regular expression that the whole text matches (no look-around, no back references)."""
    choice: tuple[str, ...] | None = None
    """The text is one of these."""
    grammar: str | None = None
    """A context-free grammar, in Lark's syntax or as GBNF."""

    def __post_init__(self) -> None:
        given = [
            name for name in self.__struct_fields__ if getattr(self, name) not in (None, False)
        ]
        if len(given) != 1:
            fields = ", ".join(self.__struct_fields__)
            raise RequestError(f"{PARAM} needs exactly one of {fields}", PARAM)
        if not _is_good(given[0], getattr(self, given[0])):
            raise RequestError(f"{PARAM}.{given[0]} must be {_ALLOWED[given[0]]}", PARAM)
        if len(self.text) > MAX_GRAMMAR_CHARS:
            raise RequestError(
                f"{PARAM}.{given[0]} has more than {MAX_GRAMMAR_CHARS} characters", PARAM
            )

    @property
    def kind(self) -> str:
        """``json``, ``regex``, ``choice`` or ``grammar``."""
        kinds = ("regex", "choice", "grammar")
        return next((name for name in kinds if getattr(self, name) is not None), "json")

    @property
    def text(self) -> str:
        """What ``kind`` is about: a schema, a pattern, a JSON list of texts, a grammar."""
        if self.json_object:
            return '{"type": "object"}'
        value = getattr(self, self.kind)
        return value if isinstance(value, str) else json.dumps(value)


_ALLOWED = {
    "json": "a JSON schema: an object, or its text",
    "json_object": "true or left out",
    "regex": "a non-empty string",
    "choice": f"a list of 1 to {MAX_CHOICES} non-empty strings",
    "grammar": "a non-empty string",
}


def _is_good(name: str, value: Any) -> bool:
    if name == "json_object":
        return value is True
    if name == "json":
        return _is_schema(value)
    if name == "choice":
        listed = isinstance(value, (list, tuple)) and 1 <= len(value) <= MAX_CHOICES
        return listed and all(isinstance(one, str) and one for one in value)
    return isinstance(value, str) and bool(value)


def _is_schema(value: Any) -> bool:
    try:
        return isinstance(json.loads(value) if isinstance(value, str) else value, dict) and bool(
            json.dumps(value)
        )
    except (ValueError, TypeError, RecursionError):
        return False


def as_structured(value: Any) -> StructuredOutputs:
    """From itself or from a dict of its fields."""
    if isinstance(value, StructuredOutputs):
        return value
    if not isinstance(value, dict):
        raise RequestError(f"{PARAM} must be an object, not {value!r}", PARAM)
    unknown = sorted(map(str, set(value) - set(StructuredOutputs.__struct_fields__)))
    if unknown:
        raise RequestError(f"{PARAM} has no field {unknown[0]!r}", PARAM)
    return StructuredOutputs(**value)
