"""Turns chosen rows into messages: what each node has not been told yet, and what it must forget.

A node hears of a request in the first plan there that has it as a row, of new blocks in the next,
and of its leaving in whichever plan it gets first. Leaves are read before joins, so a new
incarnation may join in the plan that takes the old one away.
"""

from __future__ import annotations

import math

from ..core.request import RequestState
from ..wire.messages import (
    AttentionJoin,
    AttentionPlan,
    Grammar,
    Join,
    Push,
    Sampling,
    Shaping,
    StepPlan,
)
from .records import DENSE_ROLES, StepRecord
from .state import Flight, Lane, Node, Row, Seat, State


class PlanWriter:
    """Sends a lane its next step."""

    def __init__(self, state: State) -> None:
        self._state = state

    def launch(self, lane: Lane, rows: list[Row], now: float) -> StepRecord:
        """Puts the plans of one step into the outbox and marks its rows as in flight."""
        node, step = lane.node, lane.step
        leaves, node.leaves = node.leaves, []
        joins: list[Join] = []
        blocks: list[tuple[int, list[int]]] = []
        for row in rows:
            self._introduce(node, row.seat, joins, blocks)
        plan = StepPlan(
            lane=lane.index,
            step=step,
            rows=[row.seat.request.number for row in rows],
            starts=[row.start for row in rows],
            counts=[row.count for row in rows],
            samples=[row.samples for row in rows],
            joins=joins,
            leaves=leaves,
            blocks=blocks,
        )
        self._state.send(node, plan)
        if node.role == "dense":  # whose first stage runs while attention nodes read theirs
            self._plan_attention(lane, rows)
        record = StepRecord(
            time=now,
            node=node.name,
            lane=lane.index,
            step=step,
            batch=len(rows),
            decode_rows=sum(map(_decodes, rows)) if node.role in DENSE_ROLES else 0,
            tokens=sum(row.count for row in rows),
            joins=len(joins),
            leaves=len(leaves),
            wait_seconds=_waited(lane, now),
        )
        self._take_off(lane, rows, now)
        return record

    def _take_off(self, lane: Lane, rows: list[Row], now: float) -> None:
        for row in rows:
            request = row.seat.request
            if request.state in (RequestState.WAITING, RequestState.PREEMPTED):
                request.advance(RequestState.PREFILLING, now)
        deadline = math.inf if lane.flights else now + self._state.config.step_timeout
        flight = Flight(lane.step, rows, deadline)
        flight.take_off()
        lane.flights.append(flight)
        lane.step += 1
        lane.idle_since = None

    def _introduce(
        self, node: Node, seat: Seat, joins: list[Join], blocks: list[tuple[int, list[int]]]
    ) -> None:
        number = seat.request.number
        pool = node.pool
        told = node.told.get(number)
        held = pool.num_held(number) if pool is not None else 0
        if told is None:
            joins.append(self._join(node, seat))
            node.told[number] = held
        elif pool is not None and held > told:
            blocks.append((number, pool.table(number, told)))
            node.told[number] = held

    def _join(self, node: Node, seat: Seat) -> Join:
        request, home = seat.request, seat.home
        assert home is not None
        start = request.num_computed
        return Join(
            request=request.number,
            incarnation=request.incarnation,
            tokens=request.all_token_ids()[start:],
            start=start,
            blocks=node.pool.table(request.number) if node.pool is not None else [],
            sampling=_sampling(seat),
            home=home.name if node.role == "dense" else "",
            push=_push(seat, home) if node.role == "prefill" else None,
            before=request.all_token_ids()[:start] if request.sampling.needs_history else [],
        )

    def _plan_attention(self, lane: Lane, rows: list[Row]) -> None:
        """One plan per attention node that the rows, adjacent by home, touch."""
        plans: dict[str, AttentionPlan] = {}
        for row in rows:
            home, number = row.seat.home, row.seat.request.number
            assert home is not None
            plan = plans.get(home.name)
            if plan is None:
                leaves, home.leaves = home.leaves, []
                plan = AttentionPlan(lane.node.name, lane.index, lane.step, [], [], [], leaves, [])
                plans[home.name] = plan
                self._state.send(home, plan)
            plan.rows.append(number)
            plan.lengths.append(row.start + row.count)
            self._introduce_table(home, row.seat, plan)

    def _introduce_table(self, home: Node, seat: Seat, plan: AttentionPlan) -> None:
        number, pool = seat.request.number, home.cache()
        told = home.told.get(number)
        held = pool.num_held(number)
        if told is None:
            plan.joins.append(AttentionJoin(number, pool.table(number)))
        elif held > told:
            plan.blocks.append((number, pool.table(number, told)))
        home.told[number] = held


def _sampling(seat: Seat) -> Sampling:
    """What a node needs to know of how the request wants its tokens."""
    request, given = seat.request, seat.request.sampling
    return Sampling(
        temperature=given.temperature,
        top_k=max(given.top_k, 0),
        top_p=given.top_p,
        seed=request.seed,
        logprobs=given.logprobs,
        prompt_logprobs=given.prompt_logprobs if request.wants_prompt_logprobs else None,
        min_p=given.min_p,
        shaping=_shaping(seat) if given.shapes_logits else None,
    )


def _shaping(seat: Seat) -> Shaping:
    request, given = seat.request, seat.request.sampling
    form = given.structured_outputs
    return Shaping(
        num_prompt=request.num_prompt,
        presence_penalty=given.presence_penalty,
        frequency_penalty=given.frequency_penalty,
        repetition_penalty=given.repetition_penalty,
        logit_bias=given.logit_bias or {},
        bad_words=request.bad_words,
        min_tokens=given.min_tokens,
        stops=sorted(seat.stops) if given.min_tokens else [],
        grammar=None if form is None else Grammar(form.kind, form.text),
    )


def _push(seat: Seat, home: Node) -> Push:
    assert seat.transfer is not None
    blocks = home.cache().table(seat.request.number)
    skip = len(blocks) - seat.transfer.num_blocks
    start = skip * home.cache().block_size
    return Push(home.name, seat.transfer.slot, blocks, skip, start)


def _waited(lane: Lane, now: float) -> float:
    """Since when rows to decode have stood still; a step of prefills alone waited for nothing."""
    return 0.0 if lane.idle_since is None else now - lane.idle_since


def _decodes(row: Row) -> bool:
    """The row computes the one token that was sampled last, or is about to be."""
    request = row.seat.request
    return row.count == 1 and (row.start >= request.num_prompt or bool(request.output_token_ids))
