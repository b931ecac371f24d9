"""A cluster of fake nodes that keep plans' promises to the letter and check every one of them.

A slot of a fake pool holds a digest of all tokens up to its position, so a block that was freed
too early, never sent, or shared wrongly shows as a wrong digest when it is attended over. The next
token is a function of the digest: what each request must say is known beforehand.
"""

from __future__ import annotations

import itertools
import random
from typing import Union

from tests.scheduler_kit import FakeNode, Known, Truth, needs_host, next_token

from cloverinfer.config import CacheConfig, SchedulerConfig
from cloverinfer.core.request import Request, RequestState
from cloverinfer.scheduler import SchedNode, Scheduler, TokenEvent
from cloverinfer.wire.messages import (
    Alive,
    AttentionPlan,
    CancelTransfer,
    ExpectTransfer,
    Fence,
    Fenced,
    Join,
    Message,
    NodeGone,
    Probe,
    StepDone,
    StepFailed,
    StepPlan,
    StepStats,
    TransferDone,
    decode,
    encode,
)

Report = Union[StepDone, StepFailed, TransferDone, Fenced, Alive]


class Cluster:
    """Scheduler and fake nodes; ``actions`` are what may happen next, in any order."""

    def __init__(
        self,
        nodes: list[SchedNode],
        config: SchedulerConfig | None = None,
        cache: CacheConfig | None = None,
        max_model_len: int = 1000,
        seed: int = 0,
    ) -> None:
        self.config = config or SchedulerConfig()
        self.cache = cache or CacheConfig(block_size=4)
        self.scheduler = Scheduler(self.config, self.cache, nodes, max_model_len)
        self.rng = random.Random(seed)
        self.nodes = {node.name: FakeNode(node.name, node.role) for node in nodes}
        self.now = 0.0
        self.truth: dict[int, Truth] = {}
        self.requests: dict[int, Request] = {}
        self.said: dict[int, list[int]] = {}
        self.ended: list[Request] = []
        self.computing: list[tuple[str, int]] = []
        self.reports: list[Report] = []
        self.late: list[tuple[str, str, int, int]] = []
        """Bytes of failed puts that are still on their way: (writer, receiver, block, offset)."""
        self.fencing: list[tuple[str, Fence]] = []
        """Fences that receivers have been asked for."""
        self.sent: list[tuple[str, Message]] = []
        self.dead: set[str] = set()
        self.hung: dict[str, list[Message]] = {}
        """Nodes that stand still, and what they will read if they go on."""
        self.ending: list[str] = []
        """Those that were ended for it and may write until they are gone."""
        self.num_ended = 0
        self.joined: set[tuple[str, int, int]] = set()
        self.num_ahead = 0

    # Driving

    def add(self, request: Request) -> None:
        self.scheduler.add(request, self.now)
        self.requests[request.number] = request
        self.truth[request.number] = Truth(list(request.prompt_token_ids))
        self.said[request.number] = []

    def schedule(self) -> list[tuple[str, Message]]:
        """Sends what the scheduler wants sent; asking twice gives nothing new."""
        messages = [(name, decode(encode(m))) for name, m in self.scheduler.schedule(self.now)]
        assert self.scheduler.schedule(self.now) == []
        self.scheduler.check_integrity()
        for name, message in messages:
            assert name not in self.dead
            if isinstance(message, StepPlan):
                assert not any(self.requests[number].finished for number in message.rows)
            self._receive(self.nodes[name], message)
        self.sent += messages
        return messages

    def able(self) -> list[tuple[str, int]]:
        """Steps that may be computed: no node that takes part in them stands still."""
        return [(name, lane) for name, lane in self.computing
                if not (self._partners(name, lane) & self.hung.keys())]  # fmt: skip

    def _partners(self, name: str, lane: int) -> set[str]:
        node = self.nodes[name]
        joins = [node.known[number].join for number in node.busy[lane].rows]
        pushes = {join.push.node for join in joins if join.push is not None}
        return {name} | pushes | {join.home for join in joins if join.home}

    def step(self) -> bool:
        """One random thing happens, then the scheduler runs; False where nothing can."""
        self.now += 0.01
        able = self.able()
        fencing = [one for one in self.fencing if one[0] not in self.hung]
        reports = self._readable()
        lists = able, reports, self.late, fencing, self.ending
        choices = [(act, i) for act, items in enumerate(lists) for i in range(len(items))]
        if choices:
            act, at = self.rng.choice(choices)
            if act == 0:
                self.computing.remove(able[at])
                self.compute(*able[at])
            elif act == 1:
                self.reports.remove(reports[at])
                self.deliver(reports[at])
            elif act == 2:
                self.land(*self.late.pop(at))
            elif act == 3:
                self.fencing.remove(fencing[at])
                self.fence(*fencing[at])
            else:
                self.be_gone(self.ending.pop(at))
        elif self.scheduler.next_deadline() is not None:
            self.expire()
        self.schedule()
        self.ended += self.scheduler.drain_finished()
        return any(lists) or self.scheduler.next_deadline() is not None

    def _readable(self) -> list[Report]:
        """Reports that may be read next: those of one lane's steps come in order."""
        steps: set[tuple[str, int]] = set()
        readable = []
        for report in self.reports:
            if isinstance(report, (StepDone, StepFailed)):
                if (report.node, report.lane) in steps:
                    continue
                steps.add((report.node, report.lane))
            readable.append(report)
        return readable

    def run(self, limit: int = 20000) -> None:
        """Until nothing is left to do, which must come."""
        self.schedule()
        for _ in range(limit):
            if not self.step():
                assert not self.scheduler.has_work, "stuck"
                return
        raise AssertionError("no end in sight")

    def deliver(self, report: Report) -> None:
        scheduler = self.scheduler
        if report.node in self.dead:
            return
        if isinstance(report, TransferDone):
            scheduler.on_transfer_done(report, self.now)
        elif isinstance(report, StepFailed):
            scheduler.on_step_failed(report, self.now)
            if not scheduler._state.nodes[report.node].lanes[report.lane].flights:
                self.nodes[report.node].broken.pop(report.lane, None)
        elif isinstance(report, Alive):
            scheduler.on_alive(report)
        elif isinstance(report, Fenced):
            scheduler.on_fenced(report)
            scheduler.on_fenced(report)  # counts once
        else:
            self.hear(scheduler.on_step_done(report, self.now))
            assert scheduler.on_step_done(report, self.now) == [], "a report counted twice"
        scheduler.check_integrity()

    def hear(self, events: list[TokenEvent]) -> None:
        for event in events:
            self.said[event.request.number].append(event.token)
            assert event.finished == event.request.finished

    def kill(self, name: str) -> None:
        self.dead.add(name)
        for plan in self.nodes[name].busy.values() if self.nodes[name].role == "prefill" else ():
            self._delay(self.nodes[name], plan, set(self.nodes) - self.dead)
        self.hung.pop(name, None)
        self._forget(name)
        self.scheduler.on_node_died(name, "killed", self.now)
        self.scheduler.check_integrity()

    def _forget(self, name: str) -> None:
        self.dead.add(name)
        self.late = [item for item in self.late if item[1] != name]
        self.fencing = [item for item in self.fencing if item[0] != name]
        self.computing = [item for item in self.computing if item[0] != name]

    def hang(self, name: str) -> None:
        """It stands still. What it has begun to put may land at any time."""
        self.hung[name] = []
        if self.nodes[name].role == "prefill":
            for plan in self.nodes[name].busy.values():
                self._delay(self.nodes[name], plan, set(self.nodes) - self.dead)

    def wake(self, name: str) -> None:
        """It goes on; so do its puts, in order."""
        self.late = [item for item in self.late if item[0] != name]
        for message in self.hung.pop(name):
            self._receive(self.nodes[name], message)

    def expire(self) -> None:
        """The next deadline passes. Nodes that are found to be hung are ended."""
        self.schedule()
        for answer in [one for one in self.reports if isinstance(one, Alive)]:
            self.reports.remove(answer)  # nodes that run have had the time
            self.deliver(answer)
        self.now = max(self.now, self.scheduler.next_deadline() or 0.0)
        for one in self.scheduler.expire(self.now):
            assert one.name in self.hung or "it answers" in one.reason
            assert one.name not in self.dead
            self.hung.pop(one.name, None)
            self.num_ended += 1
            self.ending.append(one.name)
            self._forget(one.name)
            self.scheduler.on_node_died(one.name, one.reason, self.now, gone=False)
            self.scheduler.check_integrity()
        self.scheduler.check_integrity()

    def be_gone(self, name: str) -> None:
        """Nothing of a node that was ended runs any more."""
        self.scheduler.on_node_died(name, "killed", self.now)
        self.scheduler.check_integrity()

    def fail_step(
        self, name: str, lane: int, error: str = "broken", cut: tuple[str, ...] = ()
    ) -> None:
        """A step that was computing fails after it wrote some of what it had to. What it put to
        the nodes that it is ``cut`` from may still arrive."""
        self.computing.remove((name, lane))
        plan, _ = self._take(self.nodes[name], lane)
        self.nodes[name].broken[lane] = set(plan.rows)
        self._delay(self.nodes[name], plan, set(cut) - self.dead)
        self.reports.append(StepFailed(name, lane, plan.step, error, list(cut), list(cut)))

    def _delay(self, node: FakeNode, plan: StepPlan, receivers: set[str]) -> None:
        """The puts of a step that will not end well are under way."""
        for number, start, count in zip(plan.rows, plan.starts, plan.counts, strict=True):
            push = node.known[number].join.push
            if push is None or push.node not in receivers:
                continue
            theirs = self._size(self.nodes[push.node])
            for position in range(max(start, push.start), start + count):
                place = push.blocks[position // theirs], position % theirs
                self.late.append((node.name, push.node, *place))

    def land(self, writer: str, receiver: str, block: int, offset: int) -> None:
        """Bytes of a put that failed arrive after all."""
        assert self._pool(receiver).pool.refs(block) == 1, "late bytes of a put in a free block"
        self.nodes[receiver].pool[block, offset] = -1

    def fence(self, name: str, fence: Fence) -> None:
        self.late = [item for item in self.late if item[:2] != (fence.writer, name)]
        self.reports.append(Fenced(name, fence.number))

    # Checks at the end

    def check_end(self) -> None:
        assert sorted(r.number for r in self.ended) == sorted(self.requests), "each once"
        for number, request in self.requests.items():
            count = len(request.output_token_ids)
            truth = self.truth[number]
            first = request.num_prompt
            assert request.finished
            assert request.output_token_ids == [truth.token(first + i) for i in range(count)]
            assert self.said[number] == request.output_token_ids
            assert len(request.token_times) == count
            if request.state is RequestState.FINISHED and request.finish_reason == "length":
                assert count == request.sampling.max_tokens
        for name, free in self.scheduler.free_blocks().items():
            assert free == self._pool(name).num_blocks, f"{name} kept blocks"
        assert not self.scheduler.has_work

    # What nodes do

    def _receive(self, node: FakeNode, message: Message) -> None:
        if node.name in self.hung:
            self.hung[node.name].append(message)
        elif isinstance(message, StepPlan):
            self._read_plan(node, message)
        elif isinstance(message, Probe):
            self.reports.append(Alive(node.name, message.number))
        elif isinstance(message, AttentionPlan):
            self._read_attention_plan(node, message)
        elif isinstance(message, ExpectTransfer):
            assert message.transfer not in node.expects
            assert message.blocks
            node.expects[message.transfer] = message
            node.arrived[message.transfer] = set()
        elif isinstance(message, NodeGone):
            assert message.name != node.name
        elif isinstance(message, Fence):
            assert self.nodes[message.writer].role == "prefill"
            assert message.writer not in self.ending, "it may still write after the fence"
            self.fencing.append((node.name, message))
        else:
            assert isinstance(message, CancelTransfer)
            node.expects.pop(message.transfer, None)

    def _read_plan(self, node: FakeNode, plan: StepPlan) -> None:
        assert plan.rows
        assert len(set(plan.rows)) == len(plan.rows)
        self._check_flights(node, plan)
        for number in plan.leaves:
            del node.known[number]
        for join in plan.joins:
            assert join.request not in node.known, "joined twice"
            assert join.request in plan.rows
            shaping = join.sampling.shaping
            assert len(join.before) == (join.start if shaping is not None else 0)
            known = join.before + join.tokens
            truth = self.truth[join.request]
            assert known == [
                truth.token(join.start * (shaping is None) + i) for i in range(len(known))
            ]
            once = node.name, join.request, join.incarnation
            assert once not in self.joined, "an incarnation joined twice"
            self.joined.add(once)
            skip = join.push.start if join.push else 0
            node.known[join.request] = Known(join, list(join.tokens), list(join.blocks), skip)
        for number, blocks in plan.blocks:
            assert blocks
            node.known[number].blocks += blocks
        self._check_shape(node, plan)
        flights = self.scheduler._state.nodes[node.name].lanes[plan.lane].flights
        self.num_ahead += flights[0].step != plan.step
        (node.behind if plan.lane in node.busy else node.busy)[plan.lane] = plan
        self.computing.append((node.name, plan.lane))

    def _check_flights(self, node: FakeNode, plan: StepPlan) -> None:
        """A lane has two steps at most, of which the second goes on where the first ends."""
        assert plan.lane not in node.behind, "the lane has two steps in flight"
        first = node.busy.get(plan.lane)
        assert first is None or (self._goes_ahead(node) and plan.step == first.step + 1)
        ends = {}
        if first is not None:
            for number, start, count in zip(first.rows, first.starts, first.counts, strict=True):
                ends[number] = start + count
        steps = [*node.busy.values(), *node.behind.values()]
        flying = {number for other in steps for number in other.rows}
        assert not flying & set(plan.leaves), "a request that leaves is in flight"
        assert not (flying - ends.keys()) & set(plan.rows), "a row is in flight"
        for number, start in zip(plan.rows, plan.starts, strict=True):
            assert ends.get(number, start) == start
            if number in ends:
                assert not needs_host(self.requests[number]), "its next token needs the host"

    def _goes_ahead(self, node: FakeNode) -> bool:
        return bool(self.config.async_scheduling) and node.role in ("colocated", "decode")

    def _check_shape(self, node: FakeNode, plan: StepPlan) -> None:
        size, budget = self._size(node), self.config.max_num_batched_tokens
        for number, start, count, samples in zip(
            plan.rows, plan.starts, plan.counts, plan.samples, strict=True
        ):
            assert count >= 1
            assert samples or (start + count) % size == 0, "a chunk ends inside a block"
            if not self.config.enable_chunked_prefill:
                assert samples
            if node.role in ("dense", "decode"):
                assert count == 1
            assert node.known[number].join.incarnation == self.requests[number].incarnation
        assert sum(plan.counts) <= budget or len(plan.rows) == 1, "over the budget"
        homes = [node.known[number].join.home for number in plan.rows]
        changes = sum(a != b for a, b in itertools.pairwise(homes))
        assert changes == len(set(homes)) - 1, "rows of one home are not adjacent"

    def _read_attention_plan(self, node: FakeNode, plan: AttentionPlan) -> None:
        for number in plan.leaves:
            del node.tables[number]
        for join in plan.joins:
            assert join.request not in node.tables, "joined twice"
            node.tables[join.request] = list(join.blocks)
        for number, blocks in plan.blocks:
            assert blocks
            node.tables[number] += blocks
        node.attention[plan.source, plan.lane, plan.step] = plan

    def compute(self, name: str, lane: int) -> None:
        """Does a step at once, as late as it can be done."""
        node = self.nodes[name]
        plan, broken = self._take(node, lane)
        if self._cannot(node, plan, broken):
            node.broken[lane] = set(plan.rows)
            self.reports.append(StepFailed(name, lane, plan.step, "a token is not known"))
            return
        gone = {node.known[number].join.home for number in plan.rows} & self.dead
        if gone:  # none of its rows advances
            self.reports.append(StepFailed(name, lane, plan.step, "gone", sorted(gone)))
            return
        tokens: list[int] = []
        for row, number in enumerate(plan.rows):
            if number in broken:
                self._compute_garbage(node, plan, row, tokens)
            else:
                self._compute_row(node, plan, row, number, tokens)
        if node.role == "dense":
            self._check_attention_rows(node, plan)
        self.reports.append(StepDone(name, lane, plan.step, tokens, StepStats()))

    def _take(self, node: FakeNode, lane: int) -> tuple[StepPlan, set[int]]:
        """A lane's oldest step, and its rows that go on from a step that failed."""
        plan = node.busy.pop(lane)
        broken = node.broken.pop(lane, set()) if self._goes_ahead(node) else set()
        if lane in node.behind:
            node.busy[lane] = node.behind.pop(lane)
        return plan, broken

    def _cannot(self, node: FakeNode, plan: StepPlan, broken: set[int]) -> bool:
        """It lacks tokens that a step before it, which failed, would have sampled."""
        for number, start, count in zip(plan.rows, plan.starts, plan.counts, strict=True):
            known = node.known[number]
            if number in broken and start + count - known.join.start > len(known.tokens):
                return True
        return False

    def _compute_garbage(self, node: FakeNode, plan: StepPlan, row: int, tokens: list[int]) -> None:
        """The row's cache is incomplete: nobody may make use of what comes of it."""
        known, size = node.known[plan.rows[row]], self._size(node)
        for position in range(plan.starts[row], plan.starts[row] + plan.counts[row]):
            block = known.blocks[position // size]
            assert self._pool(node.name).pool.refs(block) == 1, "writes to a free or shared block"
            node.pool[block, position % size] = -1
        if plan.samples[row]:
            known.tokens.append(1)
            tokens.append(1)

    def _compute_row(
        self, node: FakeNode, plan: StepPlan, row: int, number: int, tokens: list[int]
    ) -> None:
        known, truth = node.known[number], self.truth[number]
        start, count = plan.starts[row], plan.counts[row]
        at = start - known.join.start
        given = known.tokens[at : at + count]
        assert at >= 0
        assert given == [truth.token(start + i) for i in range(count)], "wrong tokens"
        home, blocks = node, known.blocks
        if node.role == "dense":
            home = self.nodes[known.join.home]
            blocks = home.tables[number]
        self._write(home, number, blocks, start, count)
        self._attend(home, number, blocks, start + count)
        if known.join.push is not None:
            self._push(node, known, start + count, plan.samples[row])
        if plan.samples[row]:
            known.tokens.append(next_token(truth.digest(start + count - 1)))
            tokens.append(known.tokens[-1])

    def _write(
        self, node: FakeNode, number: int, blocks: list[int], start: int, count: int
    ) -> None:
        size = self._size(node)
        for position in range(start, start + count):
            block = blocks[position // size]
            assert self._pool(node.name).pool.refs(block) == 1, "writes to a free or shared block"
            node.pool[block, position % size] = self.truth[number].digest(position)

    def _attend(self, node: FakeNode, number: int, blocks: list[int], length: int) -> None:
        size, truth = self._size(node), self.truth[number]
        held = self._pool(node.name).table(number)
        assert blocks == held[: len(blocks)], "the node's table is not the scheduler's"
        for position in range(length):
            slot = blocks[position // size], position % size
            assert node.pool.get(slot) == truth.digest(position), f"{node.name} lost {position}"

    def _push(self, node: FakeNode, known: Known, end: int, last: bool) -> None:
        push, size = known.join.push, self._size(node)
        assert push is not None
        receiver = self.nodes[push.node]
        if receiver.name in self.dead:
            return
        theirs = self._size(receiver)
        assert push.start == push.skip * theirs
        # Whole blocks of the sender's; the tokens before the start are not the receiver's to take.
        until = end if last else end // size * size
        for position in range(max(known.pushed, push.start), until):
            block = push.blocks[position // theirs]
            assert self._pool(receiver.name).pool.refs(block) == 1, "put into a free block"
            value = node.pool[known.blocks[position // size], position % size]
            receiver.pool[block, position % theirs] = value
            self._arrive(receiver, push.transfer, known.join, position)
        known.pushed = max(known.pushed, until)

    def _arrive(self, receiver: FakeNode, slot: int, join: Join, position: int) -> None:
        expect = receiver.expects[slot]
        assert (expect.request, expect.incarnation) == (join.request, join.incarnation)
        assert expect.start <= position < expect.start + expect.count
        assert len(expect.blocks) == -(-expect.count // self._size(receiver))
        assert position not in receiver.arrived[slot]
        receiver.arrived[slot].add(position)
        if len(receiver.arrived[slot]) == expect.count:
            del receiver.expects[slot]
            done = TransferDone(receiver.name, slot, expect.request, expect.incarnation, 1)
            self.reports.append(done)

    def _check_attention_rows(self, node: FakeNode, plan: StepPlan) -> None:
        rows = list(zip(plan.rows, plan.starts, strict=True))
        for home in {node.known[number].join.home for number in plan.rows}:
            seen = self.nodes[home].attention.pop((node.name, plan.lane, plan.step))
            mine = [(n, s + 1) for n, s in rows if node.known[n].join.home == home]
            assert list(zip(seen.rows, seen.lengths, strict=True)) == mine

    def _size(self, node: FakeNode) -> int:
        pool = self.scheduler._state.nodes[node.name].pool
        return pool.block_size if pool is not None else self.cache.block_size

    def _pool(self, name: str):  # type: ignore[no-untyped-def]
        return self.scheduler._state.nodes[name].cache()
