"""How nodes reach each other, and how much they distrust what arrives."""

from __future__ import annotations

import msgspec

from ..core.errors import ConfigError

CHECKSUMS = ("none", "crc32c")


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
    """Ring in MiB that a receiver takes blocks in where the sender's layout differs."""

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

    def __repr__(self) -> str:
        """Logs and errors never tell the secret."""
        fields = msgspec.structs.asdict(self)
        if self.secret is not None:
            fields["secret"] = "***"
        return f"NetworkConfig({', '.join(f'{key}={value!r}' for key, value in fields.items())})"

    def _check(self, field: str, good: bool, allowed: str) -> None:
        if not good:
            raise ConfigError(f"network.{field} must be {allowed}, not {getattr(self, field)!r}")
