"""Runs one command: signals, errors and what they mean as an exit status."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from ..core.errors import CloverError
from .parser import EXIT_USAGE, parse

EXIT_FAILED = 1
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_BROKEN_PIPE = 128 + signal.SIGPIPE
EXIT_TERMINATED = 128 + signal.SIGTERM


class _Terminated(SystemExit):
    """SIGTERM arrived. A ``SystemExit``: nothing on the way takes it for a failure, and event
    loops, which log whatever else a signal handler raises and go on, end with it.
    """


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    args = parse(argv)
    before = signal.signal(signal.SIGTERM, _on_terminate)
    try:
        return int(args.command(args))
    except ValueError as error:
        if not isinstance(error, CloverError):
            raise
        return _fail(str(error), EXIT_USAGE)
    except CloverError as error:
        return _fail(str(error), EXIT_FAILED)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except _Terminated:
        return EXIT_TERMINATED
    except BrokenPipeError:
        # The interpreter flushes stdout once more as it ends; let that go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    finally:
        signal.signal(signal.SIGTERM, before)


def _on_terminate(number: int, frame: object) -> NoReturn:
    raise _Terminated


def _fail(message: str, status: int) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return status
