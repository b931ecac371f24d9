"""Flags of commands that listen for HTTP: where, for whom, and what they log."""

from __future__ import annotations

import argparse
import logging
from typing import Any

from ..config import ServerConfig
from ..config.server import LOG_LEVELS
from .flags import option, option_list, switch

DEFAULTS = ServerConfig()


def add_listening(parser: argparse.ArgumentParser) -> Any:
    """Returns the group, for what a command adds to it."""
    group = parser.add_argument_group("server")
    option(group, "--host", "server.host", f"address to listen on (default: {DEFAULTS.host})")
    option(
        group,
        "--port",
        "server.port",
        f"TCP port; 0 takes a free one (default: {DEFAULTS.port})",
        int,
    )
    text = "prefix that a proxy in front strips from paths (default: none)"
    option(group, "--root-path", "server.root_path", text)
    text = "PEM file of the key; with --ssl-certfile: HTTPS (default: none)"
    option(group, "--ssl-keyfile", "server.ssl_keyfile", text)
    option(group, "--ssl-certfile", "server.ssl_certfile", "PEM file of the certificate")
    text = "seconds that requests may go on after SIGTERM or Ctrl-C "
    text += f"(default: {DEFAULTS.shutdown_timeout:g})"
    option(group, "--shutdown-timeout", "server.shutdown_timeout", text, float)
    return group


def add_front_door(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("front door")
    text = "ask for one of these bearer tokens; better in CLOVER_SERVER_API_KEY, which the list of "
    text += "processes does not show (default: none)"
    option_list(group, "--api-key", "server.api_key", text)
    text = f"largest request body in MiB (default: {DEFAULTS.max_body_mib:g})"
    option(group, "--max-body-mib", "server.max_body_mib", text, float)
    text = f"seconds that a body may take to arrive (default: {DEFAULTS.body_timeout:g})"
    option(group, "--body-timeout", "server.body_timeout", text, float)
    text = "origins whose pages may call the server; * for all (default: none, CORS is off)"
    option_list(group, "--allowed-origins", "server.allowed_origins", text)
    text = "methods that such pages may use (default: *)"
    option_list(group, "--allowed-methods", "server.allowed_methods", text)
    text = "headers that such pages may send (default: *)"
    option_list(group, "--allowed-headers", "server.allowed_headers", text)
    text = "such pages may send cookies and keys"
    switch(group, "--allow-credentials", "server.allow_credentials", text, "off")


def add_logs(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("logs, on stderr")
    log = group.add_argument
    text = "no line for each request that has ended (default: one)"
    key = "server.log_requests"
    log("--disable-log-requests", dest=key, action="store_const", const=False, help=text)
    text = f"what the HTTP library logs (default: {DEFAULTS.uvicorn_log_level})"
    option(group, "--uvicorn-log-level", "server.uvicorn_log_level", text, choices=LOG_LEVELS)
    log("--quiet", action="store_true", help="no progress and no line for each request")


def log_requests() -> None:
    """A line on stderr for each request that has ended."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    log = logging.getLogger("cloverinfer.requests")
    log.handlers = [handler]
    log.setLevel(logging.INFO)
    log.propagate = False
