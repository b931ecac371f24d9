"""One NIXL agent with its UCX plugin, as calls that raise our errors. Knows no peers' protocol.

The compiled module under NIXL's Python package is called directly, for one reason: the package's
own class lets the agent's progress thread spin (a delay of 0), which takes a core per agent.

Lifetime. Requests, prepared lists and registrations all point into the agent, so they go before it:
``close`` releases what is left, forgets remote agents, takes memory back and only then destroys the
agent, while the interpreter and the plugin's libraries are still whole.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import threading
import time
import weakref
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from ..core.errors import DeadlineError, TransportError
from ._shared import seconds_left

PACKAGES = ("nixl_cu12", "nixl_cu13")
"""What the wheels install, one per CUDA version; host memory is the same with each."""
_PLUGIN = "UCX"
_PROGRESS_DELAY_US = 100_000
"""The progress thread sleeps on its workers' file descriptors, and looks by itself this often."""
_SPINS = 200
"""Looks at a transfer before the waiting thread starts to sleep between them."""
_NAP = 50e-6


def find_package() -> str:
    """The installed package's name, or nothing."""
    for name in PACKAGES:
        if importlib.util.find_spec(name) is not None:
            return name
    return ""


def _bindings() -> ModuleType:
    return importlib.import_module(f"{find_package()}._bindings")


class PreparedList:
    """A list of descriptors that the agent holds until this is released, or nobody refers to it."""

    def __init__(self, agent: Agent, handle: int) -> None:
        self.handle = handle
        self.release = weakref.finalize(self, agent.release_list, handle)
        self.release.atexit = False


class Agent:
    """``name`` must differ from that of every agent that this one will meet. Thread-safe."""

    def __init__(self, name: str) -> None:
        self._nixl = _bindings()
        # They have no base of their own.
        self._errors = tuple(
            value
            for value in vars(self._nixl).values()
            if isinstance(value, type) and issubclass(value, Exception)
        )
        self._lists: set[int] = set()
        self._memory: dict[int, Any] = {}
        self._remotes: set[str] = set()
        # Only the bookkeeping; NIXL has a lock of its own.
        self._lock = threading.RLock()
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = True
        config.useListenThread = False
        config.pthrDelay = _PROGRESS_DELAY_US
        config.syncMode = self._nixl.NIXL_THREAD_SYNC_STRICT
        with self._our_errors(f"cannot start a NIXL agent with the {_PLUGIN} plugin"):
            self._agent: Any = self._nixl.nixlAgent(name, config)
            self._backends = [self._agent.createBackend(_PLUGIN, {})]

    def register(self, address: int, nbytes: int) -> int:
        """Lets peers that get ``metadata`` of it write there; returns the registration's key."""
        memory = self._nixl.nixlRegDList(self._nixl.DRAM_SEG, [(address, nbytes, 0, "")])
        with self._our_errors(f"NIXL cannot register {nbytes} bytes"):
            self._agent.registerMem(memory, self._backends)
        with self._lock:
            self._memory[id(memory)] = memory
        return id(memory)

    def deregister(self, key: int) -> None:
        with self._lock:
            memory = self._memory.pop(key, None)
        if memory is not None and self._agent is not None:
            with self._our_errors("NIXL cannot take memory back"):
                self._agent.deregisterMem(memory, self._backends)

    def metadata(self, key: int) -> bytes:
        """What a peer must load to write to that memory: the way here, and its keys."""
        with self._our_errors("NIXL gives no metadata"):
            return bytes(self._agent.getLocalPartialMD(self._memory[key], True, self._backends))

    def load(self, metadata: bytes) -> str:
        """The name of the agent whose metadata it is."""
        with self._our_errors("NIXL does not take the peer's metadata"):
            name = self._agent.loadRemoteMD(metadata)
        remote = name.decode() if isinstance(name, bytes) else str(name)
        with self._lock:
            self._remotes.add(remote)
        return remote

    def forget(self, remote: str) -> None:
        """Drops the connection and every key of a remote agent."""
        with self._lock:
            known = remote in self._remotes
            self._remotes.discard(remote)
        if known and self._agent is not None:
            # It may have gone by itself: then there is nothing to forget.
            with contextlib.suppress(self._nixl.nixlNotFoundError):
                self._agent.invalidateRemoteMD(remote)

    def prepare(
        self, base: int, offsets: npt.NDArray[np.int64], length: int, remote: str | None = None
    ) -> PreparedList:
        """Pieces of ``length`` bytes at ``base + offsets``, here or at a remote agent."""
        pieces = np.zeros((len(offsets), 3), np.uint64)
        pieces[:, 0] = offsets.astype(np.uint64) + np.uint64(base)
        pieces[:, 1] = length
        descriptors = self._nixl.nixlXferDList(self._nixl.DRAM_SEG, pieces)
        where = (descriptors, self._backends)
        with self._our_errors("NIXL cannot prepare the slices"):
            handle = (
                self._agent.prepXferDlist(*where)
                if remote is None
                else self._agent.prepXferDlist(remote, *where)
            )
        with self._lock:
            self._lists.add(handle)
        return PreparedList(self, handle)

    def release_list(self, handle: int) -> None:
        with self._lock:
            if handle not in self._lists or self._agent is None:
                return
            self._lists.discard(handle)
        self._agent.releasedDlistH(handle)

    def write(
        self,
        local: PreparedList,
        remote: PreparedList,
        index: npt.NDArray[np.int32],
        deadline: float,
    ) -> None:
        """Writes and waits until the bytes are at the peer; ``DeadlineError`` where that takes too
        long: the request is given up then, and the peer must be forgotten before memory is reused.
        """
        with self._our_errors("NIXL cannot write"):
            request = self._agent.makeXferReq(
                self._nixl.NIXL_WRITE,
                local.handle,
                np.ascontiguousarray(index[:, 0]),
                remote.handle,
                np.ascontiguousarray(index[:, 1]),
                "",
                self._backends,
                False,
            )
            try:
                self._wait(request, deadline)
            finally:
                # Releasing what is not done aborts it, and may raise; the first error counts.
                with contextlib.suppress(*self._errors):
                    self._agent.releaseXferReq(request)

    def _wait(self, request: int, deadline: float) -> None:
        """Until the request is done, which for NIXL is after a flush: the peer can read it all."""
        state = self._agent.postXferReq(request)
        looks = 0
        while state != self._nixl.NIXL_SUCCESS:
            if seconds_left(deadline) <= 0:
                raise DeadlineError("the bytes did not reach the peer in time")
            looks += 1
            if looks > _SPINS:
                time.sleep(_NAP)
            state = self._agent.getXferStatus(request)

    @contextlib.contextmanager
    def _our_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            raise TransportError(f"{what}: {error}") from error

    def close(self) -> None:
        """Calling it twice is fine."""
        with self._lock:
            agent, self._agent = self._agent, None
            lists, self._lists = self._lists, set()
            memory, self._memory = self._memory, {}
            remotes, self._remotes = self._remotes, set()
        if agent is None:
            return
        for handle in lists:
            agent.releasedDlistH(handle)
        for remote in remotes:
            with contextlib.suppress(self._nixl.nixlNotFoundError):
                agent.invalidateRemoteMD(remote)
        for registered in memory.values():
            agent.deregisterMem(registered, self._backends)
