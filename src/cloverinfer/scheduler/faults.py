"""Deaths and deadlines: who fails when a node is gone or does not answer; the others go on."""

from __future__ import annotations

from collections.abc import Iterator

from ..core.request import RequestState
from ..wire.messages import NodeGone
from .admission import Admission
from .state import Lane, Node, Seat, State


class Faults:
    """Ends what cannot go on."""

    def __init__(self, state: State, admission: Admission) -> None:
        self._state = state
        self._admission = admission

    def node_died(self, name: str, reason: str, now: float) -> None:
        """Fails the requests that depend on the node and never uses it again."""
        node = self._state.nodes.get(name)
        if node is None or not node.alive:
            return
        node.alive = False
        for withheld in list(node.withheld):
            self._state.give_back(node, withheld)
        for seat in self._state.seats.values():
            seat.unfenced |= seat.prefill is node
        for lane in node.lanes:
            self._abandon(lane)
        self._tell_partners(node)
        error = f"node {name} died: {reason}"
        self._state.fail(
            [seat for seat in self._state.seats.values() if _needs(seat, node)], error, now
        )
        node.told.clear()
        node.leaves.clear()
        node.transfers.clear()
        self._fail_misfits(now)
        self.fail_stranded(now)

    def expire(self, now: float) -> None:
        """Fails what missed its deadline. A step's blocks stay taken until the node answers."""
        for lane in self._state.lanes():
            flight = lane.flight
            if flight is not None and not lane.overdue and flight.deadline <= now:
                lane.overdue = True
                timeout = self._state.config.step_timeout
                error = f"step {flight.step} on {lane.node.name} took more than {timeout:g} s"
                self._state.fail(lane.members.values(), error, now)
                if not lane.node.usable:
                    self._state.fail(lane.node.homed.values(), error, now)
        for seat in list(self._transferring()):
            transfer = seat.transfer
            if transfer is not None and transfer.deadline is not None and transfer.deadline <= now:
                timeout = self._state.config.transfer_timeout
                where = seat.home.name if seat.home is not None else "nowhere"
                error = f"KV transfer to {where} took more than {timeout:g} s"
                self._state.fail([seat], error, now)
        self.fail_stranded(now)

    def next_deadline(self) -> float | None:
        """When ``expire`` has something to do next."""
        flights = [
            lane.flight.deadline
            for lane in self._state.lanes()
            if lane.flight is not None and not lane.overdue
        ]
        transfers = [
            seat.transfer.deadline
            for seat in self._transferring()
            if seat.transfer is not None and seat.transfer.deadline is not None
        ]
        return min(flights + transfers, default=None)

    def fail_stranded(self, now: float) -> None:
        """Fails everything that waits for a role that no usable node has."""
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

    def _abandon(self, lane: Lane) -> None:
        """A dead node's step answers no more; its rows that have ended are given up now."""
        flight, lane.flight = lane.flight, None
        for row in flight.rows if flight is not None else ():
            row.seat.in_flight = False
            if row.seat.request.finished:
                self._state.vacate(row.seat)

    def _transferring(self) -> Iterator[Seat]:
        for node in self._state.homes:
            yield from node.transfers.values()


def _needs(seat: Seat, node: Node) -> bool:
    lane = seat.lane
    return node in (seat.home, seat.prefill) or (lane is not None and lane.node is node)


def _decoding(seat: Seat) -> bool:
    return seat.request.state is RequestState.DECODING
