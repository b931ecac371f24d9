"""The tables all parts of the scheduler share: nodes, lanes, seats, and how a seat is given up.

A *seat* is a request's place in the system: the blocks, the lane and the transfer it holds. Blocks
are given back by ``release`` alone, and never while a step in flight names them: a request may
reach its end at any time, its seat stays until every step that it is a row of has answered. Blocks
that a prefill node may have left bytes on their way to outlast the seat: they are *withheld* until
their home has answered that it fenced the writer, or is gone. It is asked to once nothing of a dead
writer runs any more. Withheld blocks whose fence does not come in time are *lost*: nobody counts on
them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ..config import CacheConfig, SchedulerConfig
from ..core.request import Request, RequestState
from ..kvcache.manager import KVCacheManager
from ..wire.messages import CancelTransfer, Fence, Message
from ..wire.notices import MAX_TRANSFERS
from .queue import Order, WaitingQueue
from .records import AHEAD_ROLES, DENSE_ROLES, HOME_ROLES, POOL_ROLES, SchedNode


@dataclass(eq=False)
class Transfer:
    """A promise that a prefill will put blocks into a home pool."""

    slot: int
    num_blocks: int
    """Blocks promised; the others are held at home already."""
    whole: bool = False
    deadline: float | None = None
    """Set once the first token is known."""


@dataclass(eq=False)
class Seat:
    """A request and what it holds."""

    request: Request
    order: Order
    """Its priority and order of arrival: who is served, and spared preemption, before whom."""
    limit: int
    """Most tokens, prompt included."""
    stops: frozenset[int]
    """Tokens that end it."""
    keys: dict[int, list[bytes]] | None = None
    """Keys of its tokens' full blocks by block size, made at admission."""
    home: Node | None = None
    """Node whose pool it lives in while it decodes; set from admission on."""
    prefill: Node | None = None
    """Node whose pool it is prefilled in, where that is not its home."""
    transfer: Transfer | None = None
    unfenced: bool = False
    """Its prefill node may have left bytes on their way to its home, and will not finish them."""
    lane: Lane | None = None
    """Where its rows run now; None while it waits for a place."""
    needs_host: bool = False
    """Choosing its next token takes what only the host knows once the last one is known: its rows
    wait for the step before."""
    flights: int = 0
    """Steps in flight that it is a row of."""
    flying: int = 0
    """Tokens that those steps compute."""
    unknown: int = 0
    """Tokens that those steps sample, which only the node knows."""
    room: int = 0
    """Tokens that its blocks at home can hold."""

    @property
    def in_flight(self) -> bool:
        return self.flights > 0

    @property
    def planned(self) -> int:
        """Tokens computed once its steps in flight have ended."""
        return self.request.num_computed + self.flying

    @property
    def unplanned(self) -> int:
        """Tokens that it then has beside them."""
        request = self.request
        return request.num_tokens + self.unknown - request.num_computed - self.flying

    @property
    def missing(self) -> int:
        """Tokens still to compute."""
        return self.request.num_tokens - self.request.num_computed

    @property
    def block_size(self) -> int:
        """Of the pool it is computed into."""
        node = self.prefill or self.home
        assert node is not None
        return node.cache().block_size


@dataclass(eq=False, slots=True)
class Row:
    """One row of a step."""

    seat: Seat
    start: int
    count: int
    samples: bool


@dataclass(eq=False)
class Flight:
    """A step that was sent and has not answered."""

    step: int
    rows: list[Row]
    deadline: float
    """Infinite while another of its lane is ahead of it."""
    spoiled: bool = False
    """The step before it failed: what its rows of that step compute is void, and it may fail for
    want of their tokens alone."""

    def take_off(self) -> None:
        """From now on it names its rows' blocks."""
        for row in self.rows:
            seat = row.seat
            seat.flights += 1
            seat.flying += row.count
            seat.unknown += row.samples

    def land(self) -> None:
        """It names nothing any more."""
        for row in self.rows:
            seat = row.seat
            seat.flights -= 1
            seat.flying -= row.count
            seat.unknown -= row.samples


@dataclass(eq=False)
class Lane:
    """The place of one wavefront on a node."""

    node: Node
    index: int
    depth: int = 1
    """Most steps in flight: 2 where one is launched ahead."""
    members: dict[int, Seat] = field(default_factory=dict)
    """Seats whose rows run here, by request number."""
    flights: deque[Flight] = field(default_factory=deque)
    """In the order in which they were launched and will land."""
    step: int = 0
    """Number of the next step."""
    overdue: bool = False
    """Its oldest step passed the deadline; it gets no work until that answers, and its node is
    ended where it does not by a second one."""
    starved: bool = False
    """Its last plan had no room for the oldest prefill."""
    idle_since: float | None = None
    """When its last step ended, where rows to decode were left and none was in flight."""

    @property
    def flight(self) -> Flight | None:
        """The oldest."""
        return self.flights[0] if self.flights else None

    @property
    def usable(self) -> bool:
        return self.node.alive and not self.overdue

    @property
    def may_go_ahead(self) -> bool:
        """A step is in flight, another may follow it, and it has not failed on the way."""
        room = 0 < len(self.flights) < self.depth
        return room and self.usable and not self.flights[-1].spoiled


@dataclass(eq=False)
class Withheld:
    """Blocks that wait for a writer to be fenced."""

    writer: Node
    deadline: float
    asked: bool = False
    """Their home has been asked to."""
    lost: bool = False
    """The deadline has passed."""


@dataclass(eq=False)
class Node:
    """A node, its pool and what it has been told."""

    name: str
    role: str
    pool: KVCacheManager | None
    lanes: list[Lane] = field(default_factory=list)
    alive: bool = True
    gone: bool = False
    """It died, and nothing of it runs any more: it begins no further put."""
    probes: int = 0
    """How often it was asked whether it stands still."""
    probed_until: float | None = None
    """When it must have answered that."""
    homed: dict[int, Seat] = field(default_factory=dict)
    """Seats whose home it is."""
    transfers: dict[int, Seat] = field(default_factory=dict)
    """Seats it receives blocks for, by slot, until whole or cancelled."""
    told: dict[int, int] = field(default_factory=dict)
    """Requests joined here in their present incarnation, and how many blocks it knows of each."""
    leaves: list[int] = field(default_factory=list)
    """Requests that its next plan must take away."""
    next_slot: int = 0
    withheld: dict[int, Withheld] = field(default_factory=dict)
    """What of its pool waits for a writer to be fenced, by the pool's numbers."""

    @property
    def usable(self) -> bool:
        """Alive and, where it runs steps, with a lane that answers."""
        return self.alive and (not self.lanes or any(lane.usable for lane in self.lanes))

    @property
    def trusted(self) -> bool:
        """Usable, and not thought to stand still: newcomers may go there."""
        return self.usable and self.probed_until is None

    @property
    def num_lost(self) -> int:
        """Blocks of its pool that may never come back."""
        lost = [number for number, one in self.withheld.items() if one.lost]
        return len({block for number in lost for block in self.cache().table(number)})

    @property
    def num_members(self) -> int:
        return sum(len(lane.members) for lane in self.lanes)

    def cache(self) -> KVCacheManager:
        assert self.pool is not None, f"{self.name} has no pool"
        return self.pool

    def forget(self, number: int) -> None:
        """The next plan takes the request away, where the node has heard of it."""
        if self.told.pop(number, None) is not None and self.alive:
            self.leaves.append(number)

    def new_slot(self) -> int:
        """A transfer slot, the longest unused one so that late notices meet no new transfer."""
        while self.next_slot in self.transfers:
            self.next_slot = (self.next_slot + 1) % MAX_TRANSFERS
        slot = self.next_slot
        self.next_slot = (slot + 1) % MAX_TRANSFERS
        return slot


class State:
    """Everything the parts read and change."""

    def __init__(
        self, config: SchedulerConfig, cache: CacheConfig, topology: str, nodes: list[SchedNode]
    ) -> None:
        self.config = config
        self.topology = topology
        self.nodes = {node.name: self._make_node(node, cache) for node in nodes}
        self.homes = [node for node in self.nodes.values() if node.role in HOME_ROLES]
        self.prefills = [node for node in self.nodes.values() if node.role == "prefill"]
        self.dense = [node for node in self.nodes.values() if node.role in DENSE_ROLES]
        self.home_order = {node.name: i for i, node in enumerate(self.homes)}
        self.seats: dict[int, Seat] = {}
        """Every request that has not ended, or still holds something, by number."""
        self.waiting = WaitingQueue[Seat]()
        self.ready: dict[int, Seat] = {}
        """Seats whose cache is whole at home and which have no lane yet."""
        self.outbox: list[tuple[str, Message]] = []
        self.finished: list[Request] = []

    def _make_node(self, node: SchedNode, cache: CacheConfig) -> Node:
        pool = None
        if node.role in POOL_ROLES:
            size = node.block_size or cache.block_size
            pool = KVCacheManager(node.kv_blocks, size, cache.enable_prefix_caching)
        made = Node(node.name, node.role, pool)
        count = 1 if node.role == "prefill" else self.config.num_wavefronts
        if node.role != "attention":
            depth = self._depth(node)
            made.lanes = [Lane(made, i, depth) for i in range(count)]
        return made

    def _depth(self, node: SchedNode) -> int:
        wanted = self.config.async_scheduling
        ahead = node.device != "cpu" if wanted is None else wanted
        return 2 if ahead and node.role in AHEAD_ROLES else 1

    def lanes(self) -> Iterator[Lane]:
        for node in self.nodes.values():
            yield from node.lanes

    def lane(self, node: str, index: int) -> Lane | None:
        """A lane of a live node, by what a message says."""
        found = self.nodes.get(node)
        if found is None or not found.alive or not 0 <= index < len(found.lanes):
            return None
        return found.lanes[index]

    def missing_roles(self) -> list[str]:
        """Roles that no usable node has."""
        wanted = {node.role for node in self.nodes.values()}
        have = {node.role for node in self.nodes.values() if node.usable}
        return sorted(wanted - have)

    def dead_roles(self) -> list[str]:
        """Roles that no node is alive for."""
        nodes = self.nodes.values()
        return sorted({node.role for node in nodes} - {node.role for node in nodes if node.alive})

    def send(self, node: Node, message: Message) -> None:
        if node.alive:
            self.outbox.append((node.name, message))

    def end(
        self, seat: Seat, state: RequestState, reason: str, now: float, error: str | None = None
    ) -> None:
        """Moves a request to a terminal state, once; its seat goes when no step names it."""
        request = seat.request
        assert not request.finished, f"request {request.number} ended twice"
        request.advance(state, now)
        request.finish_reason, request.error = reason, error
        self.finished.append(request)
        self.waiting.discard(seat.order)
        self.settle(seat, now)

    def fail(self, seats: Iterable[Seat], error: str, now: float) -> None:
        """Fails those that have not ended yet."""
        for seat in list(seats):
            if not seat.request.finished:
                self.end(seat, RequestState.FAILED, "error", now, error)

    def wait(self, seat: Seat, now: float) -> None:
        """Queues a seat that holds nothing."""
        timeout = self.config.queue_timeout
        self.waiting.push(seat.order, seat, None if timeout is None else now + timeout)

    def settle(self, seat: Seat, now: float) -> None:
        """Gives up the seat of a request that has ended, where no step names it any more."""
        assert seat.request.finished
        if not seat.in_flight:
            self.release(seat, now)
            del self.seats[seat.request.number]

    def release(self, seat: Seat, now: float) -> None:
        """Gives back everything a seat holds and tells the nodes to forget the request."""
        assert not seat.in_flight, f"request {seat.request.number} is in a step in flight"
        writer = _unfenced_writer(seat)
        self.release_prefill(seat)
        self._cancel_transfer(seat)
        self.leave_lane(seat)
        if seat.home is not None:
            number, home = seat.request.number, seat.home
            if writer is None or not home.alive:
                home.cache().free(number)
            else:
                self._withhold(number, home, writer, now)
            home.forget(number)
            del home.homed[number]
            seat.home, seat.room = None, 0
        seat.unfenced = False

    def _withhold(self, number: int, home: Node, writer: Node, now: float) -> None:
        """The blocks stay taken until the home has fenced the writer."""
        withheld = home.cache().withhold(number)
        home.withheld[withheld] = Withheld(writer, now + self.config.step_timeout)
        self.ask_fence(home, withheld, now)

    def ask_fence(self, home: Node, withheld: int, now: float) -> None:
        """Once; and not while a dead writer may still begin to write."""
        one = home.withheld[withheld]
        if not one.asked and (one.writer.alive or one.writer.gone):
            one.asked, one.lost = True, False
            one.deadline = now + self.config.step_timeout
            self.send(home, Fence(one.writer.name, withheld))

    def give_back(self, home: Node, withheld: int) -> None:
        """Nothing is written to these blocks any more."""
        del home.withheld[withheld]
        home.cache().free(withheld)

    def release_prefill(self, seat: Seat) -> None:
        """Gives back what a seat holds on its prefill node, whose puts have all finished."""
        if seat.prefill is not None:
            self.leave_lane(seat)
            seat.prefill.cache().free(seat.request.number)
            seat.prefill = None

    def leave_lane(self, seat: Seat) -> None:
        number = seat.request.number
        self.ready.pop(number, None)
        if seat.lane is not None:
            del seat.lane.members[number]
            seat.lane.node.forget(number)
            seat.lane = None

    def close_transfer(self, seat: Seat) -> None:
        """The slot is free again: the transfer is whole, or nobody waits for it."""
        transfer, home = seat.transfer, seat.home
        slots = home.transfers if home is not None else {}
        if transfer is not None and slots.get(transfer.slot) is seat:
            del slots[transfer.slot]
        seat.transfer = None

    def _cancel_transfer(self, seat: Seat) -> None:
        if seat.transfer is not None and not seat.transfer.whole and seat.home is not None:
            self.send(seat.home, CancelTransfer(seat.transfer.slot))
        self.close_transfer(seat)


def _unfenced_writer(seat: Seat) -> Node | None:
    """The prefill node whose bytes may still come to the seat's home; a transfer that is whole has
    had all of them."""
    transfer = seat.transfer
    unfinished = transfer is not None and not transfer.whole
    return seat.prefill if seat.unfenced and unfinished else None


def lost_room(home: Node) -> str:
    """Why a request does not fit there."""
    writers = sorted({one.writer.name for one in home.withheld.values() if one.lost})
    return (
        f"{home.num_lost} of {home.cache().num_blocks} blocks of {home.name} stay taken, since "
        f"{' and '.join(writers)} may still write to them; the others are too few for this request"
    )
