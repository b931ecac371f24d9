"""Ray's side of placement: the cluster that is joined or embedded, and the room on its hosts.

A host says by resources which nodes it has room for: ``--resources='{"clover_dense": 1}'`` of ``ray
start`` for one dense node. Where no host says so, all nodes run beside this process.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from ...core.errors import NodeStartError
from ..placement import usable_cores
from .base import STOP_SECONDS, Progress

_RESOURCE = "clover_"
_KNOCK = 10.0
"""Seconds in which the head of a Ray cluster must take a connection."""
_LOOK = 0.5
"""Seconds between looks at the hosts that have joined."""
_PATIENCE = 30.0
"""Seconds in which room must be free: an engine that has just ended may still hold it."""


class RayHosts:
    """This process's connection to Ray, and what it has reserved there. Waits for nothing but Ray
    itself, and never by ``ray.get``."""

    def __init__(self) -> None:
        self._folder = ""
        """Of the embedded Ray; empty where a Ray was running already."""
        self._joined = False
        self._group: Any = None

    @property
    def several(self) -> bool:
        """Nodes are placed on the hosts that have offered room."""
        return self._group is not None

    def connect(self, progress: Progress) -> None:
        """To the Ray that this process uses already, the one at RAY_ADDRESS, or an embedded one."""
        if ray.is_initialized():
            return
        address = os.environ.get("RAY_ADDRESS", "")
        with _own_signals():
            if address:
                self._join(address, progress)
            else:
                self._embed(progress)

    def _join(self, address: str, progress: Progress) -> None:
        progress(f"joining the Ray cluster at {address}")
        try:
            _knock(address)
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, RuntimeError, ValueError, RayError) as problem:
            raise NodeStartError(
                f"cannot join the Ray cluster at RAY_ADDRESS {address}: {problem}; start Ray on "
                "this host (ray start; with its token and RAY_AUTH_MODE=token where the cluster "
                "has one), or unset RAY_ADDRESS for an embedded Ray"
            ) from problem
        self._joined = True

    def _embed(self, progress: Progress) -> None:
        progress("starting an embedded Ray on this machine")
        # In /tmp whatever TMPDIR says: its sockets' paths may have 107 characters.
        self._folder = tempfile.mkdtemp(prefix="cloverinfer-ray-", dir="/tmp")
        ray.init(
            address="local",
            num_cpus=usable_cores(),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=self._folder,
        )

    def reserve(
        self, names: Mapping[str, Sequence[str]], room_timeout: float, progress: Progress
    ) -> dict[str, Any]:
        """Actor options that put every node, whose names are given by role, where there is room.

        Waits ``room_timeout`` seconds for hosts to join; 0: takes the cluster as it is.
        """
        places = [(name, f"{_RESOURCE}{role}") for role in names for name in names[role]]
        wanted = Counter(resource for _, resource in places)
        if not _room() and not room_timeout:
            own = ray.get_runtime_context().get_node_id()
            here = NodeAffinitySchedulingStrategy(own, soft=False)
            return {name: {"scheduling_strategy": here} for name, _ in places}
        _await_room(wanted, room_timeout, progress)
        self._group = placement_group([{resource: 1} for _, resource in places], strategy="SPREAD")
        if not self._group.wait(_PATIENCE):
            raise NodeStartError(
                "the room for nodes on the hosts of the Ray cluster was not free within "
                f"{_PATIENCE:g} s: another engine may hold it"
            )
        return {
            name: {
                "resources": {resource: 1},
                "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, index),
            }
            for index, (name, resource) in enumerate(places)
        }

    def close(self) -> None:
        """Frees what was reserved, and ends the Ray that was embedded or leaves the joined one."""
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None
        if self._folder:
            self._end()
        elif self._joined:
            ray.shutdown()
        self._folder, self._joined = "", False

    def _end(self) -> None:
        """Ends the embedded Ray and removes its files; its last agents may write for a moment."""
        ray.shutdown()
        deadline = time.monotonic() + STOP_SECONDS
        while os.path.exists(self._folder) and time.monotonic() < deadline:
            shutil.rmtree(self._folder, ignore_errors=True)
            time.sleep(0.05)


def _knock(address: str) -> None:
    """``OSError`` where nobody listens: Ray itself would try for twenty minutes."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), _KNOCK).close()


def own_address() -> str:
    """Of this process's host, as Ray knows it."""
    return str(ray.util.get_node_ip_address())


def _await_room(wanted: Mapping[str, int], timeout: float, progress: Progress) -> None:
    deadline = time.monotonic() + timeout
    told = ""
    while True:
        room = _room()
        lacks = [resource for resource, count in wanted.items() if room[resource] < count]
        if not lacks:
            return
        first = lacks[0]
        reason = (
            f"the hosts of the Ray cluster have room for {room[first]:g} "
            f"{first.removeprefix(_RESOURCE)} nodes, not {wanted[first]}"
        )
        if time.monotonic() >= deadline:
            raise NodeStartError(
                f"{reason}: start Ray on more of them with --resources='{{\"{first}\": 1}}'"
            )
        if reason != told:
            progress(f"{reason} yet")
        told = reason
        time.sleep(_LOOK)


def _room() -> Counter[str]:
    """Nodes of each role's resource that the hosts which are alive have room for in all."""
    room: Counter[str] = Counter()
    for host in ray.nodes():
        if host["Alive"]:
            offered = {k: v for k, v in host["Resources"].items() if k.startswith(_RESOURCE)}
            room.update(offered)
    return room


@contextmanager
def _own_signals() -> Iterator[None]:
    """Ray takes SIGTERM; it is given back."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)
