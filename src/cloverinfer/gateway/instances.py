"""Which instances there are: what they announced, since when, and what is under way on each.

An announcement carries all there is to know, so a heartbeat is an announcement again, and an
orchestrator that was started anew is filled by the next round of them. It knows no HTTP and takes
time from a clock that it is given.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import msgspec

from ..config.orchestrator import ROLES, OrchestratorConfig, is_place
from ..core.clock import Clock
from ..core.errors import CloverError, ConfigError
from .breaker import Breaker

log = logging.getLogger("cloverinfer.instances")


class StaleError(CloverError):
    """An announcement or a withdrawal of a predecessor that has been replaced."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What an instance says it has to do."""

    running: int = 0
    """Requests being computed."""
    waiting: int = 0
    """Requests in its queue."""
    kv_usage: float = 0.0
    """Share of its KV blocks in use, 0 to 1."""

    @property
    def requests(self) -> int:
        return self.running + self.waiting


class Announcement(msgspec.Struct, frozen=True, kw_only=True):
    """An instance as it tells of itself; the body of ``POST /v1/instances``."""

    url: str
    """Where requests go, without ``/v1`` and without a slash at its end."""
    role: str
    incarnation: int
    """Higher at each start of the instance."""
    models: list[dict[str, Any]] = []
    """Its cards of ``/v1/models``."""
    engine: str = ""
    """vllm or cloverinfer, where that is known."""
    kv_address: str | None = None
    """``host:port`` where prefill instances meet the connector; every decode instance has one."""
    load: Load = Load()
    problem: str | None = None
    """Why it takes no requests now; None: it takes them."""

    def check(self) -> None:
        """``ConfigError`` for what no instance can be."""
        if self.role not in ROLES:
            raise ConfigError(f"role must be one of {', '.join(ROLES)}, not {self.role!r}")
        check_url(self.url)
        if self.role == "decode" and not is_place(self.kv_address or ""):
            raise ConfigError(
                f"{self.url} decodes: its kv_address is needed, HOST:PORT, not {self.kv_address!r}"
            )
        for card in self.models:
            if not isinstance(card.get("id"), str):
                raise ConfigError("models must be cards, each with an id that is a string")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of its models."""
        return tuple(card["id"] for card in self.models)


class Withdrawal(msgspec.Struct, frozen=True, kw_only=True):
    """An instance goes; the body of ``DELETE /v1/instances``."""

    url: str
    incarnation: int


def check_url(url: str) -> str:
    """The URL without a slash or ``/v1`` at its end; ``ConfigError`` where it is none of HTTP."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        # A name and a password would go with every request, a query into every path.
        good = good and not (parts.username or parts.password or parts.query or parts.fragment)
    except ValueError:
        good = False
    if not good or not url.isascii() or not url.isprintable() or " " in url:
        raise ConfigError(f"an instance needs a URL of the form http://HOST:PORT, not {url!r}")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


class Instance:
    """One of them, in its present incarnation."""

    def __init__(self, told: Announcement, breaker: Breaker, now: float) -> None:
        self.told = told
        self.breaker = breaker
        self.seen = now
        """When it was last heard of."""
        self.in_flight = 0
        """Requests sent to it from here that have not ended."""
        self._others = max(0, told.load.requests)

    @property
    def url(self) -> str:
        return self.told.url

    @property
    def pressure(self) -> int:
        """Requests that it has to do: those from here as of now, those of others as last told."""
        return self.in_flight + self._others

    def hear(self, told: Announcement, now: float) -> None:
        self.told, self.seen = told, now
        self._others = max(0, told.load.requests - self.in_flight)

    def usable(self) -> bool:
        """Whether a request may be sent to it now."""
        return self.told.problem is None and self.breaker.allows()

    @contextmanager
    def busy(self) -> Iterator[None]:
        """For the length of a request."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1


class Registry:
    """Instances by URL. What was not heard of for the timeout is forgotten."""

    def __init__(self, clock: Clock, settings: OrchestratorConfig) -> None:
        self._clock = clock
        self._settings = settings
        self._instances: dict[str, Instance] = {}
        self.on_gone: Callable[[str], None] = lambda url: None
        """Called with the URL of an instance that went, or came back as a new incarnation."""

    def announce(self, told: Announcement) -> None:
        """Takes an instance in, or hears of it again.

        Raises ``ConfigError`` where it makes no sense, ``StaleError`` where a later incarnation
        has announced itself.
        """
        told = msgspec.structs.replace(told, url=check_url(told.url))
        told.check()
        now = self._clock()
        known = self._known(told.url, told.incarnation)
        if known is not None and known.told.incarnation == told.incarnation:
            _say(told, known.told.problem)
            known.hear(told, now)
            return
        if known is not None:
            self._drop(told.url)
        settings = self._settings
        breaker = Breaker(self._clock, settings.breaker_faults, settings.breaker_seconds)
        self._instances[told.url] = Instance(told, breaker, now)
        log.info("%s is here, role %s", told.url, told.role)
        _say(told, None)

    def withdraw(self, told: Withdrawal) -> None:
        """Forgets an instance; one that is not known is forgotten already."""
        if self._known(check_url(told.url), told.incarnation) is not None:
            self._drop(check_url(told.url))

    def all(self) -> list[Instance]:
        """Those that are heard of, in the order of their URLs."""
        self._forget_silent()
        return [self._instances[url] for url in sorted(self._instances)]

    def age(self, instance: Instance) -> float:
        """Seconds since it was heard of."""
        return self._clock() - instance.seen

    def _forget_silent(self) -> None:
        oldest = self._clock() - self._settings.heartbeat_timeout
        for url in [url for url, one in self._instances.items() if one.seen < oldest]:
            log.warning("%s is not heard of any more", url)
            self._drop(url)

    def _known(self, url: str, incarnation: int) -> Instance | None:
        self._forget_silent()
        known = self._instances.get(url)
        if known is not None and incarnation < known.told.incarnation:
            raise StaleError(f"{url} was started again since: this is of an earlier incarnation")
        return known

    def _drop(self, url: str) -> None:
        del self._instances[url]
        self.on_gone(url)


def _say(told: Announcement, before: str | None) -> None:
    """Logs that an instance takes no requests now, or takes them again; once for each change."""
    if told.problem is None and before is not None:
        log.info("%s takes requests again", told.url)
    elif told.problem is not None and told.problem != before:
        log.warning("%s takes no requests: %s", told.url, " ".join(told.problem.split()))
