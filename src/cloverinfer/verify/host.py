"""What this host has for transports: memory, RDMA, network, NUMA; read from /sys and /proc.

``root`` stands for ``/`` in tests. What CUDA says is ``cuda``'s.
"""

from __future__ import annotations

import fcntl
import os
import resource
import socket
import struct
import sys
from pathlib import Path

from ..config.network import NetworkConfig
from .cuda import cuda_findings
from .rdma import direct_paths, exported_memory
from .report import FAIL, NOTE, OK, Finding, gib

ROOT = Path("/")
LEAST_SHM = 1 << 30
"""Bytes free under /dev/shm below which it is said: pools and test regions live there."""
_SIOCGIFADDR = 0x8915
_EVERY = ("0.0.0.0", "::")


def findings(network: NetworkConfig, root: Path = ROOT) -> list[Finding]:
    """Everything there is to say about this host; only what cannot work is a failure."""
    return [
        shared_memory(root),
        *rdma_devices(root),
        locked_memory(root),
        *cuda_findings(root),
        *direct_paths(root),
        *(exported_memory() if root == ROOT else []),
        numa_nodes(root),
        listening(network),
        *interfaces(root),
        ray(),
    ]


def shared_memory(root: Path) -> Finding:
    path = root / "dev/shm"
    fix = "mount a tmpfs there"
    if not path.is_dir():
        return Finding(FAIL, "shared memory", "/dev/shm is missing", fix)
    if not os.access(path, os.W_OK):
        return Finding(FAIL, "shared memory", "/dev/shm is not writable", fix)
    status = os.statvfs(path)
    size, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    text = f"/dev/shm has {gib(size)}, {gib(free)} free"
    if free < LEAST_SHM:
        fix = "make it larger (docker: --shm-size; else mount -o remount,size=...)"
        return Finding(NOTE, "shared memory", text, fix)
    return Finding(OK, "shared memory", text)


def rdma_devices(root: Path) -> list[Finding]:
    """A line for each port of each device."""
    devices = _listed(root / "sys/class/infiniband")
    if not devices:
        return [Finding(NOTE, "rdma", "no RDMA devices")]
    return [_port(device, port) for device in devices for port in _listed(device / "ports")]


def _port(device: Path, port: Path) -> Finding:
    name = f"rdma {device.name}/{port.name}"
    state = _read(port / "state").rpartition(":")[2].strip() or "unknown"
    link = _read(port / "link_layer") or "unknown link"
    gids = _gids(port)
    text = f"{link}, link {state}, {_read(port / 'rate') or 'unknown rate'}, {gids or 'no GIDs'}"
    if state != "ACTIVE":
        fix = "see the cable and the switch, or `ip link set ... up` for RoCE"
        return Finding(NOTE, name, text, fix)
    if not gids:
        return Finding(NOTE, name, text, "give its interface an address")
    return Finding(OK, name, text)


def _gids(port: Path) -> str:
    """How many GIDs of which kind."""
    kinds: dict[str, int] = {}
    for gid in _listed(port / "gids"):
        if set(_read(gid)) - set("0:"):
            kind = _read(port / "gid_attrs/types" / gid.name) or "GID"
            kinds[kind] = kinds.get(kind, 0) + 1
    return ", ".join(f"{count} x {kind}" for kind, count in sorted(kinds.items()))


def locked_memory(root: Path, limit: int | None = None) -> Finding:
    """``limit`` in bytes, -1 for none; this process's own unless given."""
    if limit is None:
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit in (-1, resource.RLIM_INFINITY):
        return Finding(OK, "locked memory", "no limit")
    fix = ""
    if _listed(root / "sys/class/infiniband"):
        fix = "RDMA locks all that it registers: ulimit -l unlimited (docker: --ulimit memlock=-1)"
    return Finding(NOTE, "locked memory", f"at most {limit / 2**20:.0f} MiB", fix)


def numa_nodes(root: Path) -> Finding:
    nodes = [node for node in _listed(root / "sys/devices/system/node") if node.name[4:].isdigit()]
    if len(nodes) > 1:
        cores = ", ".join(f"{node.name} has cores {_read(node / 'cpulist')}" for node in nodes)
        fix = "keep a node's cores, memory and network card on one (numactl)"
        return Finding(NOTE, "NUMA", cores, fix)
    return Finding(OK, "NUMA", "one node")


def listening(network: NetworkConfig) -> Finding:
    """Whether ``network.bind_host`` is an address of this host, and whether others can reach it."""
    host = network.bind_host
    try:
        family, kind, proto, _, where = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, proto) as trial:
            trial.bind(where)
    except OSError as error:
        text = f"cannot listen at network.bind_host {host!r}: {error.strerror or error}"
        return Finding(FAIL, "tcp address", text, "take an address of this host, or 0.0.0.0")
    address = str(where[0])
    if address.startswith("127.") or address == "::1":
        fix = "for other hosts: --bind-host 0.0.0.0 or an address of this host"
        return Finding(NOTE, "tcp address", f"{host}: only this host can reach it", fix)
    known = f", told to others as {network.advertise_host}" if network.advertise_host else ""
    every = " (every interface)" if address in _EVERY else ""
    return Finding(OK, "tcp address", f"{host}{every}{known}")


def interfaces(root: Path) -> list[Finding]:
    """A line for each interface that is up, but the loopback."""
    found = []
    for interface in _listed(root / "sys/class/net"):
        if interface.name == "lo" or _read(interface / "operstate") != "up":
            continue
        mtu = _read(interface / "mtu")
        speed = _read(interface / "speed")
        fast = f", {speed} Mb/s" if speed.isdigit() else ""
        address = _address(interface.name) if root == ROOT else ""
        text = f"MTU {mtu}{fast}{address and f', {address}'}"
        found.append(Finding(OK, f"interface {interface.name}", text))
    return found or [Finding(NOTE, "interfaces", "none is up but the loopback")]


def _address(interface: str) -> str:
    """Its IPv4 address; empty where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("256s", interface.encode()[:15])
        try:
            answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


def ray() -> Finding:
    """Whether this process is connected; Ray is not imported to find out."""
    module = sys.modules.get("ray")
    if module is not None and module.is_initialized():
        return Finding(OK, "ray cluster", "connected")
    return Finding(
        NOTE, "ray cluster", "not connected", "with --transport ray it joins RAY_ADDRESS"
    )


def _listed(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _read(file: Path) -> str:
    """Stripped; empty where the kernel does not tell."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""
