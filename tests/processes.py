"""Starting programs the way a terminal does."""

from __future__ import annotations

import signal
import subprocess
from typing import Any


def start(command: list[str], **options: Any) -> subprocess.Popen[str]:
    """A child that Ctrl-C interrupts, even where the tests run in a shell's background, whose
    children ignore it."""
    return subprocess.Popen(
        command,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **options,
    )
