"""How nodes reach each other, and how much they distrust what arrives."""

from __future__ import annotations

import ipaddress
import os

import msgspec

from ..core.errors import ConfigError

RDMA_DEVICES = "CLOVER_RDMA_DEVICES"
"""Variable of a host: its RDMA devices with commas between, the i-th for nodes on its i-th GPU."""
CHECKSUMS = ("none", "crc32c")
GID_TYPES = ("auto", "ib", "roce_v1", "roce_v2")
MTUS = (256, 512, 1024, 2048, 4096)
_RDMA_LIMITS = {
    "rdma_port": (1, 255),
    "rdma_block_size": (4096, 1 << 30),
    "rdma_queue_pairs": (1, 16),
    "rdma_queue_depth": (2, 8192),
    "rdma_timeout": (1, 31),
    "rdma_retries": (0, 7),
    "rdma_service_level": (0, 15),
    "rdma_spin_us": (0, 1_000_000),
}


def rdma_devices() -> tuple[str, ...]:
    """Of this host, as ``RDMA_DEVICES`` says; empty where it says nothing."""
    names = os.environ.get(RDMA_DEVICES, "").split(",")
    return tuple(name.strip() for name in names if name.strip())


def _is_address(text: str | None) -> bool:
    """Whether it is none, or an IP address as the device's table spells it."""
    if text is None:
        return True
    try:
        return str(ipaddress.ip_address(text)) == text
    except ValueError:
        return False


class NetworkConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The data plane of every node of a cluster."""

    bind_host: str = "127.0.0.1"
    """Address that wires between hosts listen at; 0.0.0.0 is every interface."""
    advertise_host: str | None = None
    """Host name or address that peers are told; None: ``bind_host``, or where that is every
    interface this host's own address."""
    port: int = 0
    """Port that wires between hosts listen at, 0 to 65535; where it is taken, the next free one of
    63 above it, as nodes of one host share a configuration. 0 takes any free one."""
    secret: str | None = None
    """Peers prove to each other that they know it; None: a fresh one for every cluster."""
    tcp_streams: int = 4
    """Connections per peer over tcp, 1 to 64."""
    copy_threads: int | None = None
    """Threads that copy a put of 4 MiB and more over shm, 1 to 64; None: one for each core that the
    process may use, at most 4."""
    checksum: str = "none"
    """none, or crc32c: of every block of a KV transfer, checked by the receiver."""
    staging_mib: int = 64
    """Ring in MiB that a receiver takes blocks in where the sender's layout differs or the pool is
    on a device that the wire does not reach; a sender's mirror of such a pool has as much."""
    rdma_device: str | None = None
    """Device of the rdma transport on every host, as ``cloverinfer verify`` names it (mlx5_0);
    None: the one that ``CLOVER_RDMA_DEVICES`` of a host names for a node's GPU, else the first
    whose port is active."""
    rdma_port: int = 1
    """Its port, 1 to 255."""
    rdma_gid_index: int | None = None
    """Entry of the port's GID table; None: found by the two that follow."""
    rdma_gid_type: str = "auto"
    """auto, ib, roce_v1 or roce_v2. Auto prefers RoCE v2, IPv4 and addresses that can be routed."""
    rdma_gid_address: str | None = None
    """IPv4 or IPv6 address that the GID must have; None: any."""
    rdma_mtu: int | None = None
    """Bytes of data in a packet: 256, 512, 1024, 2048 or 4096; the smaller of both ends counts.
    None: as much as the port carries now."""
    rdma_block_size: int = 1 << 20
    """Bytes of the largest single write, 4096 to 2^30: longer pieces are divided."""
    rdma_queue_pairs: int = 4
    """Queue pairs per peer, 1 to 16; puts of 4 MiB and more are spread over all of them."""
    rdma_queue_depth: int = 128
    """Writes of one queue pair that the network card may have at a time, 2 to 8192; what is more
    waits in the endpoint."""
    rdma_signal_every: int = 16
    """Every n-th write tells of its completion, and the last one of every put; 1 to the queue's
    depth. Less often costs less, and frees the queue in larger steps."""
    rdma_timeout: int = 14
    """How long the card waits for an answer: 4.096 us * 2^n, n from 1 to 31 (14: 67 ms)."""
    rdma_retries: int = 6
    """How often it then sends again before the queue pair fails, 0 to 7; an
    acknowledgement lets it count anew. Soft RoCE takes 7 as without end."""
    rdma_service_level: int = 0
    """InfiniBand service level, or RoCE priority, of all packets, 0 to 15."""
    rdma_spin_us: int = 0
    """Microseconds that ``poll`` looks at the completion queues itself before it sleeps, 0 to
    1000000: lower latency for a core's time, as nothing has to be woken. 0: it sleeps at once."""
    rdma_on_demand_paging: bool = False
    """Registers memory without locking it, where the device can (ODP). Without it all pools count
    against the limit on locked memory."""

    def __post_init__(self) -> None:
        self._check("bind_host", bool(self.bind_host), "a host name or an address")
        self._check("advertise_host", self.advertise_host != "", "a host name or an address")
        self._check("port", 0 <= self.port <= 65535, "from 0 to 65535")
        self._check("secret", self.secret != "", "a non-empty string")
        self._check("tcp_streams", 1 <= self.tcp_streams <= 64, "from 1 to 64")
        threads = self.copy_threads
        self._check("copy_threads", threads is None or 1 <= threads <= 64, "from 1 to 64")
        self._check("checksum", self.checksum in CHECKSUMS, f"one of {', '.join(CHECKSUMS)}")
        self._check("staging_mib", 1 <= self.staging_mib <= 1 << 20, "from 1 to 1048576")
        self._check_rdma()

    def _check_rdma(self) -> None:
        self._check("rdma_device", self.rdma_device != "", "the name of a device")
        index, mtu = self.rdma_gid_index, self.rdma_mtu
        self._check("rdma_gid_index", index is None or 0 <= index <= 255, "from 0 to 255")
        known = self.rdma_gid_type in GID_TYPES
        self._check("rdma_gid_type", known, f"one of {', '.join(GID_TYPES)}")
        self._check("rdma_gid_address", _is_address(self.rdma_gid_address), "an IP address")
        allowed = f"one of {', '.join(map(str, MTUS))}"
        self._check("rdma_mtu", mtu is None or mtu in MTUS, allowed)
        for field, (low, high) in _RDMA_LIMITS.items():
            good = low <= getattr(self, field) <= high
            self._check(field, good, f"from {low} to {high}")
        depth = self.rdma_queue_depth
        good = 1 <= self.rdma_signal_every <= depth
        self._check("rdma_signal_every", good, f"from 1 to rdma_queue_depth, which is {depth}")

    def __repr__(self) -> str:
        """Logs and errors never tell the secret."""
        fields = msgspec.structs.asdict(self)
        if self.secret is not None:
            fields["secret"] = "***"
        return f"NetworkConfig({', '.join(f'{key}={value!r}' for key, value in fields.items())})"

    def _check(self, field: str, good: bool, allowed: str) -> None:
        if not good:
            raise ConfigError(f"network.{field} must be {allowed}, not {getattr(self, field)!r}")
