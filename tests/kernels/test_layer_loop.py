"""The layer loop against stages and attention called one by one; waits that end, order held."""

import threading

import numpy as np
import pytest
import torch
from tests.tiny_models import make_tiny

from cloverinfer import ModelConfig, _native
from cloverinfer.attention.cpu import CpuAttention
from cloverinfer.kvcache.layout import PoolLayout
from cloverinfer.models import load_half, resolve_model
from cloverinfer.nodes.answers import Answers, Hops
from cloverinfer.nodes.gate import OpenGate
from cloverinfer.nodes.hop import HopBuffer, HopRows, HopShape
from cloverinfer.nodes.hop_loop import HopLoops, Way
from cloverinfer.nodes.layer_loop import attention_rows
from cloverinfer.nodes.rows import Batch
from cloverinfer.transport import Slices, create_endpoint
from cloverinfer.wire.notices import pack_hop

DONE, EVENTS = _native.LoopOutcome.DONE, _native.LoopOutcome.EVENTS
TIMEOUT, HAND_OVER = _native.LoopOutcome.TIMEOUT, _native.LoopOutcome.HAND_OVER
BLOCK, LENGTHS = 16, (1, 5, 17)
LANE, STEP = 2, 77

pytestmark = pytest.mark.skipif(
    _native.dense_isas() == ["portable"], reason="no native stages without vectors"
)


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    path = make_tiny("llama", tmp_path_factory.mktemp("m"), num_hidden_layers=4)
    return load_half(resolve_model(ModelConfig(model_path=str(path), dtype="bfloat16")))


class Pool:
    """A backend with some cache, and the step of one token per row that follows."""

    def __init__(self, half, lengths=LENGTHS):
        self.layout = PoolLayout(half.specs, BLOCK, 8)
        self.backend = CpuAttention(2)
        self.backend.allocate(self.layout, half.arch.num_heads)
        generator = torch.Generator().manual_seed(1)
        data = torch.randn(self.layout.total_bytes // 2, generator=generator).bfloat16()
        self.backend.import_blocks(list(range(8)), data.view(torch.uint8))
        self.tables = torch.tensor([[0, 1], [2, 3], [4, 5]], dtype=torch.int32)
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        at = [length - 1 for length in lengths]
        slots = [int(self.tables[i, p // BLOCK]) * BLOCK + p % BLOCK for i, p in enumerate(at)]
        self.slots = torch.tensor(slots)
        self.starts = torch.arange(len(lengths) + 1, dtype=torch.int32)

    def rows(self):
        return attention_rows(self.starts, self.tables, self.lengths, self.slots)

    def attend(self, layer, q, k, v):
        self.backend.append(layer, k, v, self.slots)
        return self.backend.attend(layer, q, self.starts, self.tables, self.lengths)[0]


def batch_of(lengths=LENGTHS):
    count = len(lengths)
    return Batch(
        rows=[None] * count,
        token_ids_t=torch.tensor([3, 7, 11]),
        positions_t=torch.tensor(lengths) - 1,
        query_starts=torch.arange(count + 1, dtype=torch.int32),
        most=1,
        lengths_r=torch.tensor(lengths, dtype=torch.int32),
        block_tables_rb=None,
        slots_t=None,
        sample_tokens=torch.arange(count),
        sampled=[],
        sample_positions=[],
        all_sample=True,
        scored=[],
        special=False,
    )


def layer_by_layer(half, batch=None):
    """Attention's output and hidden rows after all layers."""
    pool, batch = Pool(half), batch or batch_of()
    out = carry = None
    for layer in range(half.num_layers):
        q, k, v, carry = half.stage(layer, out, carry, batch.token_ids_t, batch.positions_t)
        out = pool.attend(layer, q, k, v)
    return out, carry[0]


class Part:
    """A segment as the dense node describes it."""

    def __init__(self, home, first, count, back):
        self.home, self.first, self.count, self.back = home, first, count, back


class Ends:
    """A dense and an attention end over one wire, with their hop buffers."""

    def __init__(self, half, transport):
        shape = self.shape = HopShape(half.specs, half.arch.num_heads, half.dtype)
        self.dense, self.attention = (create_endpoint(transport, n) for n in ("d", "a"))
        self.there, self.back = shape.row_bytes(False), shape.row_bytes(True)
        self.home_buffer = HopBuffer(shape, True, 1, 1, 3)
        self.told_after = self.home_buffer.told_after(0, 0)
        self.out = self.dense.register(3 * self.there)
        self.home = self.dense.register(self.home_buffer.nbytes)
        self.into = self.attention.register(3 * self.there)
        self.result = self.attention.register(3 * self.back)
        self.to_attention = self.dense.connect(self.attention.address())
        self.to_dense = self.attention.connect(self.dense.address())
        for end in (self.dense, self.attention):
            end.poll(0.05)  # maps the rings
        self.ranges = self._prepare(self.dense, self.to_attention, self.out, self.into, self.there)
        self.answers_go = self._prepare(
            self.attention, self.to_dense, self.result, self.home, self.back
        )

    def _prepare(self, end, peer, local, remote, size):
        offsets = np.arange(3, dtype=np.int64) * size
        return end.prepare(peer, Slices(local, offsets, size), Slices(remote.ref, offsets, size))

    def rows(self, region):
        width = self.back if region in (self.home, self.result) else self.there
        flat = torch.frombuffer(region.buffer, dtype=torch.uint8)[: 3 * width]
        return HopRows(self.shape, flat.view(self.shape.dtype).view(3, -1))

    def loops(self, half):
        return HopLoops.of(half, self.shape, self.dense, 0, OpenGate())

    def ways(self):
        return [(Part("a", 0, 3, self.rows(self.home)), Way(self.to_attention, self.ranges))]

    def loop(self, half):
        ways = self.ways()
        return self.loops(half).begin(batch_of(), self.rows(self.out), (LANE, STEP), ways)

    def result_address(self):
        return self.rows(self.result).output(0).data_ptr()

    def answers(self, pool):
        return Answers.of(pool.backend, self.shape, self.attention, OpenGate())

    def close(self):
        self.dense.close()
        self.attention.close()


@pytest.fixture
def ends(half):
    made = []

    def make(transport):
        made.append(Ends(half, transport))
        return made[-1]

    yield make
    for one in made:
        one.close()


HOPS = Hops(0, pack_hop(LANE, STEP, 0))


def check_whole(half, loop, batch):
    out, hidden = layer_by_layer(half, batch)
    assert loop.layer == half.num_layers - 1
    assert torch.equal(loop.attended_the, out)
    assert torch.equal(loop.carry()[0], hidden)


def test_near_hops_give_the_same_bits_in_this_step_and_the_next(half, ends):
    both, pool, batch = ends("inproc"), Pool(half), batch_of()
    answers, loops, ways = both.answers(pool), both.loops(half), both.ways()
    there, into = both.rows(both.out), both.rows(both.into).qkv(0)
    answers.begin(HOPS, pool.rows(), into, both.result_address())
    loop = loops.begin(batch, there, (LANE, STEP), ways)
    assert loop.run(5.0) == DONE
    check_whole(half, loop, batch)
    layers, seconds = answers.end(HOPS)
    assert layers == half.num_layers
    assert loop.near_seconds()[0] >= seconds > 0

    # Of the same rows: other tokens elsewhere, in the same memory.
    batch.token_ids_t += 1
    batch.positions_t += 2
    next_hops = Hops(0, pack_hop(LANE, STEP + 1, 0))
    answers.begin(next_hops, pool.rows(), into, both.result_address())
    again = loops.begin(batch, there, (LANE, STEP + 1), ways)
    assert again is loop
    assert loop.run(5.0) == DONE
    check_whole(half, loop, batch)
    assert answers.end(next_hops)[0] == half.num_layers

    other = loops.begin(batch_of(), there, (LANE, STEP + 2), ways)
    assert other is not loop
    assert (other.run(0.05), other.layer) == (HAND_OVER, 0)


def test_positions_past_those_that_were_prepared_for_are_refused(half, ends):
    both, batch = ends("inproc"), batch_of()
    both.answers(Pool(half))
    loop = both.loops(half).begin(batch, both.rows(both.out), (LANE, STEP), both.ways())
    batch.positions_t[1] = half.arch.max_position
    with pytest.raises(ValueError, match="a position is past"):
        loop.run(5.0)


def test_a_plan_that_does_not_come_and_rows_that_cannot_be_are_the_nodes_own(half, ends):
    both, pool = ends("inproc"), Pool(half)
    answers = both.answers(pool)
    loop = both.loop(half)
    assert (loop.run(0.05), loop.layer) == (HAND_OVER, 0)
    pool.lengths[1] = 33  # past its block table
    answers.begin(HOPS, pool.rows(), both.rows(both.into).qkv(0), both.result_address())
    loop = both.loop(half)
    assert (loop.run(5.0), loop.layer) == (HAND_OVER, 0)
    pool.lengths[1] = LENGTHS[1]
    answers.close()
    loop = both.loop(half)
    assert (loop.run(0.05), loop.layer) == (HAND_OVER, 0)


def test_shm_hops_wait_no_longer_than_asked_and_keep_what_is_not_theirs(half, ends):
    both = ends("shm")
    loop = both.loop(half)
    assert loop.run(0.02) == TIMEOUT
    assert (loop.layer, loop.waiting()) == (0, {"a"})
    both.attention.put(both.answers_go, np.empty((0, 2), np.int32), pack_hop(LANE, STEP - 1, 0))
    both.attention.send(both.to_dense, b"one")
    both.attention.send(both.to_dense, b"two")
    assert loop.run(5.0) == EVENTS
    seen = both.dense.poll(5.0)
    assert [notice for _, notice in seen.notices] == [pack_hop(LANE, STEP - 1, 0)]
    assert [message for _, message in seen.messages] == [b"one", b"two"]
    assert loop.run(0.02) == TIMEOUT


def hand_over(both, pool, answers):
    """The step's hops to the attention end's loop."""
    first = both.attention.native().first_target(both.answers_go)
    answers.know(0, both.to_dense)
    into = both.rows(both.into).qkv(0)
    answers.begin(HOPS, pool.rows(), into, first, first + both.told_after)


def told(both):
    return both.home_buffer.take_told(both.home, 0, 0)


def test_shm_hops_give_the_same_bits_and_know_a_closed_peer(half, ends):
    """One thread plays both ends."""
    both, pool = ends("shm"), Pool(half)
    answers = both.answers(pool)
    hand_over(both, pool, answers)
    loop, layers = both.loop(half), half.num_layers
    for layer in range(layers):
        assert told(both) == (0, 0, 0.0)
        assert (loop.run(0.0), loop.layer) == (TIMEOUT, layer)
        answers.serve(0.0)
    assert loop.run(5.0) == DONE
    out, hidden = layer_by_layer(half)
    assert torch.equal(both.rows(both.home).output(0), out)
    assert torch.equal(loop.carry()[0], hidden)
    notice, count, seconds = told(both)
    assert (notice, count) == (HOPS.notice, layers)
    assert answers.end(HOPS) == (layers, seconds)
    assert told(both) == (0, 0, 0.0)
    both.attention.close()
    assert both.loop(half) is None


def test_no_python_runs_between_the_first_and_the_last_layer_over_shm(half, ends):
    """Each end is in one call that runs no Python, and neither has anything left to be polled."""
    both, pool = ends("shm"), Pool(half)
    answers = both.answers(pool)
    hand_over(both, pool, answers)
    loop, seen = both.loop(half), []
    serving = threading.Thread(target=lambda: seen.append(answers.serve(60.0)))
    serving.start()
    try:
        assert loop.run(60.0) == DONE
        assert not seen, "the attention end left its loop"
        assert loop.layer == half.num_layers - 1
        assert torch.equal(both.rows(both.home).output(0), layer_by_layer(half)[0])
        assert told(both)[1] == half.num_layers
        assert not both.dense.poll(0.0)
    finally:
        both.dense.send(both.to_attention, b"end")
        serving.join(60.0)
    left = both.attention.poll(0.0)
    assert not left.notices
    assert [message for _, message in left.messages] == [b"end"]


def test_a_hop_that_was_polled_is_answered_as_any_other(half, ends):
    """As one that came before its plan."""
    both, pool = ends("shm"), Pool(half)
    answers = both.answers(pool)
    loop = both.loop(half)
    assert loop.run(0.0) == TIMEOUT
    assert [notice for _, notice in both.attention.poll(5.0).notices] == [HOPS.notice]
    assert not answers.answer(HOPS, 0)
    hand_over(both, pool, answers)
    assert answers.answer(HOPS, 0)
    assert (loop.run(0.0), loop.layer) == (TIMEOUT, 1)
    answers.end(HOPS)
    assert not answers.answer(HOPS, 1)
