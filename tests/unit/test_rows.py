"""Plans become tensors; tables follow their differences."""

import msgspec
import numpy as np
import pytest
import torch

from cloverinfer.nodes.rows import FEW_ROWS, BlockTables, RowTable
from cloverinfer.wire.messages import Join, Sampling, StepPlan

GREEDY = Sampling(0.0, 0, 1.0, 0)


def plan(rows, starts, counts, samples, joins=(), leaves=(), blocks=()):
    return StepPlan(0, 0, rows, starts, counts, samples, list(joins), list(leaves), list(blocks))


def test_a_mixed_step_lays_out_chunks_and_decode_rows():
    table = RowTable(4, local_attention=True)
    joins = [
        Join(1, 0, [10], 5, [7, 2], GREEDY),
        Join(2, 0, [20, 21, 22, 23, 24], 0, [3, 9], GREEDY),
    ]
    step = plan([1, 2], [5, 0], [1, 4], [True, False], joins)
    table.apply(step)
    batch = table.batch(step)
    assert batch.token_ids_t.tolist() == [10, 20, 21, 22, 23]
    assert batch.positions_t.tolist() == [5, 0, 1, 2, 3]
    assert batch.query_starts.tolist() == [0, 1, 5]
    assert batch.lengths_r.tolist() == [6, 4]
    assert batch.slots_t.tolist() == [2 * 4 + 1, 12, 13, 14, 15]
    assert batch.sample_tokens.tolist() == [0]
    assert batch.sample_positions == [6]
    assert not batch.all_sample
    assert batch.slots_t.dtype == torch.int64
    assert batch.lengths_r.dtype == torch.int32


def test_blocks_grow_and_requests_leave():
    table = RowTable(4, local_attention=True)
    table.apply(plan([], [], [], [], [Join(1, 0, [10], 3, [0], GREEDY)]))
    step = plan([1], [4], [1], [True], blocks=[(1, [5])])
    table._rows[1].tokens.append(11)
    table.apply(step)
    assert table.batch(step).slots_t.tolist() == [20]
    table.apply(plan([], [], [], [], [Join(1, 1, [1, 2], 0, [8], GREEDY)], leaves=[1, 99]))
    again = plan([1], [0], [2], [True])
    assert table.batch(again).slots_t.tolist() == [32, 33]


def test_many_requests_with_long_tables():
    tables = BlockTables(16)
    rng = np.random.default_rng(3)
    kept = {}
    for request in range(100):
        blocks = rng.integers(0, 1000, rng.integers(1, 40)).tolist()
        tables.join(request, blocks)
        kept[request] = blocks
        if request % 3 == 0:
            tables.leave(request)
            del kept[request]
    for request, blocks in kept.items():
        assert tables.blocks(request).tolist() == blocks
    requests = list(kept)
    longest = max(len(b) for b in kept.values()) * 16
    gathered = tables.gather(requests, longest)
    for row, request in zip(gathered, requests, strict=True):
        assert row[: len(kept[request])].tolist() == kept[request]


def test_decode_steps_follow_their_tables():
    """Steps of a token a row, whose tensors are kept: rows come, grow, change places and leave."""
    table = RowTable(4, local_attention=True)
    joins = [Join(1, 0, [10], 3, [7], GREEDY), Join(2, 0, [20], 5, [2, 9], GREEDY)]
    table.apply(plan([], [], [], [], joins))

    def laid_out(step):
        table.apply(step)
        batch = table.batch(step)
        assert batch.most == 1
        assert batch.all_sample
        assert batch.query_starts.tolist() == list(range(len(step.rows) + 1))
        assert batch.lengths_r.tolist() == batch.sample_positions
        assert batch.sampled == [table._rows[request] for request in step.rows]
        return batch

    batch = laid_out(plan([1, 2], [3, 5], [1, 1], [True, True]))
    assert batch.token_ids_t.tolist() == [10, 20]
    assert batch.positions_t.tolist() == [3, 5]
    assert batch.lengths_r.tolist() == [4, 6]
    assert batch.slots_t.tolist() == [31, 37]
    assert (batch.slots_t.dtype, batch.lengths_r.dtype) == (torch.int64, torch.int32)
    for row, token in zip(batch.rows, (11, 21), strict=True):
        row.note(token, row.start + 1)
    batch = laid_out(plan([1, 2], [4, 6], [1, 1], [True, True], blocks=[(1, [5])]))
    assert batch.token_ids_t.tolist() == [11, 21]
    assert batch.slots_t.tolist() == [20, 38]
    assert batch.block_tables_rb.tolist() == [[7, 5], [2, 9]]
    batch = laid_out(plan([2, 1], [6, 4], [1, 1], [True, True]))
    assert batch.slots_t.tolist() == [38, 20]
    # The same numbers and tables as before, but request 2 is another one now.
    again = [Join(2, 1, [40], 0, [3], GREEDY)]
    batch = laid_out(plan([2, 1], [0, 4], [1, 1], [True, True], again, leaves=[2]))
    assert batch.token_ids_t.tolist() == [40, 11]
    assert batch.slots_t.tolist() == [12, 20]


@pytest.mark.parametrize("attends", [True, False])
@pytest.mark.parametrize("rows", [1, 2, FEW_ROWS, FEW_ROWS + 1])
def test_few_and_many_rows_are_laid_out_alike(rows, attends, monkeypatch):
    few, many = RowTable(4, local_attention=attends), RowTable(4, local_attention=attends)
    starts = [(7 * i) % 12 for i in range(rows)]
    joins = [Join(i, 0, [i], starts[i], [i, i + 1, i + 2], GREEDY) for i in range(rows)]
    step = plan(list(range(rows)), starts, [1] * rows, [True] * rows, joins)
    for table in (few, many):
        table.apply(step)
    one = few.batch(step)
    monkeypatch.setattr("cloverinfer.nodes.rows.FEW_ROWS", 0)
    other = many.batch(step)
    names = ["token_ids_t", "positions_t", "query_starts", "lengths_r"]
    for name in names + ["slots_t"] * attends:
        assert getattr(one, name).dtype == getattr(other, name).dtype
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    assert torch.equal(one.sample_tokens, other.sample_tokens)
    assert one.sample_positions == other.sample_positions
    assert (one.most, one.all_sample) == (other.most, other.all_sample) == (1, True)
    if not attends:
        assert one.slots_t is other.slots_t is one.block_tables_rb is other.block_tables_rb is None
        return
    width = other.block_tables_rb.shape[1]
    assert torch.equal(one.block_tables_rb[:, :width], other.block_tables_rb)


def test_steps_of_two_lanes_do_not_share_tensors():
    table = RowTable(4, local_attention=False)
    joins = [Join(i, 0, [10 + i], 3 + i, [], GREEDY) for i in range(2)]
    first = plan([0], [3], [1], [True], joins)
    second = msgspec.structs.replace(plan([1], [4], [1], [True]), lane=1)
    table.apply(first)
    one, other = table.batch(first), table.batch(second)
    assert (one.token_ids_t.tolist(), one.positions_t.tolist()) == ([10], [3])
    assert (other.token_ids_t.tolist(), other.positions_t.tolist()) == ([11], [4])
    again = table.batch(first)
    assert again.token_ids_t is one.token_ids_t
