"""What comes back: tokens of steps, transfers that are whole, steps that failed."""

from __future__ import annotations

from typing import NamedTuple

from ..core.logprobs import TokenLogprobs
from ..core.request import Request, RequestState
from ..kvcache.manager import KVCacheManager
from ..wire.messages import Alive, Fenced, StepDone, StepFailed, TransferDone
from .lanes import LanePlanner
from .records import TokenEvent
from .state import Flight, Lane, Row, Seat, State


class _Said(NamedTuple):
    """What a row sampled."""

    token: int
    logprobs: TokenLogprobs | None
    error: str
    """Why ``token`` stands for none; empty where it is one."""
    blamed: str | None = None
    """The request's parameter that is to blame for the error."""


class Results:
    """Moves requests on by what nodes report; drops what belongs to nothing that lives."""

    def __init__(self, state: State, planner: LanePlanner) -> None:
        self._state = state
        self._planner = planner
        self.dropped = 0
        """Rows that were computed in vain, as their requests had ended."""

    def step_done(self, done: StepDone, now: float) -> list[TokenEvent]:
        lane = self._state.lane(done.node, done.lane)
        if lane is None or lane.flight is None or lane.flight.step != done.step:
            return []
        wanted = sum(row.samples for row in lane.flight.rows)
        if len(done.tokens) != wanted:
            error = f"{done.node} sent {len(done.tokens)} tokens for {wanted} rows that sample"
            self.step_failed(StepFailed(done.node, done.lane, done.step, error), now)
            return []
        events: list[TokenEvent] = []
        sampled = iter(_sampled(done))
        for i, row in enumerate(self._land(lane, now).rows):
            said = next(sampled) if row.samples else None
            request = row.seat.request
            if request.finished:
                self._drop(row.seat, now)
                continue
            if i in done.prompt_logprobs:
                request.score(row.start, done.prompt_logprobs[i])
            request.num_computed = row.start + row.count
            self._confirm(lane, row)
            if said is not None:
                self._hear(lane, row.seat, said, now, events)
        _mark_idle(lane, now)
        return events

    def step_failed(self, failed: StepFailed, now: float) -> None:
        """Fails the step's requests. Where it failed because a home is gone, only those that live
        there are lost: the others did not advance, and their step is done again. So are rows of a
        step that went out before the one ahead of it had failed, and were in that one not."""
        lane = self._state.lane(failed.node, failed.lane)
        if lane is None or lane.flight is None or lane.flight.step != failed.step:
            return
        flight = self._land(lane, now)
        for later in lane.flights:
            later.spoiled = True
        rows = flight.rows
        for row in rows:
            home = row.seat.home
            row.seat.unfenced |= home is not None and home.name in failed.cut
        lost = [_homeless(row.seat, failed.gone) for row in rows]
        for row, is_lost in zip(rows, lost, strict=True):
            if row.seat.request.finished:
                self._drop(row.seat, now)
            elif flight.spoiled:
                continue
            elif is_lost or not any(lost):
                self._state.fail([row.seat], f"step failed on {failed.node}: {failed.error}", now)
            elif lane.node.role == "prefill":
                # Some of the chunk may have been put already, and a block must come only once.
                self._planner.preempt(row.seat, now)
        _mark_idle(lane, now)

    def transfer_done(self, done: TransferDone, now: float) -> None:
        node = self._state.nodes.get(done.node)
        seat = node.transfers.get(done.transfer) if node is not None else None
        if node is None or seat is None or seat.transfer is None:
            return
        request = seat.request
        if (request.number, request.incarnation) != (done.request, done.incarnation):
            return
        if done.error:
            error = f"KV transfer to {done.node} failed: {done.error}"
            self._state.fail([seat], error, now)
            return
        seat.transfer.whole = True
        del node.transfers[done.transfer]
        if request.state is RequestState.TRANSFERRING:
            self._make_ready(seat)

    def alive(self, alive: Alive) -> None:
        node = self._state.nodes.get(alive.node)
        if node is not None and alive.number == node.probes:
            node.probed_until = None

    def fenced(self, fenced: Fenced) -> None:
        node = self._state.nodes.get(fenced.node)
        if node is not None and fenced.number in node.withheld:
            self._state.give_back(node, fenced.number)

    def _land(self, lane: Lane, now: float) -> Flight:
        """Ends the oldest flight; the time of the one behind it begins."""
        flight = lane.flights.popleft()
        flight.land()
        lane.overdue = False
        if lane.flights:
            lane.flights[0].deadline = now + self._state.config.step_timeout
        return flight

    def _drop(self, seat: Seat, now: float) -> None:
        """A row's request had ended before its step did."""
        self.dropped += 1
        self._state.settle(seat, now)

    def _hear(
        self, lane: Lane, seat: Seat, said: _Said, now: float, events: list[TokenEvent]
    ) -> None:
        """Takes what the request's row sampled."""
        request = seat.request
        if request.sampling.max_tokens == 0:
            self._state.end(seat, RequestState.FINISHED, "length", now)
            return
        if said.error:
            request.error_param = said.blamed
            self._state.fail([seat], said.error, now)
            return
        token = said.token
        request.output_token_ids.append(token)
        request.token_times.append(now)
        reason = _reason_to_end(seat, token)
        events.append(TokenEvent(request, token, reason is not None, said.logprobs))
        if lane.node.role == "prefill" and seat.transfer is not None and seat.transfer.whole:
            self._confirm_home(seat)
        if reason is not None:
            self._state.end(seat, RequestState.FINISHED, reason, now)
        elif lane.node.role == "prefill":
            self._hand_over(seat, now)
        elif request.state is RequestState.PREFILLING:
            request.advance(RequestState.DECODING, now)

    def _confirm(self, lane: Lane, row: Row) -> None:
        """Makes blocks that this step filled findable in the pool they were computed into."""
        node = lane.node if lane.node.pool is not None else row.seat.home
        assert node is not None
        pool = node.cache()
        if row.start // pool.block_size != (row.start + row.count) // pool.block_size:
            _confirm_in(pool, row.seat.request)

    def _confirm_home(self, seat: Seat) -> None:
        assert seat.home is not None
        _confirm_in(seat.home.cache(), seat.request)

    def _hand_over(self, seat: Seat, now: float) -> None:
        """The prompt is computed, and all its puts have finished: the prefill node is done."""
        self._state.release_prefill(seat)
        assert seat.transfer is not None
        seat.request.advance(RequestState.TRANSFERRING, now)
        if seat.transfer.whole:
            self._make_ready(seat)
        else:
            seat.transfer.deadline = now + self._state.config.transfer_timeout

    def _make_ready(self, seat: Seat) -> None:
        self._confirm_home(seat)
        self._state.close_transfer(seat)
        self._state.ready[seat.request.number] = seat


def _sampled(done: StepDone) -> list[_Said]:
    if not done.logprobs and not done.errors:
        return [_Said(token, None, "") for token in done.tokens]
    return [
        _Said(token, done.logprobs.get(i), done.errors.get(i, ""), done.blamed.get(i))
        for i, token in enumerate(done.tokens)
    ]


def _confirm_in(pool: KVCacheManager, request: Request) -> None:
    tokens = request.all_token_ids()
    pool.confirm(request.number, tokens, request.num_computed, request.cache_salt)


def _reason_to_end(seat: Seat, token: int) -> str | None:
    if token in seat.stops:
        return "stop"
    return "length" if seat.request.num_tokens >= seat.limit else None


def _homeless(seat: Seat, gone: list[str]) -> bool:
    return seat.home is not None and (not seat.home.alive or seat.home.name in gone)


def _mark_idle(lane: Lane, now: float) -> None:
    waits = not lane.flights and any(seat.missing == 1 for seat in lane.members.values())
    lane.idle_since = now if waits else None
