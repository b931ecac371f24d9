"""Where the HTTP server listens and what it calls itself."""

from __future__ import annotations

import msgspec

from ..core.errors import ConfigError


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The HTTP server; it listens on this machine only unless told otherwise."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every interface."""
    port: int = 8000
    """TCP port, 0 to 65535; 0 takes a free one, which the ready line tells."""
    served_model_name: str | None = None
    """Name that clients ask for; None: the model's own name."""
    api_key: str | None = None
    """Where set, requests must carry it as a bearer token (all but /health and /version)."""

    def __post_init__(self) -> None:
        port = self.port
        good = isinstance(port, int) and not isinstance(port, bool) and 0 <= port <= 65535
        if not good:
            raise ConfigError(f"server.port must be an integer from 0 to 65535, not {port!r}")
        if not isinstance(self.host, str) or not self.host:
            raise ConfigError(f"server.host must be a non-empty string, not {self.host!r}")
        for field in ("served_model_name", "api_key"):
            if getattr(self, field) == "":
                raise ConfigError(f"server.{field} must be a non-empty string or none, not ''")
