"""Runs a check: of this host with a second process, or of two hosts that meet over tcp."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Sequence

import msgspec

from ..config.network import NetworkConfig
from ..core.errors import CloverError, ConfigError, DeadlineError, TransportError, describe
from ..transport import (
    Capabilities,
    Endpoint,
    Peer,
    capabilities,
    create_endpoint,
    join,
    missing,
    transport_names,
)
from ..transport.choice import Choice, choose, offer
from ..transport.tcp import whoever_listens
from .far import Far
from .host import findings
from .measure import check_transport
from .messages import Answer, Ask
from .near import Near, second_process
from .report import FAIL, NOTE, OK, Finding, good
from .sides import NUDGE, STEP, Control

CONTROL = "tcp"
"""What two sides talk over: every host has it."""
_NAMED_ONLY = ("null", "ray")
"""One moves nothing; the other takes seconds to import, and a running cluster."""
_HOST_PORT = re.compile(r"(\[[^\]]+\]|[^:\[\]]+):(\d{1,5})")

Emit = Callable[[Finding], None]
Progress = Callable[[str], None]


def check_host(
    asked: Sequence[str], network: NetworkConfig, emit: Emit, progress: Progress
) -> None:
    """This host, with a second process: its parts, then every transport, or those asked for."""
    absent: list[Finding] = []
    chosen = _usable(asked, absent, lambda able: able.cross_process, "within one process only")
    for finding in findings(network) + absent:
        emit(finding)
    if not asked:
        ends = offer("this process"), offer("another", process="another")
        emit(automatic(choose(*ends), "two processes of this host"))
    if not chosen:
        return
    # The talk is this host's own, wherever else the network's settings lead.
    own = msgspec.structs.replace(network, bind_host="127.0.0.1", advertise_host=None, port=0)
    progress("starting a second process")
    try:
        with second_process(network, own, CONTROL) as near:
            for transport in chosen:
                check_transport(near, transport, network, emit, progress)
    except TransportError as error:
        emit(Finding(FAIL, "second process", describe(error)))


def check_pair(
    asked: Sequence[str], network: NetworkConfig, where: str, emit: Emit, progress: Progress
) -> None:
    """This host and the one that listens at ``where`` (host:port); ``ConfigError`` for what is no
    such place."""
    host, port = split(where)
    network = _reachable_from(host, port, network)
    absent: list[Finding] = []
    chosen = _usable(asked, absent, lambda able: able.cross_host, "within one host only")
    for finding in findings(network) + absent:
        emit(msgspec.structs.replace(finding, host=socket.gethostname()))
    found: list[Finding] = []

    def keep(finding: Finding) -> None:
        found.append(finding)
        emit(finding)

    try:
        endpoint = create_endpoint(CONTROL, "verify", network)
        try:
            progress(f"connecting to {where}")
            near = Near(Control(endpoint, _meet(endpoint, host, port)))
            for finding in near.ask(Ask("findings")).findings:
                keep(msgspec.structs.replace(finding, host=host))
            if not asked:
                theirs = near.ask(Ask("offer")).offer
                assert theirs is not None
                keep(automatic(choose(offer(f"{socket.gethostname()} here"), theirs), "the two"))
            for transport in chosen:
                check_transport(near, transport, network, keep, progress)
            near.ask(Ask("end", good=good(found)))
        finally:
            endpoint.close()
    except TransportError as error:
        emit(Finding(FAIL, "peer", describe(error), _advice(error)))


def listen(network: NetworkConfig, wait: float, emit: Emit, ready: Progress) -> None:
    """Waits up to ``wait`` seconds for another host and serves its check. ``ready`` is told where
    others find this one."""
    for finding in findings(network):
        emit(finding)
    if network.secret is None:
        text = "none: whoever reaches the port can take part"
        emit(Finding(NOTE, "secret", text, "set CLOVER_NETWORK_SECRET to the same on both sides"))
    try:
        endpoint = create_endpoint(CONTROL, "verify", network)
        try:
            ready(_place(endpoint))
            peer = _first(endpoint, wait)
            control = Control(endpoint, peer)
            control.say(Answer())
            if not Far(control, network).serve():
                emit(Finding(FAIL, "peer", f"{peer.address} has found failures"))
            else:
                emit(Finding(OK, "peer", f"{peer.address} is content"))
        finally:
            endpoint.close()
    except TransportError as error:
        emit(Finding(FAIL, "peer", describe(error)))


def automatic(choice: Choice, between: str) -> Finding:
    """What ``--transport auto`` takes, for host memory, and why not what comes before it."""
    passed = "".join(f"; not {one.transport}: {one.reason}" for one in choice.passed_over)
    if not choice.transport:
        return Finding(FAIL, "auto", f"no transport connects {between}{passed}")
    return Finding(OK, "auto", f"takes {choice.transport} between {between}{passed}")


def split(where: str) -> tuple[str, int]:
    """``host:port``, an IPv6 address in brackets; ``ConfigError`` for anything else."""
    match = _HOST_PORT.fullmatch(where)
    if match is None or int(match[2]) > 65535:
        raise ConfigError(f"{where!r} is no HOST:PORT (an IPv6 address in brackets)")
    return match[1].strip("[]"), int(match[2])


def _place(endpoint: Endpoint) -> str:
    """The host:port in its address."""
    return endpoint.address().partition("://")[2].partition("/")[0]


def _reachable_from(host: str, port: int, network: NetworkConfig) -> NetworkConfig:
    """Both sides dial each other: where we would listen at the loopback only, and the peer is
    elsewhere, we take the address that leads to it."""
    if network.bind_host not in ("127.0.0.1", "localhost", "::1"):
        return network
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)  # sends nothing; it picks the interface
            own = str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"cannot find a way to {host!r}: {error.strerror or error}") from error
    return msgspec.structs.replace(network, bind_host=own)


def _meet(endpoint: Endpoint, host: str, port: int) -> Peer:
    """Who listens there, by its own address, which it tells by answering."""
    endpoint.send(endpoint.connect(whoever_listens(host, port)), b"")
    return endpoint.connect(_first(endpoint, STEP).address)


def _first(endpoint: Endpoint, wait: float) -> Peer:
    """The sender of the first message; ``DeadlineError`` where none comes."""
    end = time.monotonic() + wait
    while time.monotonic() < end:
        for peer, _ in endpoint.poll(NUDGE).messages:
            return peer
    raise DeadlineError(f"nobody came within {wait:.0f} s")


def _advice(error: TransportError) -> str:
    text = str(error)
    if "secret" in text:
        return "set CLOVER_NETWORK_SECRET to the same on both sides"
    if "nobody" in text:
        return "the other side cannot dial back: see --bind-host here, and firewalls between"
    if "refused" in text or "route" in text or "time" in text:
        return "run `cloverinfer verify --listen HOST:PORT` there; see firewalls between"
    return ""


def _usable(
    asked: Sequence[str], absent: list[Finding], fits: Callable[[Capabilities], bool], where: str
) -> list[str]:
    """The transports to check; why others are not goes to ``absent``. What was asked for by name
    must be there, and is joined where that takes something; else absence is a note."""
    chosen = []
    for transport in asked or [name for name in transport_names() if name not in _NAMED_ONLY]:
        reason = _reason(transport, transport in asked, fits, where)
        if not reason:
            chosen.append(transport)
        elif transport in asked or fits(capabilities(transport)):
            absent.append(Finding(FAIL if asked else NOTE, transport, reason))
    return chosen


def _reason(transport: str, asked: bool, fits: Callable[[Capabilities], bool], where: str) -> str:
    """Why a transport is not checked; empty where it is."""
    try:
        if asked:
            join(transport)
        reason = missing(transport)
    except CloverError as error:
        return describe(error)
    able = capabilities(transport)
    if reason:
        return reason
    if not fits(able):
        return f"it connects {where}"
    return "" if "host" in able.memory else "it moves device memory only, which is not tried here"
