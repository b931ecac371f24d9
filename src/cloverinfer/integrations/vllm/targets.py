"""The decode workers that a prefill worker has met, or is about to.

Greets meeting points until somebody answers, connects over the wire that was agreed on and prepares
every layer's ranges once. What is pushed there is not known here. State is guarded by the worker's
lock; what connects runs in a wire's thread without it.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from ...core.errors import CloverError, ConfigError, RefusedError, TransportError
from ...transport import Peer, Slices
from .courier import Courier, Wire
from .grid import Match
from .meeting import landed, matches_of
from .outgoing import Target, TargetPusher
from .staged import Outlet
from .wire import GiveUp, Greeting, Refusal, Welcome, WireInfo, Worker

log = logging.getLogger(__name__)
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 8.0
"""Seconds between two knocks at a meeting point where nobody answers; they double."""


class _DeniedError(TransportError):
    """The peer is there and its memory cannot be reached over this wire."""


@dataclass
class Callbacks:
    """Called under the lock."""

    met: Callable[[Target], None]
    """It has answered; and again once it is connected."""
    refused: Callable[[Target], None]


class Targets:
    def __init__(
        self, me: Worker, courier: Courier, lock: threading.RLock, callbacks: Callbacks
    ) -> None:
        self._me = me
        self._courier = courier
        self._lock = lock
        self._callbacks = callbacks
        self._targets: dict[tuple[str, int], Target] = {}
        self._nonces = itertools.count(1)

    # -- under the lock

    def at(self, host: str, port: int) -> Target:
        """The one whose meeting point this is; greeted where it is new or refused before, as who
        listens there may be another by now."""
        target = self._targets.get((host, port))
        if target is None or target.refused:
            now = time.monotonic()
            target = Target(host, port, next(self._nonces), now)
            self._targets[host, port] = target
            self._greet(target)
        return target

    def of(self, peer: Peer) -> Target | None:
        return next((each for each in self._targets.values() if each.is_at(peer)), None)

    def forget(self, target: Target) -> None:
        """What goes to its place next meets whoever is there then."""
        if self._targets.get(target.place) is target:
            del self._targets[target.place]

    def knock_again(self, wanted: Iterable[Target], now: float) -> None:
        """At meeting points where nobody answered so far and somebody waits."""
        for target in wanted:
            if target.worker is None and not target.refused and now > target.knocked + target.pause:
                target.knocked, target.pause = now, min(2 * target.pause, LONGEST_PAUSE)
                self._greet(target)

    def give_up(self, place: tuple[str, int], message: GiveUp) -> None:
        """Told at the meeting point, since a wire may be why."""
        self._courier.door.call(lambda: self._knock(place, message))

    def welcomed(self, welcome: Welcome) -> None:
        target = self._by_nonce(welcome.nonce)
        wire = self._courier.wires.get(welcome.transport)
        if target is None or wire is None or target.worker is not None:
            return
        target.worker = welcome.worker
        self._courier.learn(welcome.worker, target.place)
        self._callbacks.met(target)
        wire.call(lambda: self._connect(target, wire))

    def turned_away(self, refusal: Refusal) -> None:
        target = self._by_nonce(refusal.nonce)
        if target is not None:
            self._refuse(target, refusal.reason)

    def _refuse(self, target: Target, reason: str) -> None:
        log.error("%s takes no blocks from here: %s", target.name, reason)
        target.refused = reason
        self._callbacks.refused(target)

    def _by_nonce(self, nonce: int) -> Target | None:
        return next((each for each in self._targets.values() if each.nonce == nonce), None)

    def _greet(self, target: Target) -> None:
        wires = {name: wire for name, wire in self._me.wires.items() if name not in target.without}
        greeting = Greeting(target.nonce, msgspec.structs.replace(self._me, wires=wires))
        self._courier.door.call(lambda: self._knock(target.place, greeting))

    # -- in a wire's thread, without the lock

    def _knock(self, place: tuple[str, int], message: Greeting | GiveUp) -> None:
        try:
            self._courier.knock(*place, message)
        except RefusedError as problem:
            with self._lock:
                target = self._targets.get(place)
                if target is not None and target.worker is None and not target.refused:
                    self._refuse(target, str(problem))
        except TransportError as problem:
            log.info("nobody answers at %s:%d: %s", *place, problem)

    def _connect(self, target: Target, wire: Wire) -> None:
        assert target.worker is not None
        try:
            pusher = self._prepare(target, wire, target.worker)
        except (ConfigError, ValueError) as problem:
            with self._lock:
                self._refuse(target, str(problem))
        except CloverError as problem:
            log.warning("%s was met and cannot be reached: %s", target.name, problem)
            with self._lock:
                target.worker = None  # and it is knocked again
                if isinstance(problem, _DeniedError):
                    target.without.add(wire.name)
                    self._greet(target)
        else:
            with self._lock:
                target.pusher = pusher
                target.hear()
                self._callbacks.met(target)

    def _prepare(self, target: Target, wire: Wire, worker: Worker) -> TargetPusher | None:
        """None where it was greeted only to learn how many workers its engine has."""
        matches = matches_of(self._me, landed(worker, wire.name))
        if not matches:
            return None
        info = worker.wires[wire.name]
        peer = wire.endpoint.connect(info.address)
        outlets = self._courier.outlets(wire, matches)
        try:
            ranges = [
                wire.endpoint.prepare(peer, *_slices(wire, info, match, outlet))
                for match, outlet in zip(matches, outlets, strict=True)
            ]
        except TransportError as problem:
            raise _DeniedError(str(problem)) from problem
        return TargetPusher(target.name, wire, peer, matches, ranges, outlets)


def _slices(
    wire: Wire, info: WireInfo, match: Match, outlet: Outlet | None
) -> tuple[Slices, Slices]:
    """Of one layer: here and there."""
    region = info.regions[match.theirs.region]
    if outlet is not None:
        return outlet.local, outlet.remote(region)
    mine = Slices(wire.regions[match.mine.region], match.my_offsets(), match.length)
    return mine, Slices(region, match.their_offsets(), match.length)
