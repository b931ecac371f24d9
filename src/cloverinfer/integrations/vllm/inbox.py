"""Decode's end: grants blocks to the prefill that claims them, and proves that all of it arrived.

That proof is ``nodes.transfers.TransferReceiver``'s: every layer of every block once, or the load
has failed. Blocks are reported, and so become the engine's again, only once nobody may write into
them: the writer has said so, or is cut off. Of several attempts the newest is granted, after the
one before it has left. State is guarded by the worker's lock; called from the wires' threads, but
for what says otherwise.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from functools import partial

from ...core.errors import ConfigError
from ...kvcache.layout import PoolLayout
from ...nodes.errands import Errands
from ...nodes.transfers import TransferReceiver
from ...transport import Peer
from ...wire.messages import CancelTransfer, ExpectTransfer, KVChunk, TransferDone
from ...wire.notices import MAX_TRANSFERS, KVNotice, unpack
from .courier import Courier, Wire, is_cut_off
from .incoming import Claimed, Incoming, Landed, Source
from .meeting import matches_of, partners, wire_between
from .plan import Loaded, LoadStart
from .settings import Settings
from .staged import Landing
from .wire import (
    Beat,
    Claim,
    Denial,
    Drop,
    Dropped,
    GiveUp,
    Grant,
    Greeting,
    Message,
    Refusal,
    Welcome,
    Worker,
)

log = logging.getLogger(__name__)
MOST_EARLY = 4096
"""Transfers claimed, or given up, before this engine knows of them; the oldest is forgotten."""


class Inbox:
    def __init__(
        self,
        settings: Settings,
        me: Worker,
        courier: Courier,
        pool: tuple[PoolLayout, int],
        lock: threading.RLock,
    ) -> None:
        """``pool``: its layout as far as counting goes, in blocks of the grids, and how many of
        those one block of the scheduler's is."""
        layout, self._split = pool
        self._settings = settings
        self._me = me
        self._courier = courier
        self._lock = lock
        self._sources: dict[str, Source] = {}
        """By name."""
        self._transfers: dict[str, Incoming] = {}
        """By transfer."""
        self._slots: dict[int, Incoming] = {}
        self._next_slot = itertools.count()
        self._numbers = itertools.count()
        self._early: OrderedDict[str, list[tuple[str, Claim]]] = OrderedDict()
        self._hopeless: OrderedDict[str, str] = OrderedDict()
        self._over: OrderedDict[str, None] = OrderedDict()
        """Transfers that have ended here, so that late claims need not wait."""
        self._landed: dict[int, Landed] = {}
        """By slot, where blocks go through host memory."""
        self._queue: OrderedDict[str, None] = OrderedDict()
        """Transfers that wait for room there."""
        self._errands = Errands(f"kv-land-{me.rank}") if courier.stages else None
        self._receiver = TransferReceiver(me.name, layout, self._done)
        self._loaded: dict[str, Loaded] = {}
        self._bad_blocks: set[int] = set()

    # -- from the engine's thread

    def expect(self, loads: Iterable[LoadStart]) -> None:
        with self._lock:
            for load in loads:
                self._expect(load)

    def abort(self, requests: Iterable[str]) -> None:
        """Their blocks are reported as loaded once nobody may write into them."""
        with self._lock:
            names = set(requests)
            for incoming in list(self._transfers.values()):
                if incoming.start.request in names and not incoming.aborted:
                    incoming.aborted = True
                    self._revoke(incoming, "the request was aborted at decode")
                    self._go_on(incoming)

    def take_loaded(self) -> tuple[dict[str, Loaded], set[int]]:
        """Requests whose blocks are the engine's again, each once; and the scheduler's blocks that
        hold nothing of worth."""
        with self._lock:
            loaded, self._loaded = self._loaded, {}
            bad, self._bad_blocks = self._bad_blocks, set()
            return loaded, bad

    # -- from the wires' threads

    def arrived(self, wire: Wire, peer: Peer, message: Message) -> bool:
        """False for what is not decode's to answer."""
        if isinstance(message, Greeting):
            self._greeted(wire, peer, message)
            return True
        with self._lock:
            if isinstance(message, GiveUp):
                self._given_up(message)
                return True
            source = self._source_at(wire, peer)
            if source is None or not isinstance(message, (Claim, Dropped, KVChunk, Beat)):
                return False
            if isinstance(message, Claim):
                self._claim(source, message)
            elif isinstance(message, Dropped):
                self._left(source.name, message.slot)
            elif isinstance(message, KVChunk):
                landed = self._landed.get(message.transfer)
                if landed is not None:
                    landed.announce(source.name, message)
                self._receiver.handle(source.name, message)
            return True

    def noticed(self, wire: Wire, peer: Peer, notice: int) -> None:
        with self._lock:
            source, what = self._source_at(wire, peer), unpack(notice)
            if source is None or not isinstance(what, KVNotice):
                return
            if source.wire.stage is None:
                self._receiver.notice(source.name, what)
            else:
                self._land(source.name, what)

    def tick(self, now: float) -> None:
        with self._lock:
            busy = self._busy_sources()
        # Without the lock, for which the engine's thread may wait.
        gone = [each for each in busy if each.peer is not None and not each.wire.beat(each.peer)]
        with self._lock:
            for source in busy:
                if self._sources.get(source.name) is not source:
                    continue
                if source in gone or source.silence > self._settings.lease:
                    self._lose(source, "gone" if source in gone else "silent")
            for incoming in list(self._transfers.values()):
                self._ask_again(incoming)
                if incoming.claimed is None and not incoming.over and now > incoming.deadline:
                    self._fail(incoming, "no prefill pushed in time")

    def _ask_again(self, incoming: Incoming) -> None:
        """Who was asked to leave, and has not said that it has: a link may have ended between."""
        for name, drop in incoming.leaving.items():
            source = self._sources.get(name)
            if source is not None and source.peer is not None:
                source.wire.tell(source.peer, drop)

    def close(self) -> None:
        if self._errands is not None:
            self._errands.close()

    # -- through host memory

    def _land(self, source: str, notice: KVNotice) -> None:
        """A layer's blocks are in host memory: proven once the device has them. Under the lock."""
        landed = self._landed.get(notice.transfer)
        chunk = landed.come(source, notice) if landed is not None else None
        if landed is None or chunk is None or self._errands is None:
            return
        landed.incoming.storing += 1
        self._errands.ask(partial(self._store, source, notice, landed, chunk))

    def _store(self, source: str, notice: KVNotice, landed: Landed, chunk: KVChunk) -> None:
        """In the errands' thread. Where the device fails its blocks stay taken: it may still write
        to them."""
        with self._lock:
            current = landed.current
        if current:
            landed.store(chunk, notice.layer).wait()
        with self._lock:
            incoming = landed.incoming
            incoming.storing -= 1
            if landed.current:
                self._receiver.notice(source, notice)
            elif self._transfers.get(incoming.start.transfer) is incoming:
                self._go_on(incoming)

    def _make_room(self, incoming: Incoming, claimed: Claimed, landing: Landing) -> Landed | None:
        """Where its blocks land; None where it must wait, or has failed."""
        transfer, count = incoming.start.transfer, len(incoming.blocks)
        if count > landing.blocks:
            self._fail(
                incoming,
                f"the prompt has {count} blocks, and {landing.blocks} have room in host memory on "
                "their way to the GPU: raise staging_mib",
            )
            return None
        first = next(iter(self._queue), transfer) == transfer
        blocks = landing.take(count) if first else None
        if blocks is None:
            self._queue[transfer] = None
            return None
        self._queue.pop(transfer, None)
        return Landed(landing, incoming, claimed, blocks)

    def _free(self, slot: int) -> None:
        """Nobody writes to what was granted by this slot any more."""
        del self._slots[slot]
        landed = self._landed.pop(slot, None)
        if landed is not None:
            landed.landing.give(landed.blocks)
            self._next_in_line()

    def _leave_queue(self, incoming: Incoming) -> None:
        transfer = incoming.start.transfer
        if transfer in self._queue:
            del self._queue[transfer]
            self._next_in_line()

    def _next_in_line(self) -> None:
        """Those that waited for room, while there is some."""
        for transfer in list(self._queue):
            incoming = self._transfers.get(transfer)
            if incoming is None or incoming.claimed is None:
                self._queue.pop(transfer, None)
                continue
            self._go_on(incoming)
            if transfer in self._queue:
                return

    # -- meeting

    def _greeted(self, wire: Wire, peer: Peer, greeting: Greeting) -> None:
        worker = greeting.worker
        try:
            matches_of(worker, self._me)
            transport = wire_between(worker, self._me)
        except (ConfigError, ValueError) as problem:
            log.error("prefill %s is refused: %s", worker.name, problem)
            wire.reply(peer, Refusal(greeting.nonce, str(problem)))
            return
        with self._lock:
            data, address = self._courier.wires[transport], worker.wires[transport].address
            known = self._sources.get(worker.name)
            if known is None or known.address != address:
                source = Source(worker, data, address, data.listened)
                self._sources[worker.name] = source
                self._courier.learn(worker)
        wire.reply(peer, Welcome(greeting.nonce, self._me, transport))

    def _source_at(self, wire: Wire, peer: Peer) -> Source | None:
        for source in self._sources.values():
            if source.address == peer.address and source.wire is wire:
                source.peer, source.heard = peer, wire.listened
                return source
        return None

    def _busy_sources(self) -> list[Source]:
        """Those that have a claim here, or may write."""
        names = {name for claims in self._early.values() for name, _ in claims}
        for incoming in self._transfers.values():
            names.update(incoming.leaving)
            if incoming.claimed is not None:
                names.update(incoming.claimed.claims)
        return [self._sources[name] for name in names if name in self._sources]

    # -- transfers; under the lock

    def _expect(self, load: LoadStart) -> None:
        if load.transfer in self._transfers:
            problem = f"transfer_id {load.transfer} is in use already"
            self._report(load, Loaded(-1, 0, 0.0, problem), bad=True)
            return
        blocks = [b * self._split + i for b in load.blocks for i in range(self._split)]
        count = -(-(load.end - load.start) // self._block_size)
        deadline = time.monotonic() + self._settings.claim_timeout
        incoming = Incoming(load, blocks[:count], deadline)
        self._transfers[load.transfer] = incoming
        self._over.pop(load.transfer, None)
        for name, claim in self._early.pop(load.transfer, []):
            if name in self._sources:
                self._claim(self._sources[name], claim)
        hopeless = self._hopeless.pop(load.transfer, "")
        if hopeless and incoming.claimed is None:
            self._fail(incoming, hopeless)

    @property
    def _block_size(self) -> int:
        return self._me.grids[0].block_size

    def _claim(self, source: Source, claim: Claim) -> None:
        incoming = self._transfers.get(claim.transfer)
        if incoming is None and claim.transfer in self._over:
            self._deny(source, claim, "the transfer is over")
            return
        if incoming is None:
            self._early.setdefault(claim.transfer, []).append((source.name, claim))
            _shorten(self._early)
            return
        problem = self._problem(incoming, source, claim)
        if problem:
            self._deny(source, claim, problem)
            return
        claimed = incoming.claimed
        if claimed is None or claimed.attempt < claim.attempt:
            self._revoke(incoming, f"attempt {claim.attempt} takes its place")
            claimed = incoming.claimed = self._claimed(source.worker, claim.attempt)
        claimed.claims[source.name] = claim
        self._go_on(incoming)

    def _deny(self, source: Source, claim: Claim, reason: str) -> None:
        assert source.peer is not None
        source.wire.tell(source.peer, Denial(claim.transfer, claim.attempt, reason))

    def _problem(self, incoming: Incoming, source: Source, claim: Claim) -> str:
        """Why the claim is turned away."""
        start, claimed = incoming.start, incoming.claimed
        if incoming.over:
            return incoming.error or "the request was aborted at decode"
        if claim.end != start.end:
            return f"the prompt has {claim.end} tokens at prefill and {start.end} at decode"
        if claim.digest != start.digest:
            return "the prompts of prefill and decode are not the same"
        if claimed is None or claimed.attempt < claim.attempt:
            return ""
        if (claimed.attempt, claimed.engine) != (claim.attempt, source.worker.engine):
            return f"attempt {claimed.attempt} has the transfer"
        return ""

    def _claimed(self, worker: Worker, attempt: int) -> Claimed:
        ranks = partners(self._me.rank, self._me.ranks, worker.ranks)
        return Claimed(attempt, worker.engine, [f"{worker.engine}/{rank}" for rank in ranks])

    def _go_on(self, incoming: Incoming) -> None:
        """Once nobody may write that should not: grants, or reports."""
        if incoming.leaving or incoming.storing:
            return
        if incoming.over:
            self._end(incoming)
        elif incoming.claimed is not None:
            self._grant(incoming, incoming.claimed)

    def _grant(self, incoming: Incoming, claimed: Claimed) -> None:
        """To each of the attempt's workers that has come and was not granted yet."""
        start = incoming.start
        sources = [self._sources[name] for name in claimed.claims if name in self._sources]
        stages = [each.wire.stage for each in sources]
        if any(stage is not stages[0] for stage in stages):
            self._fail(incoming, "prefill's workers come over wires that reach the GPU and others")
            return
        stage = stages[0] if stages else None
        if claimed.slot < 0:
            landed = None
            if stage is not None:
                landed = self._make_room(incoming, claimed, stage.landing)
                if landed is None:
                    return
            claimed.slot, claimed.number = self._free_slot(), next(self._numbers)
            claimed.granted = time.monotonic()
            self._slots[claimed.slot] = incoming
            if landed is not None:
                self._landed[claimed.slot] = landed
            first, *others = claimed.expected
            self._receiver.expect(
                ExpectTransfer(
                    claimed.slot,
                    claimed.number,
                    claimed.attempt,
                    first,
                    incoming.blocks,
                    start.start,
                    start.end - start.start,
                    others,
                )
            )
        there = self._landed.get(claimed.slot)
        grant = Grant(
            start.transfer,
            claimed.attempt,
            claimed.slot,
            claimed.number,
            incoming.blocks if there is None else there.blocks,
            start.start,
            start.end,
        )
        for source in sources:
            if source.peer is not None:
                source.wire.tell(source.peer, grant)

    def _free_slot(self) -> int:
        """The one that was not used for longest."""
        slot = next(self._next_slot) % MAX_TRANSFERS
        while slot in self._slots:
            slot = next(self._next_slot) % MAX_TRANSFERS
        return slot

    def _done(self, done: TransferDone) -> None:
        """The receiver's verdict on a granted transfer."""
        incoming = self._slots.get(done.transfer)
        claimed = incoming.claimed if incoming is not None else None
        if incoming is None or claimed is None or claimed.slot != done.transfer:
            return
        if done.error:
            self._fail(incoming, done.error)
            return
        # Every promised byte is there, so nothing of it can be under way.
        self._forget(incoming)
        self._free(done.transfer)
        tokens = incoming.start.end - incoming.start.start
        seconds = time.monotonic() - claimed.granted
        self._report(incoming.start, Loaded(claimed.attempt, tokens, seconds))

    def _revoke(self, incoming: Incoming, reason: str) -> None:
        """The attempt that has the transfer loses it; who was granted must say that it has left."""
        claimed, incoming.claimed = incoming.claimed, None
        if claimed is None:
            return
        self._leave_queue(incoming)
        log.info("transfer %s, attempt %d: %s", incoming.start.transfer, claimed.attempt, reason)
        drop = Drop(claimed.slot, incoming.start.transfer, claimed.attempt)
        if claimed.slot >= 0:
            self._receiver.cancel(CancelTransfer(claimed.slot))
        for name in claimed.claims:
            source = self._sources.get(name)
            if source is None or source.peer is None:
                continue
            if claimed.slot >= 0:
                incoming.leaving[name] = drop
                source.wire.tell(source.peer, drop)
            else:
                source.wire.tell(source.peer, Denial(drop.transfer, drop.attempt, reason))

    def _left(self, name: str, slot: int) -> None:
        incoming = self._slots.get(slot)
        drop = incoming.leaving.get(name) if incoming is not None else None
        if incoming is None or drop is None or drop.slot != slot:
            return
        del incoming.leaving[name]
        if all(each.slot != slot for each in incoming.leaving.values()):
            self._free(slot)
        self._go_on(incoming)

    def _given_up(self, message: GiveUp) -> None:
        incoming = self._transfers.get(message.transfer)
        if incoming is None:
            self._early.pop(message.transfer, None)
            if message.final:
                self._hopeless[message.transfer] = message.reason
                _shorten(self._hopeless)
            return
        claimed = incoming.claimed
        if incoming.over or (claimed is not None and claimed.attempt != message.attempt):
            return
        if message.final:
            self._fail(incoming, message.reason)
        elif claimed is not None:
            self._wait_for_another(incoming, message.reason)

    def _wait_for_another(self, incoming: Incoming, reason: str) -> None:
        self._revoke(incoming, reason)
        incoming.deadline = time.monotonic() + self._settings.retry_timeout

    def _fail(self, incoming: Incoming, reason: str) -> None:
        if not incoming.over:
            log.warning("transfer %s: %s", incoming.start.transfer, reason)
            incoming.error = reason
            self._revoke(incoming, reason)
            self._go_on(incoming)

    def _end(self, incoming: Incoming) -> None:
        self._forget(incoming)
        self._report(incoming.start, Loaded(-1, 0, 0.0, incoming.error), bad=not incoming.aborted)

    def _forget(self, incoming: Incoming) -> None:
        transfer = incoming.start.transfer
        del self._transfers[transfer]
        self._over[transfer] = None
        _shorten(self._over)
        self._leave_queue(incoming)

    def _report(self, load: LoadStart, loaded: Loaded, bad: bool = False) -> None:
        self._loaded[load.request] = loaded
        if bad:
            self._bad_blocks.update(load.blocks)

    # -- writers that are gone; under the lock

    def _lose(self, source: Source, how: str) -> None:
        """``how``: gone or silent. What it was granted waits until it is cut off."""
        for incoming in list(self._transfers.values()):
            claimed = incoming.claimed
            if claimed is not None and source.name in claimed.claims:
                self._wait_for_another(incoming, f"prefill {source.name} is {how}")
        source.wire.call(partial(self._cut_off, source, how))

    def _cut_off(self, source: Source, how: str) -> None:
        """In the wire's thread, without the lock; asked again with the next tick where not yet."""
        if not is_cut_off(source.wire.endpoint, source.address):
            local = not source.wire.endpoint.capabilities.cross_host
            if local and how == "silent" and not source.reaches:
                source.reaches = True
                log.warning(
                    "prefill %s does not answer and can still write here over %s: blocks that it "
                    "was granted stay taken until its process ends or goes on",
                    source.name,
                    source.wire.name,
                )
            return
        log.warning("prefill %s is gone: nothing of it is written here any more", source.name)
        with self._lock:
            if self._sources.get(source.name) is source:
                del self._sources[source.name]
            for incoming in list(self._transfers.values()):
                if source.name in incoming.leaving:
                    self._left(source.name, incoming.leaving[source.name].slot)


def _shorten(kept: OrderedDict[str, object]) -> None:
    while len(kept) > MOST_EARLY:
        kept.popitem(last=False)
