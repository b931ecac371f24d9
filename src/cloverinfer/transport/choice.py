"""Which transport connects two ends: the first of ``ORDER`` that both have.

An ``Offer`` is what one end says of itself before it has an endpoint: where it is, what memory it
holds and which transports its host lacks. It knows nothing of nodes beyond that.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from .base import Capabilities
from .registry import capabilities, missing, transport_names

ORDER = ("inproc", "cuda_ipc", "shm", "rdma", "nixl", "tcp", "ray")
"""Fastest first. One that is not part of this installation is passed over without a word."""
_DEVICE = {"cuda_ipc": "cuda"}
"""Transports that are for memory of a device."""
_SHM = "/dev/shm"


class Offer(msgspec.Struct, frozen=True):
    """One end, as far as the choice goes."""

    name: str
    host: str
    """Differs between hosts, and between boots of one host."""
    shared: str
    """Ends with the same one see the same shared memory and each other's processes."""
    process: str
    memory: tuple[str, ...] = ("host",)
    """Kinds of memory that it would move from or to; a wire that knows host memory alone moves
    other kinds through copies there."""
    device: int | None = None
    """Which of the host's devices its memory is on, if on any."""
    unreachable: tuple[tuple[int, int], ...] = ()
    """Devices of the host that cannot reach each other's memory."""
    missing: dict[str, str] = {}
    """Why it cannot use a transport, by name; those that it can use are not in it."""


class PassedOver(msgspec.Struct, frozen=True):
    """A transport that comes earlier in the order, and why it was not taken."""

    transport: str
    reason: str


class Choice(msgspec.Struct, frozen=True):
    """``transport`` is empty where two ends have none in common."""

    transport: str
    passed_over: tuple[PassedOver, ...] = ()


def offer(name: str, process: str | None = None, memory: tuple[str, ...] = ("host",)) -> Offer:
    """Of an end called ``name`` on this host: in this process, or in one that will be started."""
    reasons = {transport: _missing_here(transport) for transport in _installed()}
    return Offer(
        name=name,
        host=_boot_id(),
        shared=_shared_memory(),
        process=process or str(os.getpid()),
        memory=memory,
        missing={transport: reason for transport, reason in reasons.items() if reason},
        unreachable=() if reasons.get("cuda_ipc", "none") else _unreachable(),
    )


def choose(a: Offer, b: Offer) -> Choice:
    """The first transport of the order that connects the two."""
    return choose_for_all([(a, b)])


def choose_for_all(pairs: Sequence[tuple[Offer, Offer]]) -> Choice:
    """The first transport of the order that connects every pair."""
    passed: list[PassedOver] = []
    for transport in _installed():
        reason = reason_against(transport, pairs)
        if not reason:
            return Choice(transport, tuple(passed))
        passed.append(PassedOver(transport, reason))
    return Choice("", tuple(passed))


def reason_against(transport: str, pairs: Iterable[tuple[Offer, Offer]]) -> str:
    """Why a transport cannot connect one of the pairs, or is not meant for any of them; empty
    where it connects them all."""
    pairs = list(pairs)
    device = _DEVICE.get(transport)
    for a, b in pairs:
        for end in (a, b):
            if transport in end.missing:
                return f"{end.name}: {end.missing[transport]}"
        reason = _reach(capabilities(transport), a, b)
        if device is not None:
            reason = reason or _between_devices(a, b)
        if reason:
            return reason
    if device is not None and not any(device in end.memory for pair in pairs for end in pair):
        return f"no end has {device} memory to move"
    return ""


def _installed() -> list[str]:
    known = transport_names()
    return [transport for transport in ORDER if transport in known]


def _missing_here(transport: str) -> str:
    if transport == "ray" and "ray" not in sys.modules:
        return "Ray is not running in this process: use executor ray"  # and is slow to import
    return missing(transport)


def _reach(able: Capabilities, a: Offer, b: Offer) -> str:
    both = f"{a.name} and {b.name}"
    if a.host != b.host:
        return "" if able.cross_host else f"{both} are on different hosts"
    if a.process != b.process and not able.cross_process:
        return f"{both} are in different processes"
    if not able.cross_host and a.shared != b.shared:
        return f"{both} are in containers that share no memory"
    return ""


def _between_devices(a: Offer, b: Offer) -> str:
    if (a.device, b.device) in a.unreachable:
        return f"GPUs {a.device} and {b.device} of {a.name} and {b.name} do not reach each other"
    return ""


def _unreachable() -> tuple[tuple[int, int], ...]:
    from .cuda_ipc import unreachable  # it is there, since nothing of it is missing

    return unreachable()


def _boot_id() -> str:
    """The same for all containers of one running kernel."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else os.uname().nodename


def _shared_memory() -> str:
    """Two ends share memory by name where they see the same mount, and the same process ids."""
    mount = os.stat(_SHM).st_dev if os.path.isdir(_SHM) else "none"
    namespace = Path("/proc/self/ns/pid")
    return f"{mount}-{os.stat(namespace).st_ino if namespace.exists() else 'none'}"
