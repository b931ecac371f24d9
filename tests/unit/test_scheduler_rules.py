"""Each rule of the scheduler by itself, on small clusters driven by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cloverinfer.config import CacheConfig, SchedulerConfig
from cloverinfer.core.errors import ConfigError, NodeDiedError, QueueFullError, RequestError
from cloverinfer.core.request import Request, RequestState
from cloverinfer.scheduler import SchedNode, Scheduler
from cloverinfer.wire.messages import (
    AttentionPlan,
    CancelTransfer,
    ExpectTransfer,
    Message,
    Probe,
    StepDone,
    StepPlan,
    StepStats,
    TransferDone,
)

sys.path.insert(0, str(Path(__file__).parent))
from test_scheduler_fakes import Cluster
from tests.scheduler_kit import EOS, Truth, make_nodes, make_request

S = RequestState


def cluster(
    topology: str,
    blocks: int = 40,
    nodes: dict[str, int] | None = None,
    caching: bool = False,
    max_model_len: int = 1000,
    **config: object,
) -> Cluster:
    return Cluster(
        make_nodes(topology, blocks, **(nodes or {})),
        SchedulerConfig(**config),  # type: ignore[arg-type]
        CacheConfig(block_size=4, enable_prefix_caching=caching),
        max_model_len,
    )


def prompt(length: int, first: int = 1) -> list[int]:
    return [(first + i) % 30 + 1 for i in range(length)]


def start(c: Cluster, *requests: Request) -> list[tuple[str, Message]]:
    for request in requests:
        c.add(request)
    return c.schedule()


def plan_for(c: Cluster, name: str) -> StepPlan:
    return next(m for n, m in reversed(c.sent) if n == name and isinstance(m, StepPlan))


def finish_step(c: Cluster, name: str, lane: int = 0) -> None:
    """Computes and reports one step, leaving other reports where they are."""
    c.computing.remove((name, lane))
    c.compute(name, lane)
    done = next(r for r in c.reports if isinstance(r, StepDone))
    c.reports.remove(done)
    c.deliver(done)


def transferred(c: Cluster) -> None:
    done = next(r for r in c.reports if isinstance(r, TransferDone))
    c.reports.remove(done)
    c.deliver(done)


def everything_free(c: Cluster) -> bool:
    pools = c.scheduler.free_blocks()
    return all(free == c._pool(name).num_blocks for name, free in pools.items())


# What is refused


def test_requests_that_cannot_be_served_are_refused_with_numbers() -> None:
    c = cluster("pda", blocks=5, max_model_len=30)
    with pytest.raises(RequestError, match="empty"):
        c.add(make_request(0, []))
    with pytest.raises(RequestError, match=r"30 tokens leaves no room .* 30 tokens"):
        c.add(make_request(0, prompt(30)))
    with pytest.raises(RequestError, match=r"up to 22 tokens need 6 blocks .* has 5"):
        c.add(make_request(0, prompt(10), max_tokens=12))
    c.add(make_request(0, prompt(10), max_tokens=11))
    assert c.scheduler.num_waiting == 1


def test_max_tokens_is_clipped_to_the_context() -> None:
    c = cluster("pd", max_model_len=12)
    start(c, make_request(0, prompt(10), max_tokens=100, ignore_eos=True))
    c.run()
    assert len(c.requests[0].output_token_ids) == 2
    assert c.requests[0].finish_reason == "length"


def test_a_full_queue_refuses_one_more() -> None:
    c = cluster("colocated", max_queue=2, max_num_seqs=1)
    start(c, make_request(0, prompt(3)))
    c.add(make_request(1, prompt(3)))
    c.add(make_request(2, prompt(3)))
    with pytest.raises(QueueFullError, match="max_queue"):
        c.add(make_request(3, prompt(3)))
    c.scheduler.abort(1, 0.0)
    c.add(make_request(3, prompt(3)))


@pytest.mark.parametrize(
    "nodes",
    [
        [],
        [SchedNode("a", "prefill", 4)],
        [SchedNode("a", "colocated", 4), SchedNode("b", "dense", 0)],
        [SchedNode("a", "colocated", 0)],
        [SchedNode("a", "colocated", 4), SchedNode("a", "colocated", 4)],
    ],
)
def test_nodes_that_make_no_topology_are_refused(nodes: list[SchedNode]) -> None:
    with pytest.raises(ConfigError):
        Scheduler(SchedulerConfig(), CacheConfig(), nodes, 100)


# Rows and chunks


def test_colocated_mixes_decode_rows_and_chunks_under_one_budget() -> None:
    c = cluster("colocated", max_num_batched_tokens=10)
    start(c, make_request(0, prompt(6), ignore_eos=True))
    finish_step(c, "colocated-0")
    start(c, make_request(1, prompt(21)), make_request(2, prompt(9)))
    plan = plan_for(c, "colocated-0")
    assert (plan.rows, plan.counts, plan.samples) == ([0, 1], [1, 8], [True, False])
    counts = []
    for _ in range(2):
        finish_step(c, "colocated-0")
        c.schedule()
        plan = plan_for(c, "colocated-0")
        counts.append(dict(zip(plan.rows, plan.counts, strict=True)))
    assert counts == [{0: 1, 1: 8}, {0: 1, 1: 5, 2: 4}]


def test_without_chunks_a_prompt_is_one_step_alone_over_the_budget() -> None:
    c = cluster("pd", max_num_batched_tokens=10, enable_chunked_prefill=False)
    start(c, *(make_request(i, prompt(n)) for i, n in enumerate((21, 4, 5, 3))))
    plan = plan_for(c, "prefill-0")
    assert (plan.rows, plan.counts, plan.samples) == ([0], [21], [True])
    finish_step(c, "prefill-0")
    c.schedule()
    assert plan_for(c, "prefill-0").rows == [1, 2]


def test_decode_rows_do_not_starve_a_prefill() -> None:
    c = cluster("colocated", max_num_batched_tokens=4)
    start(c, make_request(0, prompt(3), max_tokens=30, ignore_eos=True))
    finish_step(c, "colocated-0")
    start(c, make_request(1, prompt(8), ignore_eos=True))
    rows = []
    for _ in range(4):
        plan = plan_for(c, "colocated-0")
        rows.append((plan.rows, plan.counts))
        finish_step(c, "colocated-0")
        c.schedule()
    assert rows == [([0], [1]), ([1], [4]), ([0], [1]), ([1], [4])]


def test_a_budget_below_a_block_still_moves() -> None:
    c = cluster("pd", max_num_batched_tokens=1)
    start(c, make_request(0, prompt(9), ignore_eos=True))
    c.run()
    c.check_end()


# Plans


def test_joins_carry_what_the_node_does_not_know() -> None:
    c = cluster("pda", caching=False)
    start(c, make_request(7, prompt(6), temperature=0.5, top_k=-1, ignore_eos=True))
    expect = next(m for _, m in c.sent if isinstance(m, ExpectTransfer))
    assert [name for name, _ in c.sent] == ["attention-0", "prefill-0"]
    (join,) = plan_for(c, "prefill-0").joins
    assert (join.tokens, join.start, join.home) == (prompt(6), 0, "")
    assert join.push is not None
    assert (join.push.node, join.push.skip) == ("attention-0", 0)
    assert join.push.blocks == expect.blocks
    assert (join.sampling.temperature, join.sampling.top_k, join.sampling.seed) == (0.5, 0, 7)
    finish_step(c, "prefill-0")
    transferred(c)
    sent = c.schedule()
    assert [name for name, _ in sent] == ["dense-0", "attention-0"]
    dense, attention = sent[0][1], sent[1][1]
    assert isinstance(attention, AttentionPlan)
    assert isinstance(dense, StepPlan)
    assert (attention.rows, attention.lengths) == ([7], [7])
    assert attention.joins[0].blocks == expect.blocks
    (join,) = dense.joins
    assert join.tokens == c.requests[7].output_token_ids
    assert (join.start, join.blocks, join.home, join.push) == (6, [], "attention-0", None)
    finish_step(c, "dense-0")
    finish_step_and = c.schedule()
    assert not any(m.joins for _, m in finish_step_and if isinstance(m, (StepPlan, AttentionPlan)))


def test_leaves_travel_with_the_next_plan_of_every_node_that_knew() -> None:
    c = cluster("pda")
    start(c, make_request(0, prompt(4), max_tokens=2, ignore_eos=True))
    c.run()
    start(c, make_request(1, prompt(4), ignore_eos=True))
    assert plan_for(c, "prefill-0").leaves == [0]
    finish_step(c, "prefill-0")
    transferred(c)
    for _, message in c.schedule():
        assert isinstance(message, (StepPlan, AttentionPlan))
        assert message.leaves == [0]
    dense = [record for record in c.scheduler.step_log if record.node == "dense-0"]
    assert [(r.batch, r.joins, r.leaves) for r in dense] == [(1, 1, 0), (1, 1, 1)]


def test_rows_of_one_home_are_adjacent_on_dense_nodes() -> None:
    c = cluster("pda", nodes={"homes": 2})
    start(c, *(make_request(i, prompt(5 + i), max_tokens=20, ignore_eos=True) for i in range(6)))
    c.run()
    assert {m.joins[0].home for n, m in c.sent if n == "dense-0" and m.joins} == {
        "attention-0",
        "attention-1",
    }


def test_lanes_are_balanced_and_step_by_themselves() -> None:
    c = cluster("pd", num_wavefronts=2)
    start(c, *(make_request(i, prompt(4), ignore_eos=True) for i in range(4)))
    finish_step(c, "prefill-0")
    while any(isinstance(r, TransferDone) for r in c.reports):
        transferred(c)
    c.schedule()
    lanes = {m.lane: m.rows for n, m in c.sent if n == "decode-0" and isinstance(m, StepPlan)}
    assert sorted(len(rows) for rows in lanes.values()) == [2, 2]
    finish_step(c, "decode-0", 1)
    assert [m.lane for _, m in c.schedule() if isinstance(m, StepPlan)] == [1]


def test_step_records_tell_how_long_a_lane_stood_still() -> None:
    c = cluster("colocated")
    start(c, make_request(0, prompt(4), ignore_eos=True))
    finish_step(c, "colocated-0")
    c.now += 2.5
    c.schedule()
    assert [record.wait_seconds for record in c.scheduler.step_log] == [0.0, 2.5]


# The way of a request


def test_times_of_the_stages() -> None:
    c = cluster("pd")
    request = make_request(0, prompt(4), max_tokens=3, ignore_eos=True)
    c.add(request)
    c.now = 1.0
    c.schedule()
    c.now = 2.0
    finish_step(c, "prefill-0")
    assert request.state is S.TRANSFERRING
    c.now = 3.0
    transferred(c)
    c.schedule()
    c.now = 4.0
    finish_step(c, "decode-0")
    wanted = {S.WAITING: 0.0, S.PREFILLING: 1.0, S.TRANSFERRING: 2.0, S.DECODING: 3.0}
    assert request.times == wanted
    assert request.token_times == [2.0, 4.0]


def test_a_transfer_may_be_whole_before_the_first_token_is_known() -> None:
    c = cluster("pda")
    start(c, make_request(0, prompt(4), ignore_eos=True))
    c.computing.clear()
    c.compute("prefill-0", 0)
    transferred(c)
    assert c.requests[0].state is S.PREFILLING
    assert all(n == "prefill-0" for n, m in c.schedule())
    c.deliver(c.reports.pop())
    c.schedule()
    assert c.requests[0].state is S.DECODING


@pytest.mark.parametrize("how", ["eos", "stop_token_ids", "length"])
@pytest.mark.parametrize("topology", ["pd", "pda"])
def test_a_first_token_that_ends_never_decodes(topology: str, how: str) -> None:
    c = cluster(topology)
    words = prompt(6)
    if how == "eos":
        words = next(p for p in ([*prompt(6, i), i] for i in range(1, 999)) if first(p) == EOS)
    stops = (first(words),) if how == "stop_token_ids" else ()
    start(c, make_request(0, words, max_tokens=1 if how == "length" else 9, stop_token_ids=stops,
                          ignore_eos=how != "eos"))  # fmt: skip
    finish_step(c, "prefill-0")
    request = c.requests[0]
    assert (request.state, request.output_token_ids) == (S.FINISHED, [first(words)])
    assert request.finish_reason == ("length" if how == "length" else "stop")
    assert everything_free(c)
    assert [type(m) for _, m in c.schedule()] == [CancelTransfer]
    assert c.scheduler.drain_finished() == [request]
    assert c.scheduler.drain_finished() == []


def first(words: list[int]) -> int:
    return Truth(list(words)).token(len(words))


def test_an_abort_in_flight_keeps_the_blocks_until_the_step_answers() -> None:
    for topology, name in (("pd", "prefill-0"), ("colocated", "colocated-0")):
        c = cluster(topology)
        start(c, make_request(0, prompt(9)))
        held = c.scheduler.free_blocks()
        c.scheduler.abort(0, c.now)
        assert c.scheduler.drain_finished() == [c.requests[0]]
        assert c.scheduler.free_blocks() == held
        assert c.schedule() == []
        finish_step(c, name)
        assert everything_free(c)
        assert c.said[0] == []
        c.schedule()
        assert not c.scheduler.has_work


def test_an_abort_outside_a_step_frees_at_once_and_cancels() -> None:
    c = cluster("pda")
    start(c, make_request(0, prompt(9)))
    finish_step(c, "prefill-0")
    c.scheduler.abort(0, c.now)
    assert everything_free(c)
    assert [type(m) for _, m in c.schedule()] == [CancelTransfer]
    transferred(c)
    assert c.schedule() == []


def test_finish_ends_with_the_reason_given() -> None:
    c = cluster("pda")
    start(c, make_request(0, prompt(9), ignore_eos=True))
    finish_step(c, "prefill-0")
    transferred(c)
    c.schedule()
    c.scheduler.finish(0, "stop", c.now)
    assert (c.requests[0].state, c.requests[0].finish_reason) == (S.FINISHED, "stop")
    finish_step(c, "dense-0")
    assert len(c.requests[0].output_token_ids) == 1
    assert everything_free(c)


# Blocks


def test_a_prefix_held_spares_compute_and_transfer() -> None:
    c = cluster("pda", caching=True)
    words = prompt(12)
    start(c, make_request(0, words, max_tokens=3, ignore_eos=True))
    c.run()
    start(c, make_request(1, words, max_tokens=3, ignore_eos=True))
    (join,) = plan_for(c, "prefill-0").joins
    assert join.push is not None
    # 12 tokens are three full blocks, but the last token must be computed.
    assert (join.start, join.push.skip, c.requests[1].num_cached) == (8, 2, 8)
    expect = [m for _, m in c.sent if isinstance(m, ExpectTransfer)][-1]
    assert expect.blocks == join.push.blocks[2:]
    c.run()
    c.check_end()


def test_what_was_not_transferred_whole_is_not_found_at_home() -> None:
    c = cluster("pda", caching=True)
    start(c, make_request(0, prompt(12)))
    finish_step(c, "prefill-0")
    c.scheduler.abort(0, c.now)
    start(c, make_request(1, prompt(12)))
    (join,) = plan_for(c, "prefill-0").joins
    assert join.push is not None
    assert (join.start, join.push.skip) == (8, 0)


def test_the_latest_is_preempted_and_goes_on_without_loss() -> None:
    c = cluster("colocated", blocks=6)
    start(c, *(make_request(i, prompt(7, i), max_tokens=14, ignore_eos=True) for i in range(3)))
    c.run()
    c.check_end()
    assert c.scheduler.num_preemptions > 0
    assert S.PREEMPTED not in c.requests[0].times
    assert S.PREEMPTED in c.requests[1].times or S.PREEMPTED in c.requests[2].times
    finished = [c.requests[i].times[S.FINISHED] for i in range(3)]
    assert finished == sorted(finished)


def test_what_is_in_flight_is_not_preempted() -> None:
    c = cluster("colocated", blocks=5, num_wavefronts=2)
    start(c, *(make_request(i, prompt(7, i), max_tokens=12, ignore_eos=True) for i in range(2)))
    for _ in range(2):  # request 0 (lane 0) now needs a third block, request 1 is still computing
        finish_step(c, "colocated-0", 0)
        c.schedule()
    assert c.requests[0].num_computed == 8
    finish_step(c, "colocated-0", 1)
    finish_step(c, "colocated-0", 0)
    c.schedule()
    assert c.requests[1].state is S.DECODING
    c.run()
    c.check_end()


def test_admission_is_in_order() -> None:
    c = cluster("pd", blocks=8)
    start(c, make_request(0, prompt(16), max_tokens=9), make_request(1, prompt(24)),
          make_request(2, prompt(2)))  # fmt: skip
    assert plan_for(c, "prefill-0").rows == [0]
    assert c.scheduler.num_waiting == 2


def test_dense_places_are_reserved_from_admission_on() -> None:
    c = cluster("pda", max_num_seqs=2, nodes={"dense": 2, "homes": 1})
    start(c, *(make_request(i, prompt(4), ignore_eos=True) for i in range(6)))
    assert plan_for(c, "prefill-0").rows == [0, 1, 2, 3]
    c.run()
    c.check_end()


# Deaths and deadlines


def test_a_dead_dense_node_takes_only_its_own() -> None:
    c = cluster("pda", nodes={"dense": 2})
    start(c, *(make_request(i, prompt(4), ignore_eos=True) for i in range(2)))
    finish_step(c, "prefill-0")
    transferred(c)
    transferred(c)
    c.schedule()
    c.kill("dense-0")
    assert [r.error for r in c.requests.values()] == ["node dense-0 died: killed", None]
    start(c, make_request(2, prompt(4), ignore_eos=True))
    c.run()
    c.check_end()
    assert [r.state for r in c.requests.values()] == [S.FAILED, S.FINISHED, S.FINISHED]


def test_the_last_node_of_a_role_takes_all_that_wait_for_it() -> None:
    c = cluster("pda", max_num_seqs=1)
    start(c, make_request(0, prompt(4)), make_request(1, prompt(4)))
    c.kill("dense-0")
    assert all(r.state is S.FAILED for r in c.requests.values())
    with pytest.raises(NodeDiedError, match="no dense node"):
        c.add(make_request(2, prompt(4)))
    c.run()
    assert everything_free(c)


def test_rows_of_living_homes_do_their_step_again() -> None:
    c = cluster("pda", nodes={"homes": 2})
    start(c, *(make_request(i, prompt(4), ignore_eos=True) for i in range(2)))
    finish_step(c, "prefill-0")
    transferred(c)
    transferred(c)
    c.schedule()
    assert plan_for(c, "dense-0").rows == [0, 1]
    c.kill("attention-0")
    c.fail_step("dense-0", 0)
    c.run()
    c.check_end()
    assert [r.state for r in c.requests.values()] == [S.FAILED, S.FINISHED]


def test_a_failed_step_fails_its_rows() -> None:
    c = cluster("colocated")
    start(c, make_request(0, prompt(4)))
    c.fail_step("colocated-0", 0, "out of memory")
    c.run()
    assert c.requests[0].error == "step failed on colocated-0: out of memory"
    assert c.requests[0].finish_reason == "error"
    assert everything_free(c)


def test_an_overdue_step_fails_its_requests_and_keeps_its_blocks() -> None:
    c = cluster("pd", step_timeout=5.0)
    start(c, make_request(0, prompt(4)), make_request(1, prompt(5)))
    held = c.scheduler.free_blocks()
    assert c.scheduler.next_deadline() == 5.0
    c.scheduler.expire(4.9)
    assert c.scheduler.drain_finished() == []
    c.scheduler.expire(5.0)
    assert len(c.scheduler.drain_finished()) == 2
    assert c.scheduler.free_blocks() == held
    with pytest.raises(NodeDiedError):
        c.add(make_request(2, prompt(4)))
    finish_step(c, "prefill-0")
    assert everything_free(c)
    start(c, make_request(3, prompt(4), ignore_eos=True))
    c.run()
    assert c.requests[3].state is S.FINISHED


def test_an_overdue_transfer_fails_and_is_cancelled() -> None:
    c = cluster("pda", transfer_timeout=7.0)
    start(c, make_request(0, prompt(4), ignore_eos=True))
    c.now = 1.0
    finish_step(c, "prefill-0")
    assert c.scheduler.next_deadline() == 8.0
    c.scheduler.expire(8.0)
    assert c.requests[0].error == "KV transfer to attention-0 took more than 7 s"
    assert everything_free(c)
    assert [type(m) for _, m in c.schedule()] == [CancelTransfer, Probe]


def test_a_transfer_that_cannot_be_whole_fails_its_request() -> None:
    c = cluster("pda")
    start(c, make_request(0, prompt(4)))
    slot = next(m.transfer for _, m in c.sent if isinstance(m, ExpectTransfer))
    stale = TransferDone("attention-0", slot, 0, 9, 0, "not mine")
    c.deliver(stale)
    assert not c.requests[0].finished
    c.deliver(TransferDone("attention-0", slot, 0, 0, 0, "checksum"))
    assert c.requests[0].error == "KV transfer to attention-0 failed: checksum"
    assert not everything_free(c)
    finish_step(c, "prefill-0")
    assert everything_free(c)


def test_reports_of_the_wrong_shape_fail_the_step() -> None:
    c = cluster("colocated")
    start(c, make_request(0, prompt(4)))
    c.scheduler.on_step_done(StepDone("colocated-0", 0, 0, [1, 2], StepStats()), 0.0)
    assert c.requests[0].error is not None
    assert "2 tokens for 1 rows" in c.requests[0].error


def test_blocks_that_the_last_token_needs_are_counted_before_admission() -> None:
    nodes = make_nodes("pd", 40, prefill_blocks=3)
    config = SchedulerConfig(max_num_batched_tokens=4)
    c = Cluster(nodes, config, CacheConfig(block_size=4))
    start(c, make_request(0, prompt(12), max_tokens=1))
    for _ in range(2):
        finish_step(c, "prefill-0")
        c.schedule()
    # Both full blocks of this prompt are there and in use, but its last token needs one of its own.
    start(c, make_request(1, prompt(8), max_tokens=1))
    assert c.scheduler.num_waiting == 1
    c.run()
    c.check_end()


def test_a_newcomer_leaves_a_block_to_those_who_are_there() -> None:
    c = cluster("colocated", blocks=5)
    start(c, make_request(0, prompt(7), max_tokens=3, ignore_eos=True), make_request(1, prompt(12)))
    assert plan_for(c, "colocated-0").rows == [0]
    c = cluster("colocated", blocks=6)
    start(c, make_request(0, prompt(7), max_tokens=3, ignore_eos=True), make_request(1, prompt(12)))
    assert plan_for(c, "colocated-0").rows == [0, 1]


def test_transfer_slots_in_use_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloverinfer.scheduler.state.MAX_TRANSFERS", 4)
    for seed in range(5):
        c = Cluster(make_nodes("pd", 40), SchedulerConfig(max_num_seqs=4), seed=seed)
        start(c, *(make_request(i, prompt(3 + i), max_tokens=1 + i % 3) for i in range(20)))
        c.run()
        c.check_end()


def test_the_waiting_that_only_the_dead_pool_could_hold_fail() -> None:
    nodes = [SchedNode("small", "colocated", 4), SchedNode("large", "colocated", 20)]
    c = Cluster(nodes, SchedulerConfig(max_num_seqs=1), CacheConfig(block_size=4))
    start(c, make_request(0, prompt(30)), make_request(1, prompt(40)), make_request(2, prompt(4)))
    c.kill("large")
    c.run()
    c.check_end()
    assert [r.state for r in c.requests.values()] == [S.FAILED, S.FAILED, S.FINISHED]
    assert c.requests[1].error is not None
    assert "the largest KV pool has 4" in c.requests[1].error


def test_a_preempted_request_can_still_be_finished() -> None:
    c = cluster("colocated", blocks=6)
    start(c, *(make_request(i, prompt(7, i), max_tokens=14, ignore_eos=True) for i in range(3)))
    while not any(r.state is S.PREEMPTED for r in c.requests.values()):
        c.step()
    victim = next(r for r in c.requests.values() if r.state is S.PREEMPTED)
    assert (victim.incarnation, victim.num_computed) == (1, 0)
    c.scheduler.finish(victim.number, "stop", c.now)
    assert victim.state is S.FINISHED
    c.run()
    c.check_end()
