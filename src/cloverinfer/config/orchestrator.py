"""How ``cloverinfer orchestrate`` chooses among instances, and what it makes of their faults.

Where it listens and whom it lets in stands in the section ``server``, as for any server.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from ..core.errors import ConfigError

POLICIES = ("round_robin", "least_loaded", "prefix_aware")
ROLES = ("prefill", "decode", "both")
MOST_SECONDS = 86400
_PLACE = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")


def is_place(text: str) -> bool:
    """Whether it is HOST:PORT, an IPv6 address in brackets."""
    match = _PLACE.fullmatch(text)
    return match is not None and 0 < int(match[2]) <= 65535


class OrchestratorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry in front of several instances, each a whole server of its own."""

    policy: str = "least_loaded"
    """round_robin, least_loaded or prefix_aware: which of several instances takes a request."""
    instances: tuple[str, ...] = ()
    """Instances that need not announce themselves, each as ROLE=URL; where it decodes as
    decode=URL#HOST:PORT, with the place where its connector meets prefill instances."""
    secret: str | None = None
    """Bearer token that instances announce themselves with; None: only those of this host may."""
    instance_api_key: str | None = None
    """Bearer token sent to instances; None: the client's own, where the orchestrator asks for
    none."""
    heartbeat_timeout: float = 5.0
    """Seconds without a heartbeat after which an instance gets no more requests."""
    attempts: int = 3
    """Instances that one request may be tried on, 1 to 16."""
    breaker_faults: int = 3
    """Faults in a row after which an instance is left alone."""
    breaker_seconds: float = 5.0
    """For how long, until one request tries it again."""
    connect_timeout: float = 5.0
    """Seconds that a connection to an instance may take."""
    answer_timeout: float = 600.0
    """Seconds that an instance may be silent while it answers."""
    hang_timeout: float = 30.0
    """Seconds that an instance with requests may leave /health unanswered: then it stands still,
    and its requests are tried elsewhere or broken off."""
    tokenizer: str | None = None
    """A tokenizer.json, or a folder with one, by which prefix_aware reads prompts as tokens; None:
    as text."""
    usage_stages: bool = True
    """The usage of an answer tells the seconds of its stages; off: answers stay as they came."""

    def __post_init__(self) -> None:
        if isinstance(self.instances, str):
            msgspec.structs.force_setattr(self, "instances", (self.instances,))
        self._check("policy", self.policy in POLICIES, f"one of {', '.join(POLICIES)}")
        for one in self.instances:
            role, _, rest = one.partition("=")
            url, decodes, place = rest.partition("#")
            good = role in ROLES and url.startswith(("http://", "https://"))
            good = good and (role == "decode") == bool(decodes)
            good = good and (not decodes or is_place(place))
            text = "of the form both=URL, prefill=URL or decode=URL#HOST:PORT (of its connector)"
            self._check("instances", good, text, one)
        for name in ("secret", "instance_api_key"):
            self._check(name, getattr(self, name) != "", "a non-empty string")
        for name in ("attempts", "breaker_faults"):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            self._check(name, whole and 1 <= value <= 16, "an integer from 1 to 16")
        for name in self.__struct_fields__:
            if not name.endswith(("_timeout", "_seconds")):
                continue
            good = 0 < getattr(self, name) <= MOST_SECONDS
            self._check(name, good, f"above 0, at most {MOST_SECONDS}")

    def __repr__(self) -> str:
        """Logs and errors never tell the secrets."""
        fields = msgspec.structs.asdict(self)
        hidden = {key: "***" for key in ("secret", "instance_api_key") if fields[key] is not None}
        told = ", ".join(f"{key}={value!r}" for key, value in {**fields, **hidden}.items())
        return f"OrchestratorConfig({told})"

    def _check(self, field: str, good: bool, allowed: str, value: Any = None) -> None:
        if not good:
            shown = getattr(self, field) if value is None else value
            raise ConfigError(f"orchestrator.{field} must be {allowed}, not {shown!r}")
