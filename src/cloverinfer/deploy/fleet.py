"""All hosts at once: a step runs on each side by side, with a log per host and one summary."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from ..core.errors import CloverError
from .inventory import Host, Inventory
from .remote import HostError, Remote, Running

MOST_AT_ONCE = 32
PROGRESS_SECONDS = 15.0
"""After which, and every so often, it is said which hosts a step still waits for."""
Step = Callable[[Remote], str]
"""What is done on one host; returns what to say of it, raises ``HostError``."""


class FleetError(CloverError):
    """Some hosts failed; each has been reported."""


@dataclass
class Fleet:
    """The hosts of an inventory. ``logs`` is the folder of the per-host logs."""

    inventory: Inventory
    logs: Path
    dry_run: bool = False
    out: TextIO = field(default_factory=lambda: sys.stdout)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def say(self, line: str) -> None:
        with self._lock:
            print(line, file=self.out, flush=True)

    def on_all(self, title: str, step: Step, hosts: Sequence[Host] | None = None) -> dict[str, str]:
        """What the step said of every host; ``FleetError`` once all have ended if one failed."""
        chosen = list(self.inventory.hosts if hosts is None else hosts)
        self.say(f"== {title}: {', '.join(host.name for host in chosen)}")
        said: dict[str, str] = {}
        failed: dict[str, str] = {}
        running = Running()

        def one(host: Host) -> None:
            begun = time.monotonic()
            try:
                said[host.name] = step(self.remote(host, running))
                mark, text = "ok  ", said[host.name]
            except HostError as problem:
                failed[host.name] = str(problem)
                mark, text = "FAIL", str(problem)
            seconds = time.monotonic() - begun
            if not self.dry_run:
                self.say(f"  {mark} {host.name}: {text} ({seconds:.1f} s)")

        with ThreadPoolExecutor(min(MOST_AT_ONCE, len(chosen))) as pool:
            try:
                self._await({pool.submit(one, host): host.name for host in chosen})
            except (KeyboardInterrupt, SystemExit):  # nobody waits for hosts any more
                running.end()
                raise
        if failed:
            names = ", ".join(failed)
            raise FleetError(
                f"{title} failed on {names}; the other hosts are unharmed; logs are in {self.logs}"
            )
        return said

    def _await(self, steps: Mapping[Future[None], str]) -> None:
        begun, waiting = time.monotonic(), set(steps)
        while waiting:
            ended, waiting = wait(waiting, PROGRESS_SECONDS, FIRST_COMPLETED)
            for step in ended:
                step.result()
            if waiting and not ended:
                names = ", ".join(sorted(steps[step] for step in waiting))
                self.say(f"  ...  waiting for {names} ({time.monotonic() - begun:.0f} s)")

    def on_head(self, title: str, step: Step) -> str:
        head = self.inventory.head
        return self.on_all(title, step, [head]).get(head.name, "")

    def remote(self, host: Host, running: Running) -> Remote:
        return Remote(
            host,
            self.inventory.ssh,
            lambda text: self._append(host, text),
            running,
            self.say if self.dry_run else None,
        )

    def _append(self, host: Host, text: str) -> None:
        if self.dry_run or not text.strip():
            return
        self.logs.mkdir(parents=True, exist_ok=True)
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        with self._lock, (self.logs / f"{host.name}.log").open("a", encoding="utf-8") as file:
            file.write(f"[{stamp}] {text.rstrip()}\n")
