"""The scheduler: from requests and reports of nodes to plans, as a function of state and time.

It owns where every request is and which blocks it has. It knows no tensor, no wire and no clock:
who drives it (an engine or a simulation) passes the time, delivers the messages and calls
``schedule`` after every event.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ..config import CacheConfig, SchedulerConfig
from ..core.request import Request, RequestState
from ..wire.messages import Alive, Fenced, Message, StepDone, StepFailed, TransferDone
from .admission import Admission
from .faults import Faults
from .integrity import check_state
from .lanes import LanePlanner
from .plans import PlanWriter
from .records import HungNode, SchedNode, StepRecord, TokenEvent, topology_of
from .results import Results
from .state import Lane, Row, State

STEP_LOG_LENGTH = 65536
"""Step records kept for whoever reads them; the oldest are dropped."""


class Scheduler:
    """Serves requests on the given nodes, whose roles make the topology (``ConfigError`` if not).

    ``step_log`` holds a record of every step planned; the reader takes them out.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        nodes: Sequence[SchedNode],
        max_model_len: int,
    ) -> None:
        self._state = State(config, cache, topology_of(list(nodes)), list(nodes))
        self._admission = Admission(self._state, max_model_len)
        self._planner = LanePlanner(self._state)
        self._writer = PlanWriter(self._state)
        self._results = Results(self._state, self._planner)
        self._faults = Faults(self._state, self._admission, self._planner)
        self.step_log: deque[StepRecord] = deque(maxlen=STEP_LOG_LENGTH)

    def add(self, request: Request, now: float) -> None:
        """Takes a request on. ``RequestError``: it can never be served; ``QueueFullError``: not
        now; ``NodeDiedError``: a role has no node left."""
        self._admission.add(request, now)

    def abort(self, number: int, now: float) -> None:
        """Ends a request at once, wherever it is; unknown and ended ones are left alone."""
        seat = self._state.seats.get(number)
        if seat is not None and not seat.request.finished:
            self._state.end(seat, RequestState.ABORTED, "abort", now)

    def finish(self, number: int, reason: str, now: float) -> None:
        """Ends a request as finished: its text came to a stop that tokens do not show. Tokens of
        a step in flight are dropped. Unknown and ended ones are left alone."""
        seat = self._state.seats.get(number)
        if seat is None or seat.request.finished:
            return
        untouched = seat.request.state is RequestState.WAITING
        state = RequestState.ABORTED if untouched else RequestState.FINISHED
        self._state.end(seat, state, reason, now)

    def schedule(self, now: float) -> list[tuple[str, Message]]:
        """What to send, by node name and in this order: plans for every idle lane with work, and
        for one ahead where lanes take that; promises and cancellations of transfers, writers to
        fence, and probes."""
        state = self._state
        if state.waiting:  # others were told when the role was lost
            self._faults.fail_stranded(now)
        self._admission.place_ready(now)
        self._planner.make_room(now)
        self._admission.admit()
        for lane in state.lanes():
            if not lane.flights and lane.members and lane.usable:
                self._launch(lane, self._planner.choose_rows(lane), now)
        for lane in state.lanes():
            if lane.may_go_ahead:
                self._launch(lane, self._planner.choose_rows_ahead(lane), now)
        messages, state.outbox = state.outbox, []
        return [(name, message) for name, message in messages if state.nodes[name].alive]

    def _launch(self, lane: Lane, rows: list[Row], now: float) -> None:
        if rows:
            self.step_log.append(self._writer.launch(lane, rows, now))

    def on_step_done(self, done: StepDone, now: float) -> list[TokenEvent]:
        """The step's new tokens. Reports of steps that nobody waits for are dropped."""
        return self._results.step_done(done, now)

    def on_step_failed(self, failed: StepFailed, now: float) -> None:
        """The step's requests fail with its error."""
        self._results.step_failed(failed, now)

    def on_transfer_done(self, done: TransferDone, now: float) -> None:
        """The request may decode once its first token is known too; or it fails."""
        self._results.transfer_done(done, now)

    def on_fenced(self, fenced: Fenced) -> None:
        """Blocks that waited for it may be used again."""
        self._results.fenced(fenced)

    def on_alive(self, alive: Alive) -> None:
        """A node that was suspected of standing still does not."""
        self._results.alive(alive)

    def on_node_died(self, name: str, reason: str, now: float, gone: bool = True) -> None:
        """Requests that depend on the node fail with the reason; the others go on without it.
        Blocks that it may write to are fenced, and so reused, only once it is ``gone``, as nothing
        of it runs any more: where that comes later, it is told by a second call."""
        self._faults.node_died(name, reason, now, gone)

    def suspect(self, name: str, now: float) -> None:
        """Something waits too long for the node: it is asked whether it stands still."""
        self._faults.suspect(name, now)

    def expire(self, now: float) -> list[HungNode]:
        """Fails requests whose step, transfer or place in the queue missed its deadline. Returns
        the nodes that stand still, again and again until ``on_node_died``: the caller ends them.
        """
        return self._faults.expire(now)

    def next_deadline(self) -> float | None:
        """When ``expire`` is due; None while nothing is under way."""
        return self._faults.next_deadline()

    def drain_finished(self) -> list[Request]:
        """Requests that reached a terminal state since the last call, each exactly once."""
        finished, self._state.finished = self._state.finished, []
        return finished

    @property
    def has_work(self) -> bool:
        """A request has not ended, a step has not answered, or a message waits to be sent."""
        return bool(self._state.seats or self._state.outbox)

    @property
    def dead_roles(self) -> list[str]:
        """Roles whose nodes have all died: nothing can be served any more."""
        return self._state.dead_roles()

    @property
    def in_flight(self) -> bool:
        """A step has not answered."""
        return any(lane.flights for lane in self._state.lanes() if lane.usable)

    @property
    def num_waiting(self) -> int:
        return len(self._state.waiting)

    @property
    def num_preemptions(self) -> int:
        return self._planner.preemptions

    @property
    def num_dropped(self) -> int:
        """Rows that were computed although their request had ended."""
        return self._results.dropped

    @property
    def topology(self) -> str:
        return self._state.topology

    def free_blocks(self) -> dict[str, int]:
        """Free blocks, cached ones included, by name of node with a pool."""
        nodes = self._state.nodes.values()
        return {node.name: node.pool.num_free for node in nodes if node.pool is not None}

    def used_blocks(self) -> dict[str, tuple[int, int]]:
        """Blocks that requests hold, and all blocks, by name of node with a pool."""
        pools = {node.name: node.pool for node in self._state.nodes.values()}
        return {
            name: (pool.num_blocks - pool.num_free, pool.num_blocks)
            for name, pool in pools.items()
            if pool is not None
        }

    def cache_hits(self) -> dict[str, tuple[int, int]]:
        """Tokens found in and asked of each pool's prefix cache, by node name."""
        return {
            node.name: (node.pool.stats.hits, node.pool.stats.queries)
            for node in self._state.nodes.values()
            if node.pool is not None
        }

    def check_integrity(self) -> None:
        """Asserts that all tables agree. For tests, after every step."""
        check_state(self._state)
