"""A writer over tcp that is stopped for longer than its put may take, and goes on."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TIMEOUT = 5.0
"""Of the put: the writer must be stopped before it, however busy the machine."""


def start(*args):
    command = [sys.executable, "-m", "tests.tcp_paused", *args]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)


def stop(process):
    os.kill(process.pid, signal.SIGSTOP)
    path = Path(f"/proc/{process.pid}/stat")
    end = time.monotonic() + 30
    while path.read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.fixture
def pair():
    receiver = start("receiver")
    writer = start("writer", *receiver.stdout.readline().split(), str(TIMEOUT))
    yield receiver, writer
    for process in (receiver, writer):
        process.kill()
        process.communicate(timeout=30)


def test_a_put_that_ended_while_its_writer_was_stopped_is_not_late(pair):
    """The answer lies in the writer's socket when it goes on, and its deadline is past."""
    receiver, writer = pair
    assert writer.stdout.readline() == "ready\n"
    stop(receiver)
    writer.stdin.write("go\n")
    writer.stdin.flush()
    assert writer.stdout.readline() == "put\n"
    late = time.monotonic() + TIMEOUT
    stop(writer)
    assert time.monotonic() < late, "too slow to tell anything"
    receiver.send_signal(signal.SIGCONT)
    assert receiver.stdout.readline() == "7\n"
    time.sleep(max(0.0, late - time.monotonic()) + 0.2)
    writer.send_signal(signal.SIGCONT)
    assert writer.stdout.readline() == "None\n"
