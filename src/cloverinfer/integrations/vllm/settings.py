"""What the connector is told: its settings, and what each request asks of it.

Owns the names of ``kv_connector_extra_config`` and ``kv_transfer_params``; does not know what
becomes of them.
"""

from __future__ import annotations

import os
from typing import Any, Union

import msgspec

from ...config.network import NetworkConfig, rdma_devices
from ...core.errors import ConfigError, RequestError
from ...transport import transport_names

SECRET_VARIABLE = "CLOVER_NETWORK_SECRET"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
_DATA_WIRES = ("auto", "cuda_ipc", "shm", "tcp", "nixl", "rdma")
MOST_ATTEMPTS = 1 << 31


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``kv_connector_extra_config``; every field may be left out."""

    kv_host: str = "127.0.0.1"
    """Address that the meeting points of this engine's workers listen at."""
    kv_port: int = 14579
    """Port of tensor-parallel rank 0; rank r listens at ``kv_port + r``."""
    advertise_host: str | None = None
    """What peers are told instead of ``kv_host``."""
    secret: str | None = None
    """Peers prove to each other that they know it; None: ``CLOVER_NETWORK_SECRET``."""
    transport: str = "auto"
    """Wire that blocks cross: auto (the first that both ends have: of shm, rdma, nixl, tcp for a
    cache in host memory, of cuda_ipc, rdma for one on a GPU), or one of these."""
    tcp_streams: int = 4
    """Connections per peer over tcp, 1 to 64."""
    lease: float = 30.0
    """Seconds of silence after which a peer is taken for gone, where its connection does not say
    so before. Beats come every quarter of it, and every second at least: leases under 4 s must be
    the same at both ends."""
    claim_timeout: float = 120.0
    """Seconds for which decode's blocks wait for a prefill, and prefill's for a decode."""
    retry_timeout: float = 10.0
    """Seconds for which decode's blocks wait for the next prefill after one was lost."""
    staging_mib: int = 1024
    """MiB of host memory in which blocks land whose cache is on a GPU, over wires that do not reach
    it; what has come before the others is as large as its prompts. Taken as it is used."""
    model_id: str = ""
    """Compared between peers; for models whose shape alone does not tell them apart."""

    def __post_init__(self) -> None:
        _check("kv_host", self.kv_host, bool(self.kv_host), "a host name or an address")
        _check("kv_port", self.kv_port, 1 <= self.kv_port <= 65535, "from 1 to 65535")
        _check("staging_mib", self.staging_mib, 1 <= self.staging_mib <= 1 << 20, "from 1 to 2^20")
        _check("transport", self.transport, self.transport in _DATA_WIRES, _one_of(_DATA_WIRES))
        for name in ("lease", "claim_timeout", "retry_timeout"):
            value = getattr(self, name)
            _check(name, value, 0.1 <= value <= 86400, "from 0.1 to 86400 seconds")

    @property
    def beat(self) -> float:
        """Seconds between two beats."""
        return min(self.lease / 4, 1.0)

    def network(self, rank: int) -> NetworkConfig:
        """Rank r takes the r-th of the host's RDMA devices, where the host names them.

        ``ConfigError`` where anybody could write into the cache.
        """
        secret = self.secret or os.environ.get(SECRET_VARIABLE) or None
        if secret is None and self.kv_host not in LOOPBACK:
            raise ConfigError(
                f"kv_host is {self.kv_host}, which others reach: set secret, or "
                f"{SECRET_VARIABLE} in the environment, to the same on every instance"
            )
        devices = rdma_devices()
        return NetworkConfig(
            bind_host=self.kv_host,
            advertise_host=self.advertise_host,
            port=self.kv_port + rank,
            secret=secret,
            tcp_streams=self.tcp_streams,
            rdma_device=devices[rank % len(devices)] if devices else None,
        )


def settings_from(extra: dict[str, Any]) -> Settings:
    """``ConfigError`` naming the key and what is allowed."""
    known = {field.name for field in msgspec.structs.fields(Settings)}
    for key in extra:
        if key not in known:
            raise ConfigError(
                f"kv_connector_extra_config has no {key!r}; known: {', '.join(sorted(known))}"
            )
    try:
        settings = msgspec.convert(extra, Settings, strict=True)
    except msgspec.ValidationError as problem:
        raise ConfigError(f"kv_connector_extra_config: {problem}") from problem
    wire = settings.transport
    if wire != "auto" and wire not in transport_names():
        raise ConfigError(f"transport {wire!r} is not part of this installation")
    return settings


class Load(msgspec.Struct, frozen=True):
    """A request's wish at decode: its prompt's cache comes from a prefill."""

    transfer: str


class Send(msgspec.Struct, frozen=True):
    """A request's wish at prefill: its prompt's cache goes to a decode."""

    transfer: str
    attempt: int
    host: str
    port: int


def wish_of(params: Any) -> Union[Load, Send, None]:
    """What ``kv_transfer_params`` ask for; ``RequestError`` where they make no sense."""
    if params is None:
        return None
    if not isinstance(params, dict):
        raise RequestError("kv_transfer_params must be an object", "kv_transfer_params")
    load, send = params.get("do_remote_prefill"), params.get("do_remote_decode")
    if not load and not send:
        return None
    if load and send:
        raise RequestError("a request cannot have its prefill and its decode elsewhere")
    transfer = params.get("transfer_id")
    if not isinstance(transfer, str) or not 1 <= len(transfer) <= 200:
        raise RequestError("transfer_id must be a string of 1 to 200 characters", "transfer_id")
    if load:
        return Load(transfer)
    attempt = params.get("attempt", 0)
    if type(attempt) is not int or not 0 <= attempt < MOST_ATTEMPTS:
        raise RequestError("attempt must be a whole number from 0 on", "attempt")
    host, port = _place(params.get("decode_address"))
    return Send(transfer, attempt, host, port)


def _place(text: Any) -> tuple[str, int]:
    host, _, port = text.rpartition(":") if isinstance(text, str) else ("", "", "")
    host = host.strip("[]")
    if not host or not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise RequestError(f"decode_address must be host:port, not {text!r}", "decode_address")
    return host, int(port)


def _one_of(names: tuple[str, ...]) -> str:
    return f"one of {', '.join(names)}"


def _check(name: str, value: object, good: bool, allowed: str) -> None:
    if not good:
        raise ConfigError(f"{name} must be {allowed}, not {value!r}")
