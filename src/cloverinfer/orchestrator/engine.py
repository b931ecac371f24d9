"""The engine: nodes, scheduler and live requests, driven by one thread.

Other threads hand it commands through a queue and wake it with a message to its own endpoint; it
hands them chunks through their sinks. Only the engine's thread touches the scheduler.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..config.cluster import ClusterConfig, ModelConfig
from ..core.clock import Clock, monotonic
from ..core.collector import set_aside, take_back
from ..core.errors import (
    CloverError,
    EngineClosedError,
    RequestError,
    TransportError,
)
from ..core.sampling import SamplingParams
from ..models import Tokenizer
from ..models.grammar import grammars_of
from ..nodes.config import ATTENTION
from ..scheduler import Scheduler, StepRecord, TokenEvent
from ..wire.messages import (
    Alive,
    AttentionDone,
    Fenced,
    GrammarCompiled,
    Message,
    StepDone,
    StepFailed,
    TransferDone,
    encode,
)
from .cluster import Cluster
from .counters import Counters, EngineStats
from .grammars import GrammarDesk, Released
from .intake import Intake
from .live import Ask, Chunk, Live, RequestOptions, Sink
from .metrics import DenseStep, StatsLog, request_metrics
from .reports import NodeReports, transport_info

log = logging.getLogger(__name__)
SETTLE_SECONDS = 2.0
"""How long ``close`` waits for steps in flight."""
IDLE_SECONDS = 0.5
"""How long the loop may sleep; deadlines and wake-ups make it shorter."""
CATCH_UP_SECONDS = 0.1
"""How long the loop waits for answers that came while it stood still itself."""
HANDOVER_SECONDS = 200e-6
"""How long nodes that are threads of this process may take to begin what they were just sent."""


class Told(NamedTuple):
    """A step's report, taken by the scheduler and not noted by the engine yet."""

    done: StepDone
    events: list[TokenEvent]
    at: float


class Engine:
    """Serves until ``close``. ``submit`` and ``abort`` may be called from any thread."""

    def __init__(
        self,
        model: ModelConfig,
        cluster: ClusterConfig,
        progress: Callable[[str], None] = lambda line: None,
        clock: Clock = monotonic,
    ) -> None:
        """Blocks until all nodes are ready; raises a ``CloverError`` that says why they are not."""
        self.config = cluster
        self.clock = clock
        self.failure: str | None = None
        self._commands: deque[Callable[[float], None]] = deque()
        self._commands_lock = threading.Lock()
        self._over = False
        self._closing = threading.Event()
        self._close_lock = threading.Lock()
        self._closed = False
        self._pid = os.getpid()
        self._stats = StatsLog()
        self.counters = Counters()
        self._planned: dict[tuple[str, int, int], StepRecord] = {}
        self._dead: set[str] = set()
        self._live: dict[int, Live] = {}
        self._touched: dict[int, Live] = {}
        self._told: deque[Told] = deque()
        self._groups: dict[str, set[int]] = {}
        """Numbers of live requests by the name that their client knows."""
        self._numbers = itertools.count(1)
        self._seed = model.seed
        self.cluster = Cluster(model, cluster, progress)
        try:
            self._begin()
        except BaseException:
            self.cluster.close()
            raise
        set_aside()

    def _begin(self) -> None:
        config = self.config
        self.max_model_len = self.cluster.max_model_len
        info = self.cluster.infos[0]
        self._nodes_are_threads = any(i.pid == self._pid for i in self.cluster.infos)
        self._intake = Intake(
            self.cluster.tokenizer,
            info.vocab_size,
            info.eos_token_ids,
            self._seed,
            grammars_of(self.cluster.model),
            self.max_model_len,
        )
        samplers = [i.peer.name for i in self.cluster.infos if i.peer.role != ATTENTION]
        self._desk = GrammarDesk(samplers, config.scheduler.step_timeout, self._send)
        self._reports = NodeReports(self.cluster.infos)
        self._scheduler = Scheduler(
            self.cluster.config.scheduler,
            config.cache,
            self.cluster.sched_nodes(),
            self.max_model_len,
        )
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        self.cluster.tell_deaths(self._on_death)

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.cluster.tokenizer

    # -- from any thread

    def submit(
        self,
        prompt: str | list[int],
        sampling: SamplingParams,
        sink: Sink,
        options: RequestOptions | None = None,
    ) -> str:
        """Begins a request and returns its id. Raises ``RequestError`` or ``EngineClosedError`` at
        once for what can be known at once; the rest reaches the sink."""
        return self.submit_all([Ask(prompt, sampling, sink, options)])[0]

    def submit_all(self, asks: Sequence[Ask]) -> list[str]:
        """The same of several, which are admitted together: none is begun where one raises, and no
        step is planned while others are still on their way."""
        prepared = [self._prepare(ask) for ask in asks]
        if not self._command(functools.partial(self._admit_each, prepared)):
            self._check_open()
        return [lives[0].group for lives in prepared]

    def _prepare(self, ask: Ask) -> list[Live]:
        token_ids = self.tokens(ask.prompt)
        self._intake.check(ask.sampling)
        self._check_open()
        lives = self._lives(token_ids, ask.sampling, ask.sink, ask.options or RequestOptions())
        # Those that share a prompt wait for the first to read it, and find it in prefix caches.
        if self.config.cache.enable_prefix_caching:
            lives[0].followers = lives[1:]
            del lives[1:]
        return lives

    def _lives(
        self, token_ids: list[int], sampling: SamplingParams, sink: Sink, options: RequestOptions
    ) -> list[Live]:
        """One for each of the ``n`` sequences."""
        lives: list[Live] = []
        group = options.request_id or f"request-{secrets.token_hex(8)}"
        for index, params in enumerate(sampling.each()):
            name = f"{group}-{index}" if index else group
            number = next(self._numbers)
            request = self._intake.request(number, name, token_ids, params, self.clock())
            request.priority, request.cache_salt = options.priority, options.cache_salt
            stream = self._intake.text_stream(params)
            lives.append(Live(request, sink, stream, group, index))
        return lives

    def check(self, sampling: SamplingParams) -> None:
        """Raises what ``submit`` would for these parameters; takes long for a grammar that is large
        and new, from any thread."""
        self._intake.check(sampling)

    def abort(self, request_id: str) -> None:
        """Ends a request wherever it is; one that is unknown or over is left alone."""
        self._command(lambda now: self._abort(request_id, now))

    def nodes(self) -> list[dict[str, Any]]:
        """Each node's place and what it did so far."""
        return self._reports.rows()

    def cluster_info(self) -> dict[str, Any]:
        """What the engine is made of now; see ``AsyncLLM.cluster_info``."""
        cluster, free = self.cluster, self._scheduler.free_blocks()
        nodes = self.nodes()
        for row in nodes:
            blocks = row["kv_blocks"]
            row["kv_blocks_used"] = blocks - free.get(row["name"], blocks)
        return {
            "model": cluster.model.name,
            "max_model_len": self.max_model_len,
            "topology": self.config.topology,
            "executor": self.config.executor,
            "transport": transport_info(cluster.choice, cluster.config.network.checksum),
            "nodes": nodes,
        }

    def stats(self) -> EngineStats:
        """What was counted so far, and how full the engine is."""
        scheduler = self._scheduler
        waiting = scheduler.num_waiting
        return EngineStats(
            counters=self.counters,
            running=max(0, len(self._live) - waiting),
            waiting=waiting,
            preemptions=scheduler.num_preemptions,
            blocks=scheduler.used_blocks(),
            dropped_rows=scheduler.num_dropped,
        )

    def close(self) -> None:
        """Ends requests under way with ``EngineClosedError``, then all nodes. In a process that was
        forked off the engine's it does nothing: the nodes are not its own."""
        if os.getpid() != self._pid:
            return
        with self._close_lock:
            if self._closed:
                return
            self._closing.set()
            self._wake()
            try:
                if threading.current_thread() is not self._thread:
                    self._thread.join()
            finally:
                self.cluster.close()
            self._closed = True
            take_back()

    def tokens(self, prompt: str | list[int]) -> list[int]:
        """A prompt as checked token ids; takes long for a long text, from any thread."""
        return self._intake.tokens(prompt)

    def _check_open(self) -> None:
        if self.failure is not None:
            raise EngineClosedError(f"the engine failed: {self.failure}")
        if self._closing.is_set():
            raise EngineClosedError("the engine is shut down")

    def _command(self, command: Callable[[float], None]) -> bool:
        """Hands a command to the engine's thread; False once nobody will run it."""
        with self._commands_lock:
            if self._over:
                return False
            self._commands.append(command)
        self._wake()
        return True

    def _wake(self) -> None:
        try:
            self.cluster.wake()
        except TransportError:
            log.debug("the engine is closed already: nothing to wake", exc_info=True)

    def _on_death(self, name: str, reason: str) -> None:
        self._command(lambda now: self._bury(name, reason, now))

    # -- the engine's thread

    def _run(self) -> None:
        """The boundary where an error of ours ends all requests instead of leaving them to hang."""
        try:
            while not self._closing.is_set():
                self._turn()
            self._deliver(self.clock())
        except Exception as problem:
            log.exception("the engine failed")
            self.failure = f"{type(problem).__name__}: {problem}"
        self._closing.set()
        with self._commands_lock:
            self._over = True
        self._end_requests()
        if self.failure is None:
            self._settle()
        self._live.clear()

    def _end_requests(self) -> None:
        """Tells everybody who waits; those whose requests were not admitted yet as well."""
        reason = f"the engine failed: {self.failure}" if self.failure else "it was shut down"
        for live in (*self._live.values(), *self._desk.withdraw()):
            self._hand(live, EngineClosedError(reason))
        self._drain_commands(self.clock())  # admissions are refused, the rest is void

    def _settle(self) -> None:
        """Lets steps in flight end, so that no node loses the others in the middle of one."""
        for number in self._live:
            self._scheduler.abort(number, self.clock())
        deadline = self.clock() + SETTLE_SECONDS
        while self._scheduler.in_flight and self.clock() < deadline:
            for message in self.cluster.poll(deadline - self.clock()):
                if isinstance(message, StepDone):
                    self._scheduler.on_step_done(message, self.clock())
                elif isinstance(message, StepFailed):
                    self._scheduler.on_step_failed(message, self.clock())

    def _turn(self) -> None:
        """Nodes are given their next steps before anybody hears of the last ones: what follows is
        done while they compute."""
        now = self.clock()
        self._drain_commands(now)
        plans = self._scheduler.schedule(now)
        for name, message in plans:
            self._send(name, message, now)
        self._note_plans()
        arrived = self._hand_over() if plans else []
        self._deliver(now)
        self._take(arrived)
        patience = self._expire()
        self._take(self.cluster.poll(0.0 if arrived or self._commands else patience))

    def _take(self, messages: Sequence[Message]) -> None:
        for message in messages:
            self._on_message(message, self.clock())

    def _hand_over(self) -> list[Message]:
        """Lets nodes of this process begin: one thread has the interpreter at a time, and would
        not give it up before everybody has heard. Returns what arrived meanwhile."""
        return self.cluster.poll(HANDOVER_SECONDS) if self._nodes_are_threads else []

    def _expire(self) -> float:
        """Ends what is late, and returns the seconds until there is anything to be done again. What
        has arrived is read before anything is found to be late: a process that was stopped for a
        while finds its deadlines past, and the answers waiting."""
        now = self.clock()
        due = self._scheduler.next_deadline()
        if (due is None or due > now) and not self._desk.is_late(now):
            return IDLE_SECONDS if due is None else min(IDLE_SECONDS, due - now)
        self._take(self.cluster.poll(CATCH_UP_SECONDS))
        now = self.clock()
        for hung in self._scheduler.expire(now):
            self._give_up(hung.name, hung.reason, now)
        for name in self._desk.late(now):
            self._scheduler.suspect(name, now)
        self._release(self._desk.expired(now), now)
        return 0.0

    def _note_plans(self) -> None:
        """Keeps what each step was like until its result comes."""
        log = self._scheduler.step_log
        while log:
            record = log.popleft()
            self._planned[record.node, record.lane, record.step] = record

    def _drain_commands(self, now: float) -> None:
        while self._commands:
            self._commands.popleft()(now)

    def _send(self, name: str, message: Message, now: float) -> None:
        try:
            self.cluster.send(name, encode(message))
        except TransportError as problem:
            self._give_up(name, str(problem), now)

    def _give_up(self, name: str, reason: str, now: float) -> None:
        """Ends a node that does not answer or cannot be told. It may write until it is gone, of
        which its executor tells."""
        self._bury(name, reason, now, gone=False)
        self.cluster.end(name, reason)

    def _bury(self, name: str, reason: str, now: float, gone: bool = True) -> None:
        if self._over:
            return
        if name not in self._dead:
            log.error("node %s is dead: %s", name, reason)
            self._dead.add(name)
            self._reports.dead(name, reason)
        self._scheduler.on_node_died(name, reason, now, gone)
        self._release(self._desk.lost(name), now)
        if self._scheduler.dead_roles:
            self.failure = f"{name}: {reason}"

    def _admit_each(self, prepared: Sequence[Sequence[Live]], now: float) -> None:
        for lives in prepared:
            self._admit_all(lives, now)

    def _admit_all(self, lives: Sequence[Live], now: float) -> None:
        """Admits sequences of one prompt. Their client is told of one refusal, which ends them all:
        it hears nothing more."""
        for live in lives:
            if not self._admit(live, now):
                if live.index > 0:  # the first one's name may be another request's
                    self._abort(live.group, now)
                return

    def _admit(self, live: Live, now: float) -> bool:
        """False where it was refused, and its client told so."""
        request = live.request
        try:
            self._check_open()
            if live.index == 0 and (live.group in self._groups or self._desk.holds(live.group)):
                raise RequestError(f"request id {live.group!r} is in use", "request_id")
            if self._desk.hold(live, now):
                return True
            self._scheduler.add(request, now)
        except CloverError as problem:
            self._hand(live, problem)
            return False
        self._live[request.number] = live
        self._groups.setdefault(live.group, set()).add(request.number)
        return True

    def _release(self, released: Released, now: float) -> None:
        """Admits, or refuses, requests whose grammars were waited for."""
        lives, problem = released
        refused: set[str] = set()
        for live in lives:
            if problem is not None:
                self._hand(live, problem)
            elif live.group not in refused and not self._admit(live, now):
                refused.add(live.group)
                self._abort(live.group, now)

    def _abort(self, request_id: str, now: float) -> None:
        for live in self._desk.withdraw(request_id):
            live.request.finish_reason = "abort"
            self._end(live, now)
        if not self._over:
            for number in self._groups.get(request_id, ()):
                self._scheduler.abort(number, now)

    def _on_message(self, message: Message, now: float) -> None:
        scheduler = self._scheduler
        if isinstance(message, StepDone):
            self._told.append(Told(message, scheduler.on_step_done(message, now), now))
            if any(self._live[event.request.number].decides for event in self._told[-1].events):
                self._hear()
        elif isinstance(message, TransferDone):
            self._reports.transfer(message)
            for source, nbytes in message.by_source.items():
                self.counters.link(source, message.node, nbytes)
            scheduler.on_transfer_done(message, now)
        elif isinstance(message, GrammarCompiled):
            self._release(self._desk.answered(message), now)
        elif isinstance(message, AttentionDone):
            self._on_attention(message, now)
        elif isinstance(message, Fenced):
            scheduler.on_fenced(message)
        elif isinstance(message, Alive):
            scheduler.on_alive(message)
        elif isinstance(message, StepFailed):
            self._planned.pop((message.node, message.lane, message.step), None)
            scheduler.on_step_failed(message, now)
        else:
            log.warning("dropped a %s", type(message).__name__)

    def _hear(self) -> None:
        """Notes what steps said. Where nothing of it decides what is done next, that waits until
        the nodes have their next steps."""
        while self._told:
            told = self._told.popleft()
            for attended in told.done.attended:
                self._on_attention(attended, told.at)
            self._record_step(told.done, told.at)
            for event in told.events:
                self._on_token(event, told.at)

    def _on_attention(self, done: AttentionDone, now: float) -> None:
        self._reports.attention(done)
        self.counters.link(done.source, done.node, done.bytes_in)
        self.counters.link(done.node, done.source, done.bytes_out)
        self._stats.add_attention(now, done)

    def _record_step(self, done: StepDone, now: float) -> None:
        record = self._planned.pop((done.node, done.lane, done.step), None)
        if record is None:
            return
        stats = done.stats
        self._reports.step(record, done)
        if record.decode_rows == 0:
            return  # a step of prefill chunks alone
        self._stats.add_dense(
            DenseStep(
                now,
                record.decode_rows,
                record.joins,
                record.leaves,
                record.wait_seconds,
                stats.barriers,
                stats.barrier,
            )
        )
        if not stats.barriers:
            self._stats.add_local_attention(now, record.batch, stats)

    def _on_token(self, event: TokenEvent, now: float) -> None:
        self.counters.token(event.request)
        number = event.request.number
        live = self._touched[number] = self._live[number]
        live.hear(event)
        if live.followers:
            self._begin_followers(live, now)
        if live.stream.stopped and not event.finished:
            self._scheduler.finish(number, "stop", now)

    def _end(self, live: Live, now: float) -> None:
        """Hands out the last of a request, and of those that waited for it to read the prompt. One
        that is itself to blame for its error ends its whole group, which hears nothing more."""
        request = live.request
        if request.error_param is not None:
            self._hand(live, live.chunk())
            self._hand(live, RequestError(str(request.error), request.error_param))
            self._abort(live.group, now)
            return
        self._hand(live, live.last_chunk(request_metrics(live.request, now, self._stats)))
        for other in live.followers:
            other.end_as(request)
            self._hand(other, other.last_chunk(request_metrics(other.request, now, self._stats)))

    def _begin_followers(self, live: Live, now: float) -> None:
        followers, live.followers = live.followers, []
        self._admit_all(followers, now)

    def _leave_group(self, live: Live) -> None:
        group = self._groups[live.group]
        group.discard(live.request.number)
        if not group:
            del self._groups[live.group]

    def _deliver(self, now: float) -> None:
        """Hands out what is new of each request, and the last of those that ended."""
        self._hear()
        ended = self._scheduler.drain_finished()
        for request in ended:
            self.counters.end(request, now)
            live = self._live.pop(request.number)
            self._touched.pop(request.number, None)
            self._leave_group(live)
            self._end(live, now)
        for live in self._touched.values():
            self._hand(live, live.chunk())
        self._touched.clear()
        if ended:
            oldest = min((live.request.arrival for live in self._live.values()), default=now)
            self._stats.prune(oldest)

    def _hand(self, live: Live, item: Chunk | CloverError) -> None:
        """The boundary where an error of whoever takes the chunks ends that request alone."""
        try:
            live.sink(item)
        except Exception as problem:
            log.warning("request %s: nobody takes it: %s", live.request.request_id, problem)
            if not self._over:
                self._scheduler.abort(live.request.number, self.clock())
