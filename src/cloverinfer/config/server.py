"""Where the HTTP server listens, whom it lets in, and how it speaks for a model."""

from __future__ import annotations

from typing import Any

import msgspec

from ..core.errors import ConfigError

LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")
TOOL_CALL_PARSERS = ("hermes", "llama3_json", "mistral")
MOST_SECONDS = 86400


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The HTTP server; it listens on this machine only unless told otherwise.

    A list of strings may be given as one string, and in a variable as strings with commas between.
    """

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every interface."""
    port: int = 8000
    """TCP port, 0 to 65535; 0 takes a free one, which the ready line tells."""
    served_model_name: tuple[str, ...] = ()
    """Names that clients ask for, the first in answers; none: the model's own name."""
    api_key: tuple[str, ...] = ()
    """Where set, requests must carry one of them as a bearer token (all but /health, /ready,
    /version, /metrics and the API's description)."""
    root_path: str = ""
    """Prefix that a proxy in front strips from paths, as in /llm."""
    max_body_mib: float = 16.0
    """Largest request body in MiB; a larger one is refused with 413."""
    body_timeout: float = 60.0
    """Seconds that a request's body may take to arrive; then 408."""
    shutdown_timeout: float = 10.0
    """Seconds that requests under way may go on after SIGTERM or Ctrl-C; 0 ends them at once."""
    log_requests: bool = True
    """A line on stderr for each request of the API once it has ended."""
    uvicorn_log_level: str = "warning"
    """critical, error, warning, info, debug or trace: what the HTTP library logs."""
    allowed_origins: tuple[str, ...] = ()
    """Origins whose pages may call the server (CORS), * for all; none: CORS is off."""
    allowed_methods: tuple[str, ...] = ("*",)
    """Methods that such pages may use."""
    allowed_headers: tuple[str, ...] = ("*",)
    """Headers that such pages may send."""
    allow_credentials: bool = False
    """Such pages may send cookies and keys."""
    ssl_keyfile: str | None = None
    """PEM file of the private key; with ``ssl_certfile`` the server speaks HTTPS."""
    ssl_certfile: str | None = None
    """PEM file of the certificate and its chain."""

    def __post_init__(self) -> None:
        for name in ("served_model_name", "api_key", "allowed_origins", "allowed_methods"):
            _as_tuple("server", self, name)
        _as_tuple("server", self, "allowed_headers")
        port = self.port
        good = isinstance(port, int) and not isinstance(port, bool) and 0 <= port <= 65535
        if not good:
            raise ConfigError(f"server.port must be an integer from 0 to 65535, not {port!r}")
        if not isinstance(self.host, str) or not self.host:
            raise ConfigError(f"server.host must be a non-empty string, not {self.host!r}")
        if not 0 < self.max_body_mib <= 1024:
            _refuse("max_body_mib", self.max_body_mib, "above 0, at most 1024")
        if not 0 < self.body_timeout <= MOST_SECONDS:
            _refuse("body_timeout", self.body_timeout, f"above 0, at most {MOST_SECONDS}")
        if not 0 <= self.shutdown_timeout <= MOST_SECONDS:
            _refuse("shutdown_timeout", self.shutdown_timeout, f"from 0 to {MOST_SECONDS}")
        if self.uvicorn_log_level not in LOG_LEVELS:
            _refuse("uvicorn_log_level", self.uvicorn_log_level, f"one of {', '.join(LOG_LEVELS)}")
        if self.root_path and not self.root_path.startswith("/"):
            _refuse("root_path", self.root_path, "empty or a path that begins with /")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ConfigError("server.ssl_keyfile and server.ssl_certfile go together: set both")

    def __repr__(self) -> str:
        """Logs and errors never tell the keys."""
        fields = msgspec.structs.asdict(self)
        fields["api_key"] = ("***",) * len(self.api_key)
        return f"ServerConfig({', '.join(f'{key}={value!r}' for key, value in fields.items())})"


class ChatConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How chats with a model become prompts, and its answers become tool calls."""

    chat_template: str | None = None
    """A Jinja template, or the path of a file with one; None: the model's own."""
    enable_auto_tool_choice: bool = False
    """The model may call tools of its own accord (``tool_choice: auto``)."""
    tool_call_parser: str | None = None
    """hermes, llama3_json or mistral: how the model writes its tool calls."""

    def __post_init__(self) -> None:
        if self.chat_template == "":
            raise ConfigError("chat.chat_template must be a template or a path, not ''")
        if self.tool_call_parser not in (None, *TOOL_CALL_PARSERS):
            raise ConfigError(
                f"chat.tool_call_parser must be one of {', '.join(TOOL_CALL_PARSERS)}, "
                f"not {self.tool_call_parser!r}"
            )
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            raise ConfigError(
                "chat.enable_auto_tool_choice needs chat.tool_call_parser, which tells how the "
                f"model writes its calls: one of {', '.join(TOOL_CALL_PARSERS)}"
            )


def _refuse(field: str, value: Any, allowed: str) -> None:
    raise ConfigError(f"server.{field} must be {allowed}, not {value!r}")


def _as_tuple(where: str, config: msgspec.Struct, field: str) -> None:
    """One string stands for a list of one."""
    value = getattr(config, field)
    values = (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(one, str) and one for one in values):
        # Not with the value, which may be keys.
        raise ConfigError(f"{where}.{field} must be non-empty strings; one of them is not")
    msgspec.structs.force_setattr(config, field, values)
