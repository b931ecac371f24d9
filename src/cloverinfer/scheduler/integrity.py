"""Asserts that the scheduler's tables agree with one another; for tests."""

from __future__ import annotations

from ..core.request import RequestState
from .state import Lane, Node, Row, Seat, State


def check_state(state: State) -> None:
    for node in state.nodes.values():
        _check_node(node)
    for number, seat in state.seats.items():
        assert number == seat.request.number
        _check_seat(state, seat)
    for lane in state.lanes():
        _check_lane(state, lane)
    for seat in state.waiting.items():
        assert seat.home is None
        assert seat.lane is None
        assert not seat.request.finished
        assert seat.request.num_computed == 0
        assert state.seats[seat.request.number] is seat


def _check_node(node: Node) -> None:
    if node.pool is not None:
        node.pool.check_integrity()
        lanes = [lane for lane in node.lanes if node.role == "prefill"]
        holders = set(node.homed).union(*(lane.members for lane in lanes))
        held = holders | set(node.withheld)
        assert node.pool.numbers() == held, f"{node.name}: tables of requests that are not here"
    assert node.alive or not node.withheld, f"{node.name} is dead and will fence nobody"
    assert not (node.alive and node.gone)
    for slot, seat in node.transfers.items():
        assert seat.home is node
        assert seat.transfer is not None
        assert seat.transfer.slot == slot
        assert not seat.transfer.whole
    # A leave goes with the node's next plan, before any join, so nobody is in both.
    assert not set(node.leaves) & set(node.told)


def _check_seat(state: State, seat: Seat) -> None:
    request = seat.request
    assert 0 <= request.num_computed < request.num_tokens or request.finished
    assert not request.finished or seat.in_flight, f"request {request.number} keeps its seat"
    assert seat.in_flight or (seat.flying, seat.unknown) == (0, 0)
    if seat.home is not None:
        assert seat.home.homed[request.number] is seat
        home = seat.home.cache()
        assert seat.room == home.num_held(request.number) * home.block_size
        assert seat.room >= seat.planned
    if seat.lane is not None:
        assert seat.home is not None
        assert seat.lane.members[request.number] is seat
    waiting = seat in state.waiting.items() if seat.home is None else False
    assert waiting == (seat.home is None), f"request {request.number} is nowhere"
    if request.state is RequestState.DECODING:
        assert seat.prefill is None
        assert seat.transfer is None
        assert seat.lane is not None


def _check_lane(state: State, lane: Lane) -> None:
    assert len(lane.flights) <= lane.depth
    rows: dict[int, list[Row]] = {}
    for flight in lane.flights:
        for row in flight.rows:
            rows.setdefault(row.seat.request.number, []).append(row)
    assert rows.keys() <= lane.members.keys(), "a row in flight left its lane"
    for number, seat in lane.members.items():
        assert state.seats[number] is seat
        assert seat.lane is lane
        _check_rows(seat, rows.get(number, []))


def _check_rows(seat: Seat, rows: list[Row]) -> None:
    """The flights' rows of one seat, oldest first, follow one another from what is computed."""
    assert seat.flights == len(rows)
    assert seat.flying == sum(row.count for row in rows)
    assert seat.unknown == sum(row.samples for row in rows)
    at = seat.request.num_computed
    for row in rows if not seat.request.finished else ():
        assert row.start == at, f"request {seat.request.number}: a row from {row.start}, not {at}"
        at += row.count
