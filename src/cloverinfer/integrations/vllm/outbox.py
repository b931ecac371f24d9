"""Prefill's end: meets decode workers, claims blocks there and pushes into them.

``begin``, ``layer`` and ``end`` come from the engine's thread, layer by layer; a thread of its own
puts (``nodes.pushes.Sender``); answers come from the wires' threads. Where a grant is late, what is
computed by then is pushed at once. A GPU computes later than the engine's thread says, so each put
comes after the moment that was marked there. Blocks of a request are free once nothing reads them
any more: all pushed, or given up and no put under way. One lock, the worker's, guards all state;
nobody connects or prepares while holding it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable

from ...nodes.copies import Moment
from ...nodes.pushes import Sender, StepPushes
from ...transport import Peer
from .courier import Courier, Wire
from .meeting import partners
from .outgoing import Leg, Outgoing, Target
from .plan import Progress, SendStart
from .settings import Settings
from .targets import Callbacks, Targets
from .wire import (
    Claim,
    Denial,
    Drop,
    Dropped,
    GiveUp,
    Grant,
    Message,
    Refusal,
    Welcome,
    Worker,
)

log = logging.getLogger(__name__)
PREEMPT_SECONDS = 10.0
"""How long a step waits for puts from blocks that it will overwrite."""


class Outbox:
    def __init__(
        self,
        settings: Settings,
        me: Worker,
        courier: Courier,
        pool: tuple[int, Callable[[], Moment]],
        lock: threading.RLock,
    ) -> None:
        """``pool``: blocks of the grids that one of the scheduler's is; and what marks the moment
        at which all that the calling thread has asked of the pool's device is done."""
        self._settings = settings
        self._me = me
        self._split, self._mark = pool
        self._lock = lock
        self._ended = threading.Condition(lock)
        """Told when puts have ended."""
        callbacks = Callbacks(self._met, self._refused)
        self._targets = Targets(me, courier, lock, callbacks)
        self._transfers: dict[str, Outgoing] = {}
        """By request."""
        self._sent: set[str] = set()
        self._step: StepPushes | None = None
        self._progressing: list[Outgoing] = []
        self._put_layers: set[int] = set()
        self._sender = Sender(f"kv-{me.rank}", self.settle)

    # -- from the engine's thread

    def begin(self, sends: Iterable[SendStart], progress: Iterable[Progress]) -> None:
        """Before a step is computed."""
        with self._lock:
            for send in sends:
                self._start(send)
            self._progressing = []
            for each in progress:
                out = self._transfers.get(each.request)
                if out is not None:
                    self._advance(out, each)
            jobs = [
                (leg, job)
                for out in self._progressing
                for leg in out.legs.values()
                for job in out.jobs(leg, out.planned)
            ]
            if not jobs:
                return
            self._step, self._put_layers = StepPushes([job for _, job in jobs]), set()
            for leg, _ in jobs:
                leg.open.append(self._step)
            self._sender.begin(self._step)

    def layer(self, layer: int) -> None:
        """The step's layer is computed."""
        if self._step is not None and layer not in self._put_layers:
            self._put_layers.add(layer)
            self._sender.layers(self._step, (layer,), self._mark())

    def end(self) -> None:
        """The step is computed. Layers that nobody told of are put now."""
        if not self._progressing:
            return
        ready = self._mark()
        if self._step is not None:
            left = [i for i in range(len(self._me.grids)) if i not in self._put_layers]
            if left:
                self._sender.layers(self._step, left, ready)
            self._step.seal()
            self._step = None
        with self._lock:
            for out in self._progressing:
                out.computed, out.ready = out.planned, ready
                self._catch_up(out)
            self._progressing = []

    def preempt(self, requests: Iterable[str]) -> None:
        """Returns once nothing reads these requests' blocks; their pushes go on when the requests
        have blocks again."""
        with self._ended:
            outs = [self._transfers[name] for name in requests if name in self._transfers]
            for out in outs:
                out.blocks, out.planned, out.computed = [], 0, 0
            free = self._ended.wait_for(
                lambda: not any(self._settled(out).busy for out in outs), PREEMPT_SECONDS
            )
            for out in outs if not free else ():
                self._fail(out, "its blocks were taken away while they were pushed")

    def finish(self, requests: Iterable[str]) -> None:
        """The scheduler has done with these and waits for their blocks."""
        with self._lock:
            for name in requests:
                out = self._transfers.get(name)
                if out is None:
                    continue
                out.finished = True
                if max(out.computed, out.planned) < out.start.end:
                    self._fail(out, "the request was aborted at prefill", final=False)
                self._release(out)

    def take_sent(self) -> set[str]:
        """Finished requests whose blocks are free, each once."""
        self.settle()
        with self._lock:
            sent, self._sent = self._sent, set()
            return sent

    def close(self) -> None:
        self._sender.close()

    # -- from the wires' threads

    def arrived(self, wire: Wire, peer: Peer, message: Message) -> bool:
        """False for what is not prefill's to answer."""
        with self._lock:
            target = self._targets.of(peer)
            if target is not None:
                target.hear()
            if isinstance(message, Welcome):
                self._targets.welcomed(message)
            elif isinstance(message, Refusal):
                self._targets.turned_away(message)
            elif isinstance(message, Denial):
                self._denied(message)
            elif isinstance(message, Drop):
                self._drop(wire, peer, message)
            elif isinstance(message, Grant):
                if target is not None:
                    self._granted(target, message)
            else:
                return False
            return True

    def settle(self) -> None:
        """Some puts have ended."""
        with self._ended:
            for out in list(self._transfers.values()):
                self._release(self._settled(out))
            self._ended.notify_all()

    def tick(self, now: float) -> None:
        with self._lock:
            watched = [leg.target for leg in self._open_legs() if leg.claimed]
        self._watch(list({id(target): target for target in watched}.values()))
        with self._lock:
            live = [out for out in self._transfers.values() if not out.failed]
            firsts = [self._targets.at(out.start.host, out.start.port) for out in live]
            self._targets.knock_again([*firsts, *(leg.target for leg in self._open_legs())], now)
            for out in live:
                if now > out.deadline and out.waits and not out.failed:
                    place = f"{out.start.host}:{out.start.port}"
                    self._fail(out, f"decode at {place} granted no blocks in time", final=False)
                    self._release(out)
        self.settle()  # of puts that came to their end after they had failed nobody tells

    def _open_legs(self) -> list[Leg]:
        outs = self._transfers.values()
        return [leg for out in outs if not out.failed for leg in out.legs.values() if not leg.over]

    def _watch(self, targets: list[Target]) -> None:
        """Beats, and finds those that are gone or silent. Without the lock, for which the engine's
        thread may wait."""
        lease, lost = self._settings.lease, []
        for target in targets:
            pusher = target.pusher
            if pusher is not None and not pusher.wire.beat(pusher.peer):
                lost.append((target, "it is gone"))
            elif target.silence > lease:
                lost.append((target, f"it was silent for {lease:g} s"))
        with self._lock:
            for target, reason in lost:
                self._lose(target, reason)

    # -- transfers; under the lock

    def _start(self, send: SendStart) -> None:
        deadline = time.monotonic() + self._settings.claim_timeout
        out = self._transfers[send.request] = Outgoing(send, deadline)
        self._route(out, self._targets.at(send.host, send.port))

    def _advance(self, out: Outgoing, progress: Progress) -> None:
        blocks = [b * self._split + i for b in progress.blocks for i in range(self._split)]
        out.blocks = blocks if progress.anew else out.blocks + blocks
        out.planned = progress.computed
        self._progressing.append(out)

    def _route(self, out: Outgoing, first: Target) -> None:
        """Makes the transfer's legs once it is known how many workers its engine has."""
        if first.refused:
            self._fail(out, first.refused)
            return
        if first.worker is None or out.routed:
            return
        for rank in partners(self._me.rank, self._me.ranks, first.worker.ranks):
            target = self._targets.at(first.host, first.port + rank)
            leg = out.legs[target.place] = Leg(target)
            self._claim(out, leg)
        out.routed = True

    def _claim(self, out: Outgoing, leg: Leg) -> None:
        target, start = leg.target, out.start
        if target.refused:
            self._fail(out, target.refused)
        if target.pusher is None or leg.claimed or out.failed:
            return
        leg.claimed = True
        target.hear()
        claim = Claim(start.transfer, start.attempt, start.end, start.digest)
        if not target.pusher.wire.tell(target.pusher.peer, claim):
            # It may have been started anew since it was met, and nothing is there of this leg yet.
            self._targets.forget(target)
            leg.target, leg.claimed = self._targets.at(*target.place), False
            self._lose(target, "it cannot be reached")

    def _catch_up(self, out: Outgoing) -> None:
        """Pushes what is computed and was not pushed with its step."""
        for leg in out.legs.values():
            jobs = list(out.jobs(leg, out.computed))
            if not jobs:
                continue
            pushes = StepPushes(jobs)
            leg.open.append(pushes)
            self._sender.begin(pushes)
            self._sender.layers(pushes, range(len(self._me.grids)), out.ready)
            pushes.seal()

    def _settled(self, out: Outgoing) -> Outgoing:
        """Takes note of puts that have ended."""
        for leg in out.legs.values():
            ended = [pushes for pushes in leg.open if pushes.ended]
            leg.open = [pushes for pushes in leg.open if not pushes.ended or pushes.late]
            for pushes in ended:
                problem = pushes.problem
                failures = [str(each) for each in pushes.failures() if each.peer == leg.target.name]
                if problem is not None:
                    log.error("pushing failed: %s", problem, exc_info=problem)
                    self._fail(out, f"pushing failed: {problem}")
                elif failures:
                    self._lose(leg.target, failures[0])
            if leg.open:
                continue
            if leg.dropping is not None:
                self._answer(leg, leg.dropping)
            leg.over = leg.over or leg.whole
        return out

    def _answer(self, leg: Leg, drop: Drop) -> None:
        leg.dropping = None
        pusher = leg.target.pusher
        assert pusher is not None
        pusher.wire.call(lambda: pusher.wire.reply(pusher.peer, Dropped(drop.slot)))

    def _release(self, out: Outgoing) -> None:
        if out.finished and out.done and self._transfers.get(out.start.request) is out:
            del self._transfers[out.start.request]
            self._sent.add(out.start.request)

    def _fail(self, out: Outgoing, reason: str, final: bool = True) -> None:
        """Ends the attempt; decode is told."""
        if out.failed:
            return
        out.failed = reason
        start = out.start
        log.warning("transfer %s, attempt %d: %s", start.transfer, start.attempt, reason)
        give_up = GiveUp(start.transfer, start.attempt, reason, final)
        for place in list(out.legs) or [(start.host, start.port)]:
            self._targets.give_up(place, give_up)

    def _find(self, transfer: str, attempt: int) -> Outgoing | None:
        for out in self._transfers.values():
            if (out.start.transfer, out.start.attempt) == (transfer, attempt):
                return out
        return None

    # -- targets and their answers; under the lock

    def _met(self, target: Target) -> None:
        """Everything that waited for it goes on."""
        for out in list(self._transfers.values()):
            if (out.start.host, out.start.port) == target.place:
                self._route(out, target)
            leg = out.legs.get(target.place)
            if leg is not None and leg.target is target:
                self._claim(out, leg)

    def _refused(self, target: Target) -> None:
        for out in list(self._transfers.values()):
            if target.place in (*out.legs, (out.start.host, out.start.port)):
                self._fail(out, target.refused)
                self._release(out)

    def _lose(self, target: Target, reason: str) -> None:
        self._targets.forget(target)
        for out in list(self._transfers.values()):
            leg = out.legs.get(target.place)
            if leg is not None and leg.target is target and not leg.over:
                leg.over = True
                self._fail(out, f"{target.name} is lost: {reason}", final=False)
                self._release(out)

    def _granted(self, target: Target, grant: Grant) -> None:
        out = self._find(grant.transfer, grant.attempt)
        leg = out.legs.get(target.place) if out is not None else None
        if out is None or leg is None or leg.target is not target or leg.grant is not None:
            return  # given up meanwhile; decode was told, and asks for an end
        if grant.end != out.start.end:
            self._fail(out, f"the prompt has {out.start.end} tokens here, {grant.end} at decode")
            self._release(out)
            return
        leg.grant = grant
        self._catch_up(out)

    def _denied(self, denial: Denial) -> None:
        out = self._find(denial.transfer, denial.attempt)
        if out is not None and not out.failed:
            log.warning("transfer %s: decode denies it: %s", denial.transfer, denial.reason)
            out.failed = denial.reason  # which decode need not be told
            self._release(out)

    def _drop(self, wire: Wire, peer: Peer, drop: Drop) -> None:
        """Also of a target that was lost, whose puts may not have ended yet."""
        out = self._find(drop.transfer, drop.attempt)
        legs = out.legs.values() if out is not None else ()
        leg = next((leg for leg in legs if leg.target.is_at(peer)), None)
        if leg is None or not leg.open:
            wire.call(lambda: wire.reply(peer, Dropped(drop.slot)))
        else:
            leg.dropping = drop
        if out is not None and leg is not None:
            leg.over = True
            self._release(out)
