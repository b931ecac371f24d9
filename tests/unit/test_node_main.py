"""A node's process: what it does before there is a node."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys
from cloverinfer.nodes.main import log, start_logging

start_logging(sys.argv[1])
log.info("an info")
"""


@pytest.mark.parametrize(
    ("level", "shown", "hidden"),
    [("info", "an info", "CLOVER_LOG_LEVEL"), ("loud", "CLOVER_LOG_LEVEL is 'loud'", "an info")],
)
def test_a_log_level_that_is_none_is_told_of(level: str, shown: str, hidden: str) -> None:
    command = [sys.executable, "-c", SCRIPT, level]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert shown in done.stderr
    assert hidden not in done.stderr
