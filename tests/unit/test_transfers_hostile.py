"""Over a wire that loses, doubles, delays and corrupts, a cache is decodable only if it is right.

The real senders write to a tape; the tape is played to a real receiver with faults. Order within
one sender's tape is kept, as every wire promises; between senders and scheduler it is not.
"""

import random

import hypothesis
import msgspec
import numpy as np
import pytest
from hypothesis import strategies as st

from cloverinfer.kvcache.checksum import BlockSums
from cloverinfer.kvcache.convert import block_views
from cloverinfer.kvcache.layout import CANONICAL_LAYOUT, KVSpec, PoolLayout, blocks_for
from cloverinfer.nodes.copies import NOW
from cloverinfer.nodes.pushes import KVPusher, plan_push
from cloverinfer.nodes.rows import Row
from cloverinfer.nodes.source import PoolSource
from cloverinfer.nodes.staged_push import StagedPusher
from cloverinfer.nodes.staging import Staging, is_staged
from cloverinfer.nodes.stores import HostStore
from cloverinfer.nodes.transfers import TransferReceiver
from cloverinfer.transport.base import Peer, Ranges, Region, RegionRef, Ticket
from cloverinfer.wire.messages import (
    CancelTransfer,
    ExpectTransfer,
    KVCredit,
    PeerInfo,
    Push,
    Sampling,
    StagingGrant,
    decode,
)
from cloverinfer.wire.notices import KVNotice, unpack

LAYERS, TOKENS, SLOT = 2, 21, 5
SPEC = KVSpec(kv_heads=2, k_dim=4, v_dim=4, dtype="float32", scale=1.0)
HOME = PoolLayout((SPEC,) * LAYERS, 8, 12)
MODES = {"direct": (1, 8, 2), "staged": (1, 4, 2), "parts": (2, 16, 1)}
"""Senders, their block size, KV heads of each."""


class Put:
    """The bytes of a put, as they were when it was made, and its notice."""

    def __init__(self, ranges, index, notice):
        source, length = ranges.local.region.buffer, ranges.local.length
        self.notice = unpack(notice)
        self.region = ranges.remote.region.name
        self.offsets = [int(ranges.remote.offsets[i]) for i in index[:, 1]]
        starts = [int(ranges.local.offsets[i]) for i in index[:, 0]]
        self.pieces = [bytes(source[at : at + length]) for at in starts]


class Tape:
    """An endpoint that writes down what it is asked."""

    def __init__(self):
        self.events = []

    def prepare(self, peer, local, remote):
        return Ranges(peer, local, remote)

    def put(self, ranges, index, notice, after=None):
        self.events.append(Put(ranges, index, notice))
        return Ticket(done=True)

    def send(self, peer, message):
        self.events.append(decode(message))


class Sender:
    """A prefill node's sending half, with a pool of random values."""

    def __init__(self, index, mode, checksum, home, rng):
        _, size, heads = MODES[mode]
        spec = msgspec.structs.replace(SPEC, kv_heads=heads)
        self.layout = PoolLayout((spec,) * LAYERS, size, 40)
        self.first_head = index * heads
        self.memory = bytearray(rng.randbytes(self.layout.total_bytes))
        floats = np.frombuffer(self.memory, np.float32)
        floats[:] = np.random.default_rng(rng.randrange(1000)).standard_normal(floats.size)
        self.tape = Tape()
        self.name = f"prefill-{index}"
        self.info = PeerInfo(self.name, "prefill", self.name, {}, self.layout, CANONICAL_LAYOUT,
                             "m", "1", "float32", self.first_head)  # fmt: skip
        region = Region(RegionRef(self.name, "own", len(self.memory)), memoryview(self.memory))
        self.staged = is_staged(self.info, home)
        kind = StagedPusher if self.staged else KVPusher
        source = PoolSource(region, self.layout)
        self.pusher = kind(self.tape, Peer("home"), home, source, self.layout, checksum)

    def push(self, push, incarnation, local, cut=None):
        """A request's whole transfer in three chunks, the layers of the last up to ``cut``."""
        size = self.layout.block_size
        row = Row(7, incarnation, [], 0, Sampling(0.0, 0, 1.0, 0), "", push, push.start // size)
        for end, final in ((9, False), (16, False), (TOKENS, True)):
            for job in plan_push(row, local, end, final, size, self.pusher):
                self.pusher.announce(job)
                for layer in range(LAYERS if not final or cut is None else cut):
                    self.pusher.put_layer(job, layer, NOW, lambda ticket, nbytes: None)

    def token(self, layer, local, position):
        """Keys ``[heads, d]`` and values of one token."""
        size, at = self.layout.block_size, self.layout.layer_offsets[layer]
        nbytes = self.layout.layer_block_bytes(layer)
        memory = np.frombuffer(self.memory, np.uint8)[at : at + nbytes * self.layout.num_blocks]
        views = block_views(memory.reshape(-1, nbytes), self.layout.specs[layer], size)
        return [view[local[position // size], :, position % size] for view in views]


class Home:
    """A receiver with a pool, as an attention node has it."""

    def __init__(self, checksum):
        self.memory = np.zeros(HOME.total_bytes, np.uint8)
        self.regions = {"kv": memoryview(self.memory)}
        ref = RegionRef("home", "kv", HOME.total_bytes)
        self.info = PeerInfo("home", "attention", "home", {"kv": ref}, HOME, CANONICAL_LAYOUT, "m",
                             "1", "float32")  # fmt: skip
        self.senders = {}
        self.reports = []
        self.came = {}
        """Notices that came with their bytes, by sender and layer."""
        store = HostStore(HOME, self.regions["kv"])
        self.staging = Staging(HOME, self.register, self.send, store)
        sums = BlockSums(HOME, self.regions["kv"]) if checksum else None
        self.receiver = TransferReceiver("home", HOME, self.report, self.staging, sums)
        self.on_report = lambda done: None

    def register(self, nbytes):
        name = f"ring-{len(self.regions)}"
        self.regions[name] = memoryview(bytearray(nbytes))
        return Region(RegionRef("home", name, nbytes), self.regions[name])

    def send(self, name, message):
        pusher = self.senders[name].pusher
        if isinstance(message, StagingGrant):
            pusher.grant(message)
        elif isinstance(message, KVCredit):
            pusher.credit(message.slots)

    def report(self, done):
        self.reports.append(done)
        self.on_report(done)

    def play(self, source, event):
        if isinstance(event, Put):
            for offset, piece in zip(event.offsets, event.pieces, strict=True):
                self.regions[event.region][offset : offset + len(piece)] = piece
            self.came.setdefault((source, event.notice.layer), []).append(event.notice)
            self.receiver.notice(source, event.notice)
        elif isinstance(event, KVNotice):
            self.receiver.notice(source, event)
        else:
            assert self.receiver.handle(source, event)

    def token(self, layer, blocks, position, start):
        at, nbytes = HOME.layer_offsets[layer], HOME.layer_block_bytes(layer)
        memory = self.memory[at : at + nbytes * HOME.num_blocks].reshape(-1, nbytes)
        rel = position - start
        views = block_views(memory, HOME.specs[layer], HOME.block_size)
        return [view[blocks[rel // 8], :, rel % 8] for view in views]


class World:
    """One request whose first incarnation was given up in the middle, and whose second follows."""

    def __init__(self, mode, checksum, seed):
        self.rng = rng = random.Random(seed)
        self.home = Home(checksum)
        self.start = rng.choice((0, 8, 16))
        count = MODES[mode][0]
        for i in range(count):
            sender = Sender(i, mode, checksum, self.home.info, rng)
            self.home.senders[sender.name] = sender
        senders = list(self.home.senders.values())
        staged = [sender.info for sender in senders if sender.staged]
        assert bool(staged) == (mode != "direct")
        self.home.staging.meet([sender.info for sender in senders], staged, 1 << 20)
        held = self.start // 8
        self.blocks = rng.sample(range(12), 2 * blocks_for(TOKENS, 8))
        self.tables = [self.blocks[::2], self.blocks[1::2]]
        self.local = np.array(rng.sample(range(40), 24), np.int32)
        names = [sender.name for sender in senders]
        self.expects = []
        for incarnation, table in enumerate(self.tables):
            for sender in senders:
                push = Push("home", SLOT + incarnation, table, held, self.start)
                sender.push(push, incarnation, self.locals(sender, incarnation),
                            cut=1 if incarnation == 0 else None)  # fmt: skip
            self.expects.append(
                ExpectTransfer(
                    SLOT + incarnation,
                    7,
                    incarnation,
                    names[0],
                    table[held:],
                    self.start,
                    TOKENS - self.start,
                    names[1:],
                )
            )
        self.home.on_report = self.check
        self.wrong = 0

    def locals(self, sender, incarnation):
        return self.local[12 * incarnation :][: blocks_for(TOKENS, sender.layout.block_size)]

    def check(self, done):
        """Whatever is reported whole is the sender's, token for token."""
        if done.error:
            return
        expect = self.expects[done.incarnation]
        for layer in range(LAYERS):
            for position in range(self.start, TOKENS):
                found = self.home.token(layer, expect.blocks, position, self.start)
                for sender in self.home.senders.values():
                    sent = sender.token(layer, self.locals(sender, done.incarnation), position)
                    heads = slice(sender.first_head, sender.first_head + len(sent[0]))
                    for mine, theirs in zip(found, sent, strict=True):
                        assert np.array_equal(mine[heads], theirs), (layer, position)

    def run(self, faults, corrupt):
        """Plays all tapes, interleaved with the scheduler's messages, with so many faults."""
        first, second = self.expects
        tapes = {name: list(s.tape.events) for name, s in self.home.senders.items()}
        tapes["scheduler"] = [first, CancelTransfer(SLOT), second]
        bad = set(self.rng.sample(range(60), faults))
        played = 0
        while any(tapes.values()):
            source = self.rng.choice([name for name, tape in tapes.items() if tape])
            event = tapes[source].pop(0)
            if source == "scheduler" or played not in bad:
                self.home.play(source, event)
            else:
                self.harm(source, event, corrupt)
            played += source != "scheduler"

    def harm(self, source, event, corrupt):
        kinds = ("drop", "double", "foreign", "stale", *(["corrupt"] if corrupt else []))
        kind = self.rng.choice(kinds)
        if kind == "double":
            self.home.play(source, event)
            again = event.notice if isinstance(event, Put) else event
            self.home.play(source, again)
        elif kind == "stale" and isinstance(event, Put):
            # Lost, and one that came long ago comes again in its place.
            came = self.home.came.get((source, event.notice.layer))
            if came:
                self.home.play(source, self.rng.choice(came))
        elif kind == "foreign":
            self.home.play("prefill-9", event.notice if isinstance(event, Put) else event)
        elif kind == "corrupt" and isinstance(event, Put):
            at = self.rng.randrange(len(event.pieces))
            piece = bytearray(event.pieces[at])
            piece[self.rng.randrange(len(piece))] ^= 1 << self.rng.randrange(8)
            event.pieces[at] = bytes(piece)
            self.home.play(source, event)


def whole(world):
    return [done.incarnation for done in world.home.reports if not done.error]


@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_without_faults_the_second_incarnation_is_whole_once(mode, checksum):
    for seed in range(25):
        world = World(mode, checksum, seed)
        world.run(0, False)
        assert whole(world) == [1], seed
        assert len(world.home.receiver) == 0
        for sender in world.home.senders.values():
            assert not getattr(sender.pusher, "_taken", ()), "slots were not given back"


@pytest.mark.parametrize("mode", MODES)
@hypothesis.given(seed=st.integers(0, 1 << 30), faults=st.integers(1, 4))
@hypothesis.settings(max_examples=150, deadline=None)
def test_with_faults_nothing_wrong_is_whole(mode, seed, faults):
    world = World(mode, True, seed)
    world.run(faults, corrupt=True)
    assert len(set(whole(world))) == len(whole(world)) <= 1


@pytest.mark.parametrize("mode", MODES)
@hypothesis.given(seed=st.integers(0, 1 << 30), faults=st.integers(1, 4))
@hypothesis.settings(max_examples=100, deadline=None)
def test_losses_and_doubles_need_no_checksum_to_be_seen(mode, seed, faults):
    world = World(mode, False, seed)
    world.run(faults, corrupt=False)
    assert len(set(whole(world))) == len(whole(world)) <= 1


def test_senders_without_all_the_heads_are_an_error():
    world = World("parts", False, 0)
    expect = world.expects[1]
    expect.others.clear()
    world.home.play("scheduler", expect)
    (done,) = world.home.reports
    assert done.error == "the senders have KV heads 0..0 and not each of 2 once"


def test_garbage_pieces_are_dropped():
    world = World("staged", False, 0)
    tape = world.home.senders["prefill-0"].tape.events
    piece = next(event for event in tape if hasattr(event, "slots"))
    for wrong in ({"slots": [10**6]}, {"slots": []}, {"layer": 9}, {"skip": 50}, {"count": 0}):
        world.home.play("prefill-0", msgspec.structs.replace(piece, **wrong))
    assert not world.home.staging._rings["prefill-0"].announced
