"""The listening side of the handshake: a thread that takes connections and judges them.

Strangers cost little: the connections that have not proven themselves are few, live briefly, and
the oldest makes way for the newest. What an accepted connection is used for is not known here.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable

from ..core.errors import TransportError
from ._tcp_address import ANYONE, TcpAddress
from ._tcp_meet import (
    DIALLER,
    HELLO_BYTES,
    LISTENER,
    PROOF_BYTES,
    VERSION,
    Hello,
    Secret,
    Verdict,
    challenge,
    prepare_socket,
    verdict,
)

log = logging.getLogger(__name__)
MOST_UNPROVEN = 256
"""Connections that have not proven themselves; one more ends the oldest."""
PROVE_WITHIN = 5.0
"""Seconds from a connection to its proof."""
LOG_EVERY = 10.0
"""Seconds between two lines about strangers."""
IDLE = 60.0
"""Longest wait of the thread; only so that it has one."""


class _Guest:
    """A connection that has not proven itself."""

    def __init__(self, sock: socket.socket, host: str) -> None:
        self.sock = sock
        self.host = host
        self.deadline = time.monotonic() + PROVE_WITHIN
        self.read = b""
        self.wanted = HELLO_BYTES
        self.hello: Hello | None = None
        self.said = b""
        self.nonce = b""


class Acceptor:
    """``adopt(hello, socket)`` gets every connection that has proven itself, in this thread; it
    answers whether the connection is of use. ``make_way(hello)`` runs before the other end is told
    that it is welcome; its ``TransportError`` refuses the connection."""

    def __init__(
        self,
        listener: socket.socket,
        address: TcpAddress,
        secret: Secret,
        make_way: Callable[[Hello], None],
        adopt: Callable[[Hello, socket.socket], bool],
    ) -> None:
        self.refused = 0
        """Connections that did not prove themselves."""
        self._listener = listener
        self._address = address
        self._secret = secret
        self._make_way = make_way
        self._adopt = adopt
        self._guests: dict[socket.socket, _Guest] = {}
        self._logged_at = -LOG_EVERY
        self._stopping = threading.Event()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._thread = threading.Thread(
            target=self._run, name=f"tcp-accept-{address.port}", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        os.eventfd_write(self._wake, 1)
        self._thread.join(IDLE)
        assert not self._thread.is_alive(), "nothing in that thread blocks"
        os.close(self._wake)

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                for key, _ in self._selector.select(self._wait()):
                    if key.fileobj is self._listener:
                        self._take_all()
                    elif key.data is not None:
                        self._read(key.data)
                self._drop_late()
        finally:
            self._selector.close()
            self._listener.close()
            for guest in self._guests.values():
                guest.sock.close()

    def _wait(self) -> float:
        # Guests come in order, so the first one's deadline is the next.
        for guest in self._guests.values():
            return max(guest.deadline - time.monotonic(), 0.0)
        return IDLE

    def _take_all(self) -> None:
        # No more in one turn than may wait: who means well is heard before others push it out.
        for _ in range(max(1, MOST_UNPROVEN // 4)):
            try:
                sock, where = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                # Out of descriptors, most likely: others must close some first.
                self._log(f"cannot take connections: {error}")
                self._stopping.wait(0.1)
                return
            sock.setblocking(False)
            if len(self._guests) >= MOST_UNPROVEN:
                self._refuse(next(iter(self._guests.values())), "too many others came after it")
            guest = self._guests[sock] = _Guest(sock, str(where[0]))
            self._selector.register(sock, selectors.EVENT_READ, guest)

    def _drop_late(self) -> None:
        now = time.monotonic()
        late = [guest for guest in self._guests.values() if guest.deadline <= now]
        for guest in late:
            self._refuse(guest, f"it did not prove itself within {PROVE_WITHIN:g} s")

    def _read(self, guest: _Guest) -> None:
        if guest.sock not in self._guests:
            return  # it made way for another in this very round
        try:
            data = guest.sock.recv(guest.wanted - len(guest.read))
        except BlockingIOError:
            return
        except OSError as error:
            self._refuse(guest, str(error.strerror))
            return
        guest.read += data
        if not data:
            self._refuse(guest, "it closed the connection")
        elif len(guest.read) == guest.wanted:
            try:
                self._answer(guest)
            except (TransportError, OSError) as error:
                self._refuse(guest, str(error))

    def _answer(self, guest: _Guest) -> None:
        said, guest.read = guest.read, b""
        if guest.hello is None:
            guest.hello = Hello.unpack(said)
            guest.said, guest.nonce, guest.wanted = said, secrets.token_bytes(32), PROOF_BYTES
            self._challenge(guest, guest.hello)
        elif self._secret.proves(said, DIALLER, guest.said, guest.nonce):
            self._make_way(guest.hello)
            self._welcome(guest, guest.hello)
        else:
            guest.sock.send(verdict(Verdict.SECRET))
            raise TransportError("it does not know the secret")

    def _challenge(self, guest: _Guest, hello: Hello) -> None:
        found = Verdict.WELCOME
        if hello.version != VERSION:
            found = Verdict.VERSION
        elif hello.incarnation not in (self._address.incarnation, ANYONE):
            found = Verdict.INCARNATION
        proof = self._secret.proof(LISTENER, guest.said, guest.nonce)
        guest.sock.send(challenge(found, guest.nonce, proof))
        if found is Verdict.VERSION:
            raise TransportError(f"it speaks version {hello.version} of the wire, not {VERSION}")
        if found is Verdict.INCARNATION:
            raise TransportError("it wants an earlier endpoint on this port")

    def _welcome(self, guest: _Guest, hello: Hello) -> None:
        """The verdict first: the engine owns the socket once it has been adopted."""
        self._forget(guest)
        with contextlib.suppress(OSError):  # gone already: the engine will see
            prepare_socket(guest.sock)
            guest.sock.send(verdict(Verdict.WELCOME))
        if not self._adopt(hello, guest.sock):
            log.debug("%s: %s ended its link while it dialled", self._address, hello.address)

    def _forget(self, guest: _Guest) -> None:
        del self._guests[guest.sock]
        self._selector.unregister(guest.sock)

    def _refuse(self, guest: _Guest, reason: str) -> None:
        self._forget(guest)
        self.refused += 1  # before the end can be seen
        guest.sock.close()
        self._log(f"dropped a connection from {guest.host}: {reason} ({self.refused} so far)")

    def _log(self, line: str) -> None:
        """At a bounded rate: strangers must not fill logs."""
        now = time.monotonic()
        if now - self._logged_at >= LOG_EVERY:
            self._logged_at = now
            log.warning("%s: %s", self._address, line)
