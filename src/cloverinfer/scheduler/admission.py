"""Who may come in, and where to: checks on arrival, admission in order, places for decoding.

A request is admitted with blocks for all tokens it has, at its home and on its prefill node at
once, so that what was started can be finished without waiting for anybody's blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..core.errors import NodeDiedError, QueueFullError, RequestError
from ..core.request import Request, RequestState
from ..core.sampling import fits_tail
from ..kvcache.layout import blocks_for
from ..kvcache.manager import KVCacheManager, Match
from ..wire.messages import ExpectTransfer
from .records import DENSE_ROLES
from .state import Lane, Node, Seat, State, Transfer, lost_room


@dataclass(frozen=True)
class _Spot:
    """Where a request would go."""

    home: Node
    lane: Lane
    """On the prefill node, or at home where there is none."""


class Admission:
    """Fills seats from the waiting queue."""

    def __init__(self, state: State, max_model_len: int) -> None:
        self._state = state
        self._max_model_len = max_model_len
        self._arrivals = 0

    def add(self, request: Request, now: float) -> None:
        """Queues a request, or raises ``RequestError``, ``NodeDiedError`` or ``QueueFullError``."""
        state = self._state
        assert request.number not in state.seats, f"request number {request.number} is in use"
        limit = self._check(request)
        missing = state.missing_roles()
        if missing:
            raise NodeDiedError(f"no {' and no '.join(missing)} node is left to serve requests")
        if len(state.waiting) >= state.config.max_queue:
            raise QueueFullError(
                f"{len(state.waiting)} requests wait already (scheduler.max_queue); try again later"
            )
        sampling = request.sampling
        # A grammar that is complete allows nothing but an end.
        endless = sampling.ignore_eos and sampling.structured_outputs is None
        eos = frozenset() if endless else request.eos_token_ids
        order = request.priority, self._arrivals
        seat = Seat(request, order, limit, eos | frozenset(sampling.stop_token_ids))
        seat.needs_host = _needs_host(request)
        self._arrivals += 1
        request.times.setdefault(RequestState.WAITING, now)
        state.seats[request.number] = seat
        state.wait(seat, now)

    def admit(self) -> None:
        """Seats the waiting in order, until one does not fit."""
        while (seat := self._state.waiting.head()) is not None:
            spot = self._find_spot(seat)
            if spot is None:
                return
            self._state.waiting.discard(seat.order)
            self._seat(seat, spot)

    def place_ready(self, now: float) -> None:
        """Gives decode lanes to those whose cache is whole at home."""
        for seat in sorted(self._state.ready.values(), key=lambda seat: seat.order):
            lane = self._decode_lane(seat)
            if lane is not None:
                del self._state.ready[seat.request.number]
                lane.members[seat.request.number] = seat
                seat.lane = lane
                seat.request.advance(RequestState.DECODING, now)

    def fits_somewhere(self, limit: int) -> str | None:
        """Why a request that may reach ``limit`` tokens fits no pool; None where it does."""
        for nodes, what in ((self._state.homes, "KV pool"), (self._state.prefills, "prefill pool")):
            pools = [node.cache() for node in nodes if node.alive]
            if pools and not any(_can_hold(pool, limit) for pool in pools):
                best = max(pools, key=lambda pool: pool.num_blocks * pool.block_size)
                size, largest = best.block_size, best.num_blocks
                blocks = _most_blocks(best, limit)
                return (
                    f"prompt and output of up to {limit} tokens need {blocks} blocks of {size} "
                    f"tokens, but the largest {what} has {largest}: lower max_tokens or raise "
                    "cache.memory_gib"
                )
        return None

    def blocked(self, limit: int) -> str | None:
        """Why a request that may reach ``limit`` tokens fits no home as long as lost blocks do not
        come back; None where it does."""
        homes = [node for node in self._state.homes if node.alive]
        if any(_most_blocks(h.cache(), limit) <= h.cache().num_blocks - h.num_lost for h in homes):
            return None
        return lost_room(max(homes, key=lambda home: home.num_lost)) if homes else None

    def _check(self, request: Request) -> int:
        """Most tokens the request may reach; ``RequestError`` where it cannot be served."""
        prompt = request.num_prompt
        if prompt == 0:
            raise RequestError("the prompt is empty: it must have at least one token", "prompt")
        most = request.sampling.max_tokens
        if prompt + min(1, most) > self._max_model_len:
            raise RequestError(
                f"the prompt of {prompt} tokens leaves no room for output in a context of "
                f"{self._max_model_len} tokens",
                "prompt",
            )
        # A prompt that is only read needs as much room as one that ends with its first token.
        limit = max(min(prompt + most, self._max_model_len), prompt + 1)
        problem = self.fits_somewhere(limit)
        if problem is not None:
            raise RequestError(problem, "max_tokens")
        problem = self.blocked(limit)
        if problem is not None:
            raise NodeDiedError(problem)
        return limit

    def _find_spot(self, seat: Seat) -> _Spot | None:
        if self._dense_full():
            return None
        request = seat.request
        tokens = request.all_token_ids()
        if seat.keys is None:
            seat.keys = self._keys(request)
        home = self._find_home(seat, tokens)
        if home is None:
            return None
        node = self._find_prefill(seat, tokens) if self._state.prefills else home
        return None if node is None else _Spot(home, _emptiest(node))

    def _keys(self, request: Request) -> dict[int, list[bytes]]:
        """Keys of the request's tokens for each block size that some pool has."""
        keys: dict[int, list[bytes]] = {}
        for node in self._state.homes + self._state.prefills:
            pool = node.cache()
            if pool.block_size not in keys:
                keys[pool.block_size] = pool.keys(request.all_token_ids(), request.cache_salt)
        return keys

    def _dense_full(self) -> bool:
        """All places for decoding are taken or promised (pda: any dense node serves anyone)."""
        if self._state.topology != "pda":
            return False
        live = sum(node.usable for node in self._state.dense)
        taken = sum(len(node.homed) for node in self._state.homes)
        return taken >= live * self._state.config.rows

    def _find_home(self, seat: Seat, tokens: list[int]) -> Node | None:
        """The home with most blocks left once the request is in."""
        best: tuple[int, Node] | None = None
        for node in self._state.homes:
            pool = node.cache()
            if not node.trusted or not self._has_room(node) or not _can_hold(pool, seat.limit):
                continue
            match = self._match(node, seat, tokens)
            # One block to spare, so that the newcomer does not preempt those who are there.
            if not pool.can_allocate(len(tokens), match, headroom=min(len(node.homed), 1)):
                continue
            fresh = blocks_for(len(tokens), pool.block_size) - len(match.blocks)
            left = pool.num_free - match.num_free - fresh
            if best is None or left > best[0]:
                best = left, node
        return None if best is None else best[1]

    def _has_room(self, node: Node) -> bool:
        full = len(node.homed) >= self._state.config.rows
        return node.role not in DENSE_ROLES or not full

    def _find_prefill(self, seat: Seat, tokens: list[int]) -> Node | None:
        """The prefill node with least to compute, the request's own missing part included."""
        best: tuple[int, Node] | None = None
        for node in self._state.prefills:
            if not node.trusted or not _can_hold(node.cache(), seat.limit):
                continue
            match = self._match(node, seat, tokens)
            if not node.cache().can_allocate(len(tokens), match):
                continue
            load = sum(other.missing for other in node.lanes[0].members.values())
            load += len(tokens) - match.num_tokens
            if best is None or load < best[0]:
                best = load, node
        return None if best is None else best[1]

    def _seat(self, seat: Seat, spot: _Spot) -> None:
        request, lane = seat.request, spot.lane
        tokens = request.all_token_ids()
        number, pool = request.number, spot.home.cache()
        limit = self._cacheable(spot.home, seat)
        blocks, held = pool.allocate(number, tokens, len(tokens), limit, _keys_of(seat, pool))
        seat.home, seat.room = spot.home, len(blocks) * pool.block_size
        spot.home.homed[number] = seat
        cached = held
        if lane.node is not spot.home:
            seat.prefill = lane.node
            own, limit = lane.node.cache(), self._cacheable(lane.node, seat)
            _, cached = own.allocate(number, tokens, len(tokens), limit, _keys_of(seat, own))
            self._promise(seat, blocks[held // pool.block_size :], held, len(tokens) - held)
        request.num_computed = request.num_cached = cached
        seat.lane = lane
        lane.members[number] = seat

    def _match(self, node: Node, seat: Seat, tokens: list[int]) -> Match:
        pool = node.cache()
        return pool.match_prefix(tokens, self._cacheable(node, seat), _keys_of(seat, pool))

    def _cacheable(self, node: Node, seat: Seat) -> int:
        """Tokens that need not be computed where the node's pool has them."""
        computes = not self._state.prefills or node.role == "prefill"
        if computes and seat.request.wants_prompt_logprobs:
            return 0
        # The last token is computed in any case: its logits give the next one.
        return seat.request.num_tokens - 1

    def _promise(self, seat: Seat, blocks: list[int], start: int, count: int) -> None:
        """Tells the home what will come. There is always a block to send, as the last token is
        never taken from a cache."""
        assert blocks
        assert seat.prefill is not None
        assert seat.home is not None
        request, home = seat.request, seat.home
        slot = home.new_slot()
        home.transfers[slot] = seat
        seat.transfer = Transfer(slot, len(blocks))
        source = seat.prefill.name
        promise = ExpectTransfer(
            slot, request.number, request.incarnation, source, blocks, start, count
        )
        self._state.send(home, promise)

    def _decode_lane(self, seat: Seat) -> Lane | None:
        """The least loaded lane that may serve the seat, on a node with a place left."""
        nodes = [seat.home] if self._state.topology == "pd" else self._state.dense
        most = self._state.config.rows
        lanes = [
            lane
            for node in nodes
            if node is not None and node.num_members < most
            for lane in node.lanes
            if lane.usable
        ]
        return min(lanes, key=_load, default=None)


def _keys_of(seat: Seat, pool: KVCacheManager) -> list[bytes] | None:
    return seat.keys[pool.block_size] if seat.keys is not None else None


def _needs_host(request: Request) -> bool:
    """Devices cannot choose all of its tokens, or not say all that it asks about them."""
    given = request.sampling
    masked = given.structured_outputs is not None or not fits_tail(request.bad_words)
    return masked or given.prompt_logprobs is not None


def _most_blocks(pool: KVCacheManager, limit: int) -> int:
    # The last token is never computed, so it needs no place.
    return blocks_for(limit - 1, pool.block_size)


def _can_hold(pool: KVCacheManager, limit: int) -> bool:
    """The pool, if it were empty, holds a request of ``limit`` tokens."""
    return _most_blocks(pool, limit) <= pool.num_blocks


def _load(lane: Lane) -> tuple[int, int]:
    return len(lane.members), lane.node.num_members


def _emptiest(node: Node) -> Lane:
    return min((lane for lane in node.lanes if lane.usable), key=lambda lane: len(lane.members))
