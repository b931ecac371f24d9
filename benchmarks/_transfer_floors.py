"""What no transport can beat, measured in the same run: copies in memory, bare sockets, bare bells.

A floor is made for the largest size and asked for rates and a latency. Those between processes
start this file as the other one: ``python _transfer_floors.py KIND ARGUMENT NBYTES STREAMS``.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import shared_memory

import numpy as np

from _common import best_of
from cloverinfer import _native

MESSAGE = 4096
ROUNDS = 2000


@contextlib.contextmanager
def apart(pid: int, every_thread: bool = False) -> Iterator[None]:
    """Keeps this thread on one core and the other process's first thread, or all that it has, on
    another, as two busy nodes are: on one core a wake-up costs a fraction."""
    cores = sorted(os.sched_getaffinity(0))
    threads = [int(name) for name in os.listdir(f"/proc/{pid}/task")] if every_thread else [pid]
    if len(cores) > 1:
        os.sched_setaffinity(0, {cores[0]})
        for thread in threads:
            os.sched_setaffinity(thread, {cores[1]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
        for thread in threads:
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(thread, cores)


class MemoryCopy:
    """Plain copies from private into shared memory, with one thread or several, as is faster; and
    two processes that wake each other by futexes."""

    def __init__(self, nbytes: int, threads: int) -> None:
        self.name = f"memcpy, up to {threads} threads"
        self._threads = threads
        self._source = np.ones(nbytes, np.uint8)
        self._target = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
        self._target[:] = 0
        self._pool = ThreadPoolExecutor(threads)

    def rate(self, nbytes: int, count: int) -> float:
        """Bytes per second."""
        threads = {1, self._threads} if nbytes >= 1 << 20 else {1}
        seconds = min(best_of(1, lambda n=n: self._copies(nbytes, count, n)) for n in threads)
        return nbytes * count / seconds

    def _copies(self, nbytes: int, count: int, threads: int) -> None:
        cuts = [nbytes * i // threads for i in range(threads + 1)]
        for _ in range(count):
            parts = [slice(cuts[i], cuts[i + 1]) for i in range(threads)]
            if threads == 1:
                np.copyto(self._target[parts[0]], self._source[parts[0]])
            else:
                list(self._pool.map(self._copy, parts))

    def _copy(self, part: slice) -> None:
        np.copyto(self._target[part], self._source[part])

    def latency(self) -> float:
        """Seconds one way: half a round trip between two sleeping processes."""
        table = shared_memory.SharedMemory(create=True, size=mmap.PAGESIZE)
        try:
            with _other("bells", table.name, 0, 0) as process:
                assert process.stdout is not None
                process.stdout.readline()
                with apart(process.pid):
                    begun = time.perf_counter()
                    assert _native.bell_rally(table.buf, False, ROUNDS, 30.0)
                    return (time.perf_counter() - begun) / ROUNDS / 2
        finally:
            table.close()
            table.unlink()

    def close(self) -> None:
        self._pool.shutdown()


class Sockets:
    """As many plain TCP connections over the loopback as the transport has, a thread each on both
    sides, from one buffer into another; and one connection back and forth."""

    def __init__(self, nbytes: int, streams: int) -> None:
        self.name = f"{streams} bare sockets"
        self._source = memoryview(np.ones(nbytes, np.uint8)).cast("B")
        self._stack = contextlib.ExitStack()
        listener = self._stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = str(listener.getsockname()[1])
        self._process = self._stack.enter_context(_other("sockets", port, nbytes, streams))
        listener.settimeout(30.0)
        self._sockets = [self._stack.enter_context(_accept(listener)) for _ in range(streams)]
        self._pool = ThreadPoolExecutor(streams)

    def rate(self, nbytes: int, count: int) -> float:
        """Bytes per second from the first byte to the word that the last is there."""
        used = len(self._sockets) if nbytes >= 1 << 20 else 1
        best = float("inf")
        for _ in range(2):
            begun = time.perf_counter()
            list(self._pool.map(lambda i: self._send(i, nbytes, count, used), range(used)))
            best = min(best, time.perf_counter() - begun)
        return nbytes * count / best

    def _send(self, i: int, nbytes: int, count: int, used: int) -> None:
        begin, end = nbytes * i // used, nbytes * (i + 1) // used
        sock = self._sockets[i]
        sock.sendall(np.array([begin, end, count], np.int64).tobytes())
        for _ in range(count):
            sock.sendall(self._source[begin:end])
        _read(sock, memoryview(bytearray(1)))

    def latency(self) -> float:
        """Seconds one way of 4 KB: half a round trip."""
        sock, back = self._sockets[0], memoryview(bytearray(MESSAGE))
        sock.sendall(np.array([0, MESSAGE, -ROUNDS], np.int64).tobytes())
        with apart(self._process.pid, every_thread=True):
            begun = time.perf_counter()
            for _ in range(ROUNDS):
                sock.sendall(self._source[:MESSAGE])
                _read(sock, back)
            return (time.perf_counter() - begun) / ROUNDS / 2

    def close(self) -> None:
        self._pool.shutdown()
        self._stack.close()


def _accept(listener: socket.socket) -> socket.socket:
    sock = listener.accept()[0]
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.settimeout(60.0)
    return sock


def _read(sock: socket.socket, into: memoryview) -> bool:
    """Fills ``into``; False where the other side has ended."""
    while into:
        got = sock.recv_into(into)
        if got == 0:
            return False
        into = into[got:]
    return True


@contextlib.contextmanager
def _other(kind: str, argument: str, nbytes: int, streams: int) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, __file__, kind, argument, str(nbytes), str(streams)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process
        process.wait(10.0)
    finally:
        process.kill()
        process.communicate()


def _serve(port: int, target: memoryview) -> None:
    """The receiving end of one connection."""
    header = np.zeros(3, np.int64)
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while _read(sock, memoryview(header).cast("B")):
            begin, end, count = header.tolist()
            for _ in range(abs(count)):
                _read(sock, target[begin:end])
                if count < 0:
                    sock.sendall(target[begin:end])
            if count > 0:
                sock.sendall(b"!")


def _main(kind: str, argument: str, nbytes: str, streams: str) -> None:
    if kind == "bells":
        table = open_table(argument)
        print("ready", flush=True)
        _native.bell_rally(table, True, ROUNDS, 30.0)
        return
    target = memoryview(np.zeros(int(nbytes), np.uint8)).cast("B")
    threads = [
        threading.Thread(target=_serve, args=(int(argument), target)) for _ in range(int(streams))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def open_table(name: str) -> mmap.mmap:
    """Without multiprocessing's tracker, which would remove it with this process."""
    fd = os.open(f"/dev/shm/{name}", os.O_RDWR)
    try:
        return mmap.mmap(fd, mmap.PAGESIZE)
    finally:
        os.close(fd)


if __name__ == "__main__":
    _main(*sys.argv[1:])
