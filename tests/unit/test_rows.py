"""Plans become tensors; tables follow their differences."""

import numpy as np
import torch

from cloverinfer.nodes.rows import BlockTables, RowTable
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
