"""A worker's ends of the wires, each with a thread that polls it.

Owns endpoints, threads and the registered memory; knows no transfer. Whoever uses it is called from
the threads: with what arrived, and, from one more, every so often.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol
from urllib.parse import urlsplit

import msgspec

from ...config.network import NetworkConfig
from ...core.errors import ConfigError, DeadlineError, TransportError
from ...transport import Endpoint, Events, Peer, Region, create_endpoint
from ...transport.base import DEFAULT_TIMEOUT
from ...transport.tcp import whoever_listens
from .carriers import AUTO, carriers, is_staged, kind_of
from .grid import Match
from .memory import Memory
from .settings import Settings
from .staged import MIB, Device, Outlet, Stage
from .wire import Beat, Message, WireInfo, Worker, decode, encode

log = logging.getLogger(__name__)
DOOR = "tcp"
"""The transport of meeting points."""
SEND_SECONDS = 5.0
"""How long a message may take to be taken by the wire."""
BEAT_SECONDS = 0.5
"""The same for a beat, which the next one makes up for."""
CONNECT_SECONDS = 2.0
STOP_SECONDS = 5.0
_BEAT = encode(Beat())


class User(Protocol):
    """Whom a courier works for. Called from the threads of its wires."""

    def arrived(self, wire: Wire, peer: Peer, message: Message) -> None: ...

    def noticed(self, wire: Wire, peer: Peer, notice: int) -> None: ...

    def settled(self) -> None:
        """Some puts have ended."""

    def tick(self) -> None:
        """Now and then, from a thread of its own, which no wire and no peer holds up for long."""


class Wire:
    """One endpoint, its thread and this worker's memory on it."""

    def __init__(
        self,
        endpoint: Endpoint,
        buffers: Sequence[Memory],
        user: User,
        settings: Settings,
        stage: Stage | None = None,
    ) -> None:
        """``stage``: of memory that the endpoint does not reach, in place of ``buffers``."""
        self.endpoint = endpoint
        self.name = endpoint.capabilities.name
        self.stage = stage
        self.regions: list[Region] = (
            [endpoint.register(buffer) for buffer in buffers]
            if stage is None
            else [stage.landing.region]
        )
        self.listened = 0.0
        """Seconds for which peers were listened to: the clock by which their silence counts. It
        stands still while this thread, or the whole process, does, since what they said meanwhile
        is still to be heard."""
        self._user = user
        self._turn = settings.beat
        """Seconds that one poll waits at most."""
        # A link between hosts ends with the first deadline that is missed on it, and with it all
        # that is being put: not before the other side is taken for gone.
        self._least = settings.lease if endpoint.capabilities.cross_host else 0.0
        self.put_seconds = max(DEFAULT_TIMEOUT, settings.lease)
        """How long a put may take."""
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._ending = threading.Event()
        self._own = endpoint.connect(endpoint.address())
        self._thread = threading.Thread(target=self._run, name=f"kv-{self.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def info(self) -> WireInfo:
        grids = self.stage.landing.grids if self.stage is not None else []
        return WireInfo(self.endpoint.address(), [region.ref for region in self.regions], grids)

    def call(self, act: Callable[[], None]) -> None:
        """Runs ``act`` in the wire's thread, where alone connections and ranges may be made."""
        self._calls.put(act)
        self.send(self._own, b"")

    def tell(self, peer: Peer, message: Message) -> bool:
        """False where it could not be sent, which is logged."""
        return self.send(peer, encode(message))

    def beat(self, peer: Peer) -> bool:
        """Says that this worker lives. False where the peer is gone, or the way to it is; one that
        does not read is only given less time."""
        try:
            self.endpoint.send(peer, _BEAT, max(BEAT_SECONDS, self._least))
        except DeadlineError as problem:
            log.info("%s does not read: %s", peer.address, problem)
        except TransportError as problem:
            log.info("%s cannot be reached: %s", peer.address, problem)
            return False
        return True

    def send(self, peer: Peer, data: bytes) -> bool:
        try:
            self.post(peer, data)
        except TransportError as problem:
            log.warning("%s cannot be told: %s", peer.address, problem)
            return False
        return True

    def reply(self, peer: Peer, message: Message) -> bool:
        """As ``tell``, over a new connection where the last one is broken. In the wire's thread."""
        try:
            self.post(peer, encode(message))
            return True
        except DeadlineError as problem:
            log.warning("%s does not read: %s", peer.address, problem)
            return False
        except TransportError:
            with contextlib.suppress(TransportError):
                self.endpoint.connect(peer.address, CONNECT_SECONDS)
            return self.tell(peer, message)

    def post(self, peer: Peer, data: bytes) -> None:
        """``TransportError`` where it cannot."""
        self.endpoint.send(peer, data, max(SEND_SECONDS, self._least))

    def close(self) -> None:
        self._ending.set()
        if self._thread.is_alive():
            self.send(self._own, b"")
            self._thread.join(STOP_SECONDS)
        self.endpoint.close()

    def _run(self) -> None:
        last = time.monotonic()
        while not self._ending.is_set():
            events = self.endpoint.poll(self._turn)
            while not self._calls.empty():
                _guarded(self._calls.get_nowait())
            _guarded(lambda events=events: self._hand_over(events))
            now = time.monotonic()
            self.listened += min(now - last, self._turn)
            last = now

    def _hand_over(self, events: Events) -> None:
        for peer, data in events.messages:
            if data:
                self._read(peer, data)
        for peer, notice in events.notices:
            self._user.noticed(self, peer, notice)
        if events.tickets:
            self._user.settled()

    def _read(self, peer: Peer, data: bytes) -> None:
        try:
            message = decode(data)
        except (msgspec.ValidationError, msgspec.DecodeError) as problem:
            log.warning("dropped a malformed message from %s: %s", peer.address, problem)
            return
        self._user.arrived(self, peer, message)


class _Ticker:
    """Calls something every so often, from a thread of its own."""

    def __init__(self, act: Callable[[], None], seconds: float) -> None:
        self._act = act
        self._seconds = seconds
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-tick", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join(STOP_SECONDS)

    def _run(self) -> None:
        while not self._ending.wait(self._seconds):
            _guarded(self._act)


class Courier:
    """All wires of one worker; the door is among them."""

    def __init__(
        self,
        rank: int,
        settings: Settings,
        buffers: Sequence[Memory],
        user: User,
        device: Device | None = None,
    ) -> None:
        """``ConfigError`` where the meeting point's port is taken, since peers know it by its
        number, and where no wire takes this memory. ``device``: the cache, where it is on one."""
        self._device = device
        self.wires: dict[str, Wire] = {}
        self._rank, self._settings, self._user = rank, settings, user
        self._known: dict[tuple[str | None, int | None], str] = {}
        """Addresses of doors by host and port, of workers that have data go there too."""
        self._ticker = _Ticker(user.tick, settings.beat)
        network = settings.network(rank)
        wanted = carriers(settings.transport, kind_of(buffers))
        try:
            self.wires[DOOR] = self._open(DOOR, network, buffers if DOOR in wanted else ())
            if f":{network.port}/" not in self.door.endpoint.address():
                raise ConfigError(
                    f"port {network.port} of {network.bind_host}, the meeting point, is taken: "
                    "set kv_port to another"
                )
            # Whatever other wires listen at is theirs to choose: ports in a row are doors.
            anywhere = msgspec.structs.replace(network, port=0)
            self._open_all([each for each in wanted if each != DOOR], anywhere, buffers)
        except BaseException:
            self.close()
            raise
        self.data = [each for each, wire in self.wires.items() if wire.regions]

    def _open_all(
        self, transports: list[str], network: NetworkConfig, buffers: Sequence[Memory]
    ) -> None:
        """With auto, one that does not take this memory is passed over where another does."""
        reasons = []
        for each in transports:
            try:
                self.wires[each] = self._open(each, network, buffers)
            except (TransportError, ValueError) as problem:
                reasons.append(f"{each}: {problem}")
                log.warning("the KV cache is not moved by %s: %s", each, problem)
        if reasons and (
            self._settings.transport != AUTO or not any(w.regions for w in self.wires.values())
        ):
            raise ConfigError(f"no transport moves this KV cache: {'; '.join(reasons)}")

    def _open(self, transport: str, network: NetworkConfig, buffers: Sequence[Memory]) -> Wire:
        endpoint = create_endpoint(transport, f"kv-{self._rank}-{transport}", network)
        try:
            stage = None
            if buffers and self._device is not None and is_staged(transport, kind_of(buffers)):
                nbytes = self._settings.staging_mib * MIB
                stage = Stage(self._device, endpoint.register, nbytes)
            return Wire(endpoint, buffers, self._user, self._settings, stage)
        except BaseException:
            endpoint.close()
            raise

    @property
    def door(self) -> Wire:
        return self.wires[DOOR]

    def start(self) -> None:
        # A thread that waits in native code while the interpreter ends would abort the process.
        atexit.register(self.close)
        for wire in self.wires.values():
            wire.start()
        self._ticker.start()

    def learn(self, worker: Worker, place: tuple[str, int] | None = None) -> None:
        """``worker`` is met at its door's address, and at ``place``: knocks go to it by the link
        that is there. Over tcp a new one would end it, with what is being put over it."""
        info = worker.wires.get(DOOR)
        if info is not None:
            parts = urlsplit(info.address)
            for each in (place, (parts.hostname, parts.port)):
                if each is not None:
                    self._known[each] = info.address

    def knock(self, host: str, port: int, message: Message) -> None:
        """To the meeting point of another worker; what answers has an address of its own. In the
        door's thread. ``TransportError`` where nobody answers, ``RefusedError`` where who does
        will not hear this one."""
        door, data = self.door, encode(message)
        endpoint = door.endpoint
        known = self._known.get((host, port))
        if known is not None:
            try:
                door.post(endpoint.connect(known, CONNECT_SECONDS), data)
                return
            except DeadlineError:
                raise  # it may only be busy, and keeps its link
            except TransportError:
                del self._known[host, port]  # it has ended; another may be there by now
        peer = endpoint.connect(whoever_listens(host, port), CONNECT_SECONDS)
        door.post(peer, data)

    def outlets(self, wire: Wire, matches: Sequence[Match]) -> list[Outlet | None]:
        """By layer, the ways through host memory that puts over this wire take, if they must."""
        if wire.stage is None or self._device is None:
            return [None] * len(matches)
        return [Outlet(self._device, wire.stage.circle, match) for match in matches]

    @property
    def stages(self) -> list[Stage]:
        return [wire.stage for wire in self.wires.values() if wire.stage is not None]

    def close(self) -> None:
        atexit.unregister(self.close)
        self._ticker.close()
        for wire in self.wires.values():
            wire.close()


def _guarded(act: Callable[[], None]) -> None:
    """A mistake of ours must not end a thread that all transfers need."""
    try:
        act()
    except Exception:
        log.exception("the KV courier failed at one thing and goes on")


def is_cut_off(endpoint: Endpoint, address: str) -> bool:
    """Whether nothing that the peer at ``address`` has put can still be written here. In the
    endpoint's thread."""
    try:
        if endpoint.capabilities.cross_host:
            endpoint.fence(address, 0.2)
            return True
        # The peer itself writes: it must be gone.
        endpoint.connect(address, 0.2)
    except TimeoutError:
        return False
    except TransportError:
        return not endpoint.capabilities.cross_host
    return False
