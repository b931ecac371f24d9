"""Deaths and deadlines: who fails when a node is gone or does not answer; the others go on.

A node that something waits for too long is asked whether it stands still. One that does not answer
within a further ``step_timeout`` is found to be *hung*, and so is one that answers while its step
does not end within two. Whoever drives the scheduler then ends it.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..core.request import QUEUE_TIMEOUT, RequestState
from ..wire.messages import NodeGone, Probe
from .admission import Admission
from .lanes import LanePlanner
from .records import HungNode
from .state import Flight, Lane, Node, Seat, State


class Faults:
    """Ends what cannot go on."""

    def __init__(self, state: State, admission: Admission, planner: LanePlanner) -> None:
        self._state = state
        self._admission = admission
        self._planner = planner

    def node_died(self, name: str, reason: str, now: float, gone: bool) -> None:
        """Fails the requests that depend on the node and never uses it again. ``gone``: nothing of
        it runs any more, which may be told later."""
        node = self._state.nodes.get(name)
        if node is None:
            return
        if node.alive:
            self._bury(node, f"node {name} died: {reason}", now)
        if gone and not node.gone:
            node.gone = True
            self._ask_fences(node, now)

    def _bury(self, node: Node, error: str, now: float) -> None:
        node.alive, node.probed_until = False, None
        for withheld in list(node.withheld):
            self._state.give_back(node, withheld)
        for seat in self._state.seats.values():
            seat.unfenced |= seat.prefill is node
        for lane in node.lanes:
            self._abandon(lane, now)
        self._tell_partners(node)
        self._state.fail(
            [seat for seat in self._state.seats.values() if _needs(seat, node)], error, now
        )
        node.told.clear()
        node.leaves.clear()
        node.transfers.clear()
        self._fail_misfits(now)
        self.fail_stranded(now)

    def _ask_fences(self, writer: Node, now: float) -> None:
        """What it put before may still be on its way, but no more will be."""
        for home in self._state.homes:
            for number, withheld in list(home.withheld.items()):
                if withheld.writer is writer:
                    self._state.ask_fence(home, number, now)

    def expire(self, now: float) -> list[HungNode]:
        """Fails what missed its deadline. A step's blocks stay taken until the node answers, or is
        found to be hung."""
        for lane in self._state.lanes():
            flight = lane.flight
            if flight is not None and not lane.overdue and flight.deadline <= now:
                self._expire_step(lane, flight, now)
        for seat in list(self._transferring()):
            transfer = seat.transfer
            if transfer is not None and transfer.deadline is not None and transfer.deadline <= now:
                self._expire_transfer(seat, now)
        for home in self._state.homes:
            for withheld in home.withheld.values():
                if not withheld.lost and withheld.deadline <= now:
                    withheld.lost = True
                    self._probe(home, now)
        late = self._state.waiting.overdue(now)
        for seat in late:
            seat.request.error_code = QUEUE_TIMEOUT
        error = f"no place within {self._state.config.queue_timeout or 0:g} s (queue_timeout)"
        self._state.fail(late, error, now)
        self.fail_stranded(now)
        return self._hung(now)

    def _expire_step(self, lane: Lane, flight: Flight, now: float) -> None:
        """Its rows fail, and those of the lane that are in no step where nobody else serves."""
        timeout = self._state.config.step_timeout
        lane.overdue, flight.deadline = True, now + 2 * timeout
        error = f"step {flight.step} on {lane.node.name} took more than {timeout:g} s"
        others = [node for node in self._state.nodes.values() if node.role == lane.node.role]
        for seat in list(lane.members.values()):
            if not seat.in_flight and any(node.trusted for node in others):
                self._planner.preempt(seat, now)
        self._state.fail(lane.members.values(), error, now)
        if not lane.node.usable:
            self._state.fail(lane.node.homed.values(), error, now)
        self._probe(lane.node, now)
        for row in flight.rows:
            if row.seat.home is not None:
                self._probe(row.seat.home, now)

    def _expire_transfer(self, seat: Seat, now: float) -> None:
        timeout, home = self._state.config.transfer_timeout, seat.home
        assert home is not None
        error = f"KV transfer to {home.name} took more than {timeout:g} s"
        self._state.fail([seat], error, now)
        self._probe(home, now)

    def suspect(self, name: str, now: float) -> None:
        """Something waits for the node for too long."""
        node = self._state.nodes.get(name)
        if node is not None:
            self._probe(node, now)

    def _probe(self, node: Node, now: float) -> None:
        if node.alive and node.probed_until is None:
            node.probes += 1
            node.probed_until = now + self._state.config.step_timeout
            self._state.send(node, Probe(node.probes))

    def _hung(self, now: float) -> list[HungNode]:
        timeout = self._state.config.step_timeout
        hung: list[HungNode] = []
        for node in self._state.nodes.values():
            due = [lane.flight.deadline for lane in node.lanes if lane.flight and lane.overdue]
            if not node.alive:
                continue
            if node.probed_until is not None and node.probed_until <= now:
                hung.append(HungNode(node.name, f"it has not answered for {timeout:g} s"))
            elif due and min(due) <= now:
                reason = f"it answers, but its step has not ended for {3 * timeout:g} s"
                hung.append(HungNode(node.name, reason))
        return hung

    def next_deadline(self) -> float | None:
        """When ``expire`` has something to do next."""
        flights = [lane.flight.deadline for lane in self._state.lanes() if lane.flight is not None]
        transfers = [
            seat.transfer.deadline
            for seat in self._transferring()
            if seat.transfer is not None and seat.transfer.deadline is not None
        ]
        probes = [n.probed_until for n in self._state.nodes.values() if n.probed_until is not None]
        fences = [
            withheld.deadline
            for home in self._state.homes
            for withheld in home.withheld.values()
            if not withheld.lost
        ]
        queue = self._state.waiting.next_deadline()
        queued = [] if queue is None else [queue]
        return min(flights + transfers + probes + fences + queued, default=None)

    def fail_stranded(self, now: float) -> None:
        """Fails everything that waits for a role that no usable node has, or for lost blocks."""
        if any(home.num_lost for home in self._state.homes):
            for seat in self._state.waiting.items():
                problem = self._admission.blocked(seat.limit)
                self._state.fail([seat] if problem is not None else [], problem or "", now)
        missing = self._state.missing_roles()
        if not missing:
            return
        error = f"no {' and no '.join(missing)} node is left"
        self._state.fail(self._state.waiting.items(), error, now)
        if "dense" in missing:
            # They hold a cache, but nobody can decode them.
            undecoded = [seat for seat in self._state.seats.values() if not _decoding(seat)]
            self._state.fail(undecoded, error, now)

    def _tell_partners(self, dead: Node) -> None:
        """Whoever waits for its answer stops waiting; what it asked for is not done."""
        partner = {"attention": "dense", "dense": "attention"}.get(dead.role)
        for node in self._state.nodes.values():
            if node.role == partner:
                self._state.send(node, NodeGone(dead.name))

    def _fail_misfits(self, now: float) -> None:
        """Fails the waiting that only a pool of the dead node could have held."""
        for seat in self._state.waiting.items():
            problem = self._admission.fits_somewhere(seat.limit)
            if problem is not None:
                self._state.fail([seat], problem, now)

    def _abandon(self, lane: Lane, now: float) -> None:
        """A dead node's steps answer no more; rows that have ended are given up now."""
        rows = [row for flight in lane.flights for row in flight.rows]
        while lane.flights:
            lane.flights.popleft().land()
        for seat in {row.seat.request.number: row.seat for row in rows}.values():
            if seat.request.finished:
                self._state.settle(seat, now)

    def _transferring(self) -> Iterator[Seat]:
        for node in self._state.homes:
            yield from node.transfers.values()


def _needs(seat: Seat, node: Node) -> bool:
    lane = seat.lane
    return node in (seat.home, seat.prefill) or (lane is not None and lane.node is node)


def _decoding(seat: Seat) -> bool:
    return seat.request.state is RequestState.DECODING
