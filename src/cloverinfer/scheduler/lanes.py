"""Which rows a lane's next step has: decode rows first, then chunks of prompts in order of arrival.

Also finds blocks for the tokens that decode rows are about to add, preempting latecomers.

A lane's next step may be chosen while one is in flight: it has every row that goes on whatever that
step says. What a row computes and samples in flight counts as done, and its token as there.
"""

from __future__ import annotations

from ..core.request import RequestState
from .queue import Order
from .state import Lane, Node, Row, Seat, State, lost_room


class LanePlanner:
    """Chooses rows; builds no messages."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.preemptions = 0
        self._short: set[str] = set()
        """Homes where a row waits for a block that a step in flight holds."""

    def make_room(self, now: float) -> None:
        """Lengthens the tables of rows about to decode, in order across all idle lanes.

        Where the home has no block left, the last in order there that is in no step in flight is
        preempted, be it the one that asks. It waits only where it is the only such one. As the
        first asks first, it always gets what there is.
        """
        self._short.clear()
        needy = [
            seat
            for node in self._state.dense
            for lane in node.lanes
            if lane.usable and not lane.flights
            for seat in lane.members.values()
            if seat.room <= seat.request.num_computed
        ]
        for seat in sorted(needy, key=_order):
            if seat.lane is not None:
                self._extend(seat, now)

    def _extend(self, seat: Seat, now: float) -> None:
        home = seat.home
        assert home is not None
        while not _lengthen(seat):
            candidates = [other for other in home.homed.values() if _preemptible(other)]
            victim = max(candidates, key=_order)
            if len(candidates) == 1:
                assert victim is seat
                if home.num_lost and len(home.homed) == 1:
                    self._state.fail([seat], lost_room(home), now)
                self._short.add(home.name)
                return
            self.preempt(victim, now)
            if victim is seat:
                return

    def preempt(self, seat: Seat, now: float) -> None:
        """Takes all from a request; it is prefilled anew with what it has said so far."""
        request = seat.request
        self._state.release(seat, now)
        if request.state not in (RequestState.WAITING, RequestState.PREEMPTED):
            request.advance(RequestState.PREEMPTED, now)
        request.incarnation += 1
        request.num_computed = request.num_cached = 0
        seat.keys = None
        self._state.wait(seat, now)
        self.preemptions += 1

    def choose_rows(self, lane: Lane) -> list[Row]:
        """Rows of an idle lane's next step; empty where it has nothing to do."""
        return self._rows(lane, sorted(lane.members.values(), key=_order))

    def choose_rows_ahead(self, lane: Lane) -> list[Row]:
        """Rows that the lane's next step has whatever the one in flight says, their tables
        lengthened. None where blocks are short: nobody is preempted before what is in flight has
        landed, and nobody goes on at a home where another waits for that."""
        if lane.node.name in self._short:
            return []
        going = _going(lane)
        if not all(_lengthen(seat) for seat in going if seat.room <= seat.planned):
            return []
        return self._rows(lane, going)

    def _rows(self, lane: Lane, seats: list[Seat]) -> list[Row]:
        """Of the seats, in order, under the token budget."""
        decodes: list[Seat] = []
        prefills: list[Seat] = []
        for seat in seats:
            (decodes if seat.unplanned == 1 else prefills).append(seat)
        budget = self._state.config.max_num_batched_tokens
        # A prefill that found no room beside decode rows gets it in the next step.
        reserve = self._least(prefills[0]) if prefills and lane.starved else 0
        able = [seat for seat in decodes if seat.room > seat.planned][: max(budget - reserve, 0)]
        rows = [Row(seat, seat.planned, 1, samples=True) for seat in able]
        chunks = self._chunks(prefills, budget - len(rows), alone=not rows)
        lane.starved = bool(prefills) and not chunks
        return self._by_home(lane.node, rows + chunks)

    def _chunks(self, seats: list[Seat], budget: int, alone: bool) -> list[Row]:
        rows: list[Row] = []
        for seat in seats:
            least = self._least(seat)
            if least > budget and not (alone and not rows):
                break
            count = seat.unplanned
            if count > max(budget, least):
                # A chunk that does not end the prompt ends with a block.
                size = seat.block_size
                end = (seat.planned + max(budget, least)) // size * size
                count = end - seat.planned
            rows.append(Row(seat, seat.planned, count, samples=count == seat.unplanned))
            budget -= count
        return rows

    def _least(self, seat: Seat) -> int:
        """Tokens of the shortest chunk that the seat's next row can be."""
        if not self._state.config.enable_chunked_prefill:
            return seat.unplanned
        size = seat.block_size
        return min(seat.unplanned, size - seat.planned % size)

    def _by_home(self, node: Node, rows: list[Row]) -> list[Row]:
        if node.role != "dense" or len(self._state.homes) == 1:
            return rows
        return sorted(rows, key=self._home_order)

    def _home_order(self, row: Row) -> int:
        assert row.seat.home is not None
        return self._state.home_order[row.seat.home.name]


def _order(seat: Seat) -> Order:
    return seat.order


def _lengthen(seat: Seat) -> bool:
    """Blocks at home for one token more than are planned; False where there are too few."""
    assert seat.home is not None
    pool = seat.home.cache()
    new = pool.ensure(seat.request.number, seat.planned + 1)
    if new is None:
        return False
    seat.room += len(new) * pool.block_size
    return True


def _going(lane: Lane) -> list[Seat]:
    """Members that may have a row while a step of the lane is in flight, in order.

    Those that need the host go together: one that went while another is in flight would never meet
    it again, and two steps would do the work of one.
    """
    seats = sorted(lane.members.values(), key=_order)
    held = any(seat.needs_host and seat.in_flight for seat in seats)
    return [seat for seat in seats if _goes_on(seat) and not (held and seat.needs_host)]


def _goes_on(seat: Seat) -> bool:
    """Whatever its steps in flight say, unless one of them ends it by what it samples."""
    request = seat.request
    return not request.finished and request.num_tokens + seat.unknown < seat.limit


def _preemptible(seat: Seat) -> bool:
    """It runs at or for its home, and no step in flight names its blocks."""
    return not seat.in_flight and seat.lane is not None and seat.lane.node.role != "prefill"
