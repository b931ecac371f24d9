"""A node as a process of its own: ``python -m cloverinfer.nodes.main REPORT_FD``.

The config comes on standard input (length-prefixed msgpack), which then stays open: its end means
that the parent is gone and so must this process be. One report goes to the given descriptor: the
node's info, or why it could not start.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from typing import BinaryIO, Union

import msgspec

from ..wire.messages import NodeInfo
from .config import NodeConfig

log = logging.getLogger(__name__)
GRACE_SECONDS = 5.0
"""How long a node may take to close once its parent is gone."""


class Started(msgspec.Struct, tag=True):
    info: NodeInfo


class Refused(msgspec.Struct, tag=True):
    reason: str


Report = Union[Started, Refused]


def read_exactly(stream: BinaryIO, count: int) -> bytes:
    data = stream.read(count)
    if len(data) != count:
        raise EOFError("the parent closed the pipe before it sent the config")
    return data


def read_config(stream: BinaryIO) -> NodeConfig:
    size = int.from_bytes(read_exactly(stream, 4), "little")
    return msgspec.msgpack.decode(read_exactly(stream, size), type=NodeConfig)


def frame_config(config: NodeConfig) -> bytes:
    data = msgspec.msgpack.encode(config)
    return len(data).to_bytes(4, "little") + data


def start_logging(level: str) -> None:
    """Logs to stderr from ``level`` on; one that is no level is told of, and WARNING is used."""
    known = isinstance(logging.getLevelName(level.upper()), int)
    logging.basicConfig(level=level.upper() if known else "WARNING")
    if not known:
        levels = "debug, info, warning, error, critical"
        log.warning("CLOVER_LOG_LEVEL is %r, not one of %s: warning is used", level, levels)


def main(report_fd: int) -> int:
    start_logging(os.environ.get("CLOVER_LOG_LEVEL", "WARNING"))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's; it ends us in order
    stream = sys.stdin.buffer
    config = read_config(stream)
    from ..core.collector import set_aside
    from ..core.errors import describe
    from .build import build_node

    try:
        node = build_node(config)
    except Exception as problem:
        log.debug("start failed", exc_info=True)
        _report(report_fd, Refused(describe(problem)))
        return 1
    signal.signal(signal.SIGTERM, lambda *_: node.stop())

    def watch_parent() -> None:
        while os.read(stream.fileno(), 1):
            pass
        node.stop()
        threading.Event().wait(GRACE_SECONDS)
        os._exit(1)

    threading.Thread(target=watch_parent, name="watch-parent", daemon=True).start()
    _report(report_fd, Started(node.info()))
    set_aside()
    node.run()
    return 0


def _report(fd: int, report: Report) -> None:
    try:
        with os.fdopen(fd, "wb") as pipe:
            pipe.write(msgspec.msgpack.encode(report))
    except BrokenPipeError:
        log.debug("the parent no longer waits for the report")  # its input ends next


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
