"""One step launched ahead: the same tokens as without, and what is found out late."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloverinfer.config import CacheConfig, ClusterConfig, SchedulerConfig
from cloverinfer.core.errors import ConfigError
from cloverinfer.core.request import Request, RequestState
from cloverinfer.core.sampling import MAX_TAIL
from cloverinfer.orchestrator.layout import ignored_settings
from cloverinfer.scheduler import SchedNode, Scheduler, TokenEvent
from cloverinfer.wire.messages import StepDone, StepPlan, StepStats

sys.path.insert(0, str(Path(__file__).parent))
from test_scheduler_fakes import Cluster
from test_scheduler_random import build, play, random_request
from test_scheduler_rules import everything_free, finish_step, prompt, start
from tests.scheduler_kit import Truth, make_nodes, make_request

S = RequestState
NODE = "colocated-0"
TOPOLOGIES = ("colocated", "pd")


def ahead(blocks: int = 40, caching: bool = False, **config: Any) -> Cluster:
    settings = SchedulerConfig(async_scheduling=True, **config)
    cache = CacheConfig(block_size=4, enable_prefix_caching=caching)
    return Cluster(make_nodes("colocated", blocks), settings, cache)


def endless(number: int, length: int, max_tokens: int = 20, **more: Any) -> Request:
    words = prompt(length, number)
    return make_request(number, words, max_tokens, ignore_eos=True, **more)


def plans(c: Cluster) -> list[tuple[list[int], list[int], list[int]]]:
    """Rows, starts and counts of every step so far."""
    return [(m.rows, m.starts, m.counts) for _, m in c.sent if isinstance(m, StepPlan)]


def land(c: Cluster) -> None:
    """The oldest step ends, and what follows goes out."""
    finish_step(c, NODE)
    c.schedule()


def said(words: list[int], at: int = 0) -> int:
    """The token that follows a prompt, or one of those after it."""
    return Truth(list(words)).token(len(words) + at)


# What goes out, and when


def test_the_next_step_goes_out_with_the_first_and_no_third_does() -> None:
    c = ahead()
    start(c, endless(0, 6))
    assert plans(c) == [([0], [0], [6]), ([0], [6], [1])]
    assert c.schedule() == []
    land(c)
    assert plans(c)[2:] == [([0], [7], [1])]
    assert [record.decode_rows for record in c.scheduler.step_log] == [0, 1, 1]
    c.run()
    c.check_end()


def test_chunks_of_a_prompt_follow_one_another() -> None:
    c = ahead(max_num_batched_tokens=8)
    start(c, endless(0, 19))
    assert plans(c) == [([0], [0], [8]), ([0], [8], [8])]
    land(c)
    land(c)
    assert plans(c)[2:] == [([0], [16], [3]), ([0], [19], [1])]
    assert [m.samples for _, m in c.sent if isinstance(m, StepPlan)][2:] == [[True], [True]]
    c.run()
    c.check_end()


def test_newcomers_join_the_step_ahead_under_the_budget() -> None:
    c = ahead(max_num_batched_tokens=9)
    start(c, endless(0, 4))
    start(c, endless(1, 12))
    land(c)
    assert plans(c)[-1] == ([0, 1], [5, 0], [1, 8])


def test_what_a_token_is_certain_to_end_is_not_launched_again() -> None:
    c = ahead()
    start(c, endless(0, 4, max_tokens=2), endless(1, 4, max_tokens=1), endless(2, 4))
    assert plans(c) == [([0, 1, 2], [0, 0, 0], [4, 4, 4]), ([0, 2], [4, 4], [1, 1])]
    land(c)
    assert plans(c)[-1][0] == [2]
    assert c.requests[1].state is S.FINISHED
    c.run()
    c.check_end()
    assert c.scheduler.num_dropped == 0


def test_the_end_of_the_context_is_certain_too() -> None:
    settings = SchedulerConfig(async_scheduling=True)
    c = Cluster(make_nodes("colocated", 40), settings, CacheConfig(block_size=4), max_model_len=6)
    start(c, endless(0, 4))
    assert len(plans(c)) == 2
    land(c)
    assert len(plans(c)) == 2
    c.run()
    assert len(c.requests[0].output_token_ids) == 2


@pytest.mark.parametrize(
    "more",
    [{"prompt_logprobs": 0}, {"structured_outputs": {"regex": "a*"}}],
)
def test_rows_that_need_the_host_wait_for_their_step(more: dict[str, Any]) -> None:
    c = ahead()
    start(c, endless(0, 4), endless(1, 4, **more))
    assert [rows for rows, *_ in plans(c)] == [[0, 1], [0]]
    land(c)
    land(c)
    assert [rows for rows, *_ in plans(c)] == [[0, 1], [0], [0, 1], [0]]


@pytest.mark.parametrize(("length", "ahead_too"), [(MAX_TAIL + 1, True), (MAX_TAIL + 2, False)])
def test_words_too_long_for_a_device_need_the_host(length: int, ahead_too: bool) -> None:
    c = ahead()
    request = endless(0, 4, bad_words=("long",))
    request.bad_words = [[1] * length]
    start(c, request)
    assert len(plans(c)) == 1 + ahead_too


@pytest.mark.parametrize(
    "more",
    [{"logprobs": 0}, {"presence_penalty": 1.0}, {"logit_bias": {1: 1.0}}, {"min_tokens": 2}],
)
def test_rows_that_shape_or_score_go_ahead(more: dict[str, Any]) -> None:
    c = ahead()
    start(c, endless(0, 4, **more))
    assert [rows for rows, *_ in plans(c)] == [[0], [0]]


def test_a_prompt_that_is_asked_about_waits_between_chunks() -> None:
    c = ahead(max_num_batched_tokens=4)
    start(c, endless(0, 9, prompt_logprobs=0))
    assert plans(c) == [([0], [0], [4])]


def test_rows_that_need_the_host_meet_in_one_step() -> None:
    c = ahead()
    start(c, endless(0, 4, prompt_logprobs=0))
    start(c, endless(1, 4, prompt_logprobs=0))
    assert plans(c) == [([0], [0], [4])]
    land(c)
    assert plans(c)[1:] == [([0, 1], [4, 0], [1, 4])]
    land(c)
    assert plans(c)[2:] == [([0, 1], [5, 4], [1, 1])]


def test_a_lane_that_always_has_a_step_waits_for_nothing() -> None:
    c = ahead()
    start(c, endless(0, 4))
    for _ in range(4):
        c.now += 1.0
        land(c)
    assert [record.wait_seconds for record in c.scheduler.step_log] == [0.0] * 6


def test_a_lane_with_a_step_in_flight_does_not_stand_still() -> None:
    c = ahead()
    start(c, endless(0, 4, max_tokens=2))
    land(c)
    c.now += 1.0
    start(c, endless(1, 4))
    assert plans(c)[-1][0] == [1]
    assert c.scheduler.step_log[-1].wait_seconds == 0.0


@pytest.mark.parametrize(
    ("role", "device", "given", "depth"),
    [
        ("colocated", "cpu", None, 1),
        ("colocated", "cuda:0", None, 2),
        ("colocated", "cuda:0", False, 1),
        ("colocated", "cpu", True, 2),
        ("decode", "cuda:1", None, 2),
        ("prefill", "cuda:0", True, 1),
        ("dense", "cuda:0", True, 1),
    ],
)
def test_where_steps_are_launched_ahead(
    role: str, device: str, given: bool | None, depth: int
) -> None:
    roles = {"colocated": ["colocated"], "dense": ["prefill", "dense", "attention"]}
    nodes = [
        SchedNode(name, name, 0 if name == "dense" else 9, device=device)
        for name in roles.get(role, ["prefill", "decode"])
    ]
    scheduler = Scheduler(
        SchedulerConfig(async_scheduling=given, num_wavefronts=2), CacheConfig(), nodes, 100
    )
    assert {lane.depth for lane in scheduler._state.nodes[role].lanes} == {depth}


def test_the_setting_is_a_truth_value_or_none() -> None:
    with pytest.raises(ConfigError, match="async_scheduling"):
        SchedulerConfig(async_scheduling="yes")  # type: ignore[arg-type]


@pytest.mark.parametrize("topology", ["colocated", "pd", "pda"])
def test_a_cluster_that_cannot_says_so(topology: str) -> None:
    for asked in (None, False, True):
        config = ClusterConfig(topology=topology, scheduler=SchedulerConfig(async_scheduling=asked))
        assert bool(ignored_settings(config)) == (topology == "pda" and asked is True)


# What is found out late


@pytest.mark.parametrize("how", ["stop token", "stop string", "abort"])
def test_an_end_found_late_drops_the_row_and_keeps_its_blocks_until_then(how: str) -> None:
    c = ahead()
    words = prompt(4)
    stops = (said(words),) if how == "stop token" else ()
    start(c, make_request(0, words, 20, ignore_eos=True, stop_token_ids=stops), endless(1, 4))
    finish_step(c, NODE)
    if how == "stop string":
        c.scheduler.finish(0, "stop", c.now)
    elif how == "abort":
        c.scheduler.abort(0, c.now)
    c.schedule()
    assert c.requests[0].finished
    assert c.scheduler.drain_finished() == [c.requests[0]]
    assert c.requests[0].output_token_ids == [said(words)]
    assert plans(c)[-1][0] == [1], "only the other goes on"
    assert c.scheduler._state.nodes[NODE].cache().holds(0)
    finish_step(c, NODE)
    assert c.said[0] == c.requests[0].output_token_ids
    assert not c.scheduler._state.nodes[NODE].cache().holds(0)
    assert c.scheduler.num_dropped == 1
    c.schedule()
    assert next(m.leaves for _, m in reversed(c.sent) if isinstance(m, StepPlan)) == [0]


def test_an_abort_of_both_flights_waits_for_the_second() -> None:
    c = ahead()
    start(c, endless(0, 4))
    c.scheduler.abort(0, c.now)
    finish_step(c, NODE)
    assert not everything_free(c)
    finish_step(c, NODE)
    assert everything_free(c)
    assert c.said[0] == []


def test_nobody_is_preempted_by_a_step_ahead_nor_while_in_one() -> None:
    c = ahead(blocks=5)
    start(c, endless(0, 7, max_tokens=8), endless(1, 7, max_tokens=8))
    assert len(plans(c)) == 2
    flights = c.scheduler._state.nodes[NODE].lanes[0].flights
    left = 1
    while c.requests[1].state is not S.PREEMPTED:
        assert left == 1, "no step went ahead although nobody was preempted"
        finish_step(c, NODE)
        left = len(flights)
        c.schedule()
    assert left == 0
    c.run()
    c.check_end()
    assert S.PREEMPTED not in c.requests[0].times


def test_for_want_of_a_block_nobody_goes_ahead_of_who_came_before() -> None:
    c = ahead(blocks=7)
    start(c, endless(0, 6), endless(1, 7), endless(2, 5))
    while c.requests[2].state is not S.PREEMPTED:
        land(c)
    assert c.requests[0].num_computed == 8, "it needs its third block"
    assert all(rows[:2] == [0, 1] for rows, *_ in plans(c))
    c.run()
    c.check_end()


def test_who_waits_for_a_block_lets_no_other_lane_fly_ahead() -> None:
    c = ahead(blocks=4, num_wavefronts=2)
    start(c, endless(0, 7, max_tokens=6), endless(1, 3, max_tokens=12))
    while c.requests[1].state is not S.PREEMPTED:
        finish_step(c, NODE, c.computing[0][1])
        c.schedule()
    assert c.requests[1].num_computed == 0
    c.run()
    c.check_end()


def test_a_failed_step_fails_its_rows_and_those_behind_it_go_on() -> None:
    c = ahead(max_num_batched_tokens=4)
    start(c, endless(0, 4))
    start(c, endless(1, 3))
    assert [rows for rows, *_ in plans(c)] == [[0], [0]]
    land(c)
    assert plans(c)[-1] == ([0, 1], [5, 0], [1, 3])
    c.fail_step(NODE, 0, "broken")  # the decode row of 0 alone
    c.deliver(c.reports.pop())
    assert c.requests[0].error == f"step failed on {NODE}: broken"
    assert c.schedule() == [], "nothing goes ahead of what may fail"
    assert c.scheduler._state.nodes[NODE].cache().holds(0)
    c.run()
    c.check_end()
    assert c.requests[1].state is S.FINISHED


def test_a_second_failure_is_the_rows_own() -> None:
    c = ahead(max_num_batched_tokens=4)
    start(c, endless(0, 4))
    start(c, endless(1, 3))
    land(c)
    for _ in range(2):
        c.fail_step(NODE, 0, "broken")
        c.deliver(c.reports.pop())
    assert not c.requests[1].finished
    c.schedule()
    assert plans(c)[-2:] == [([1], [0], [3]), ([1], [3], [1])]
    c.fail_step(NODE, 0, "broken again")
    c.deliver(c.reports.pop())
    assert c.requests[1].error == f"step failed on {NODE}: broken again"
    c.run()
    assert everything_free(c)


def test_a_step_of_the_wrong_shape_fails_what_is_behind_it() -> None:
    c = ahead()
    start(c, endless(0, 4))
    c.scheduler.on_step_done(StepDone(NODE, 0, 1, [1], StepStats()), 0.0)
    assert not c.requests[0].finished, "a report out of order is dropped"
    c.scheduler.on_step_done(StepDone(NODE, 0, 0, [1, 2], StepStats()), 0.0)
    assert c.requests[0].state is S.FAILED
    c.scheduler.check_integrity()
    c.scheduler.on_step_done(StepDone(NODE, 0, 1, [1], StepStats()), 0.0)
    assert everything_free(c)


def test_time_runs_for_the_oldest_step_alone() -> None:
    c = ahead(step_timeout=5.0)
    start(c, endless(0, 4))
    assert c.scheduler.next_deadline() == 5.0
    c.now = 4.0
    finish_step(c, NODE)
    assert c.scheduler.next_deadline() == 9.0
    c.scheduler.expire(9.0)
    assert c.requests[0].state is S.FAILED
    assert not everything_free(c)


def test_a_late_answer_makes_way_for_the_step_behind_it() -> None:
    c = ahead(step_timeout=5.0)
    start(c, endless(0, 4))
    c.now = 5.0
    assert c.scheduler.expire(5.0) == []
    c.schedule()
    c.deliver(c.reports.pop())  # the node lives
    finish_step(c, NODE)
    assert c.scheduler.next_deadline() == 10.0
    start(c, endless(1, 4))
    assert plans(c)[-1][0] == [1]
    c.run()
    assert c.requests[1].state is S.FINISHED
    assert everything_free(c)


def test_a_node_that_dies_takes_both_steps_with_it() -> None:
    c = Cluster(
        make_nodes("colocated", 9, homes=2),
        SchedulerConfig(async_scheduling=True),
        CacheConfig(block_size=4),
    )
    start(c, endless(0, 4), endless(1, 4), endless(2, 4))
    c.scheduler.abort(0, c.now)
    victim = next(name for name, node in c.nodes.items() if 0 in node.known)
    died = sorted(c.nodes[victim].known)
    c.kill(victim)
    c.run()
    c.check_end()
    states = {0: S.ABORTED} | {n: S.FAILED if n in died else S.FINISHED for n in (1, 2)}
    assert {n: request.state for n, request in c.requests.items()} == states
    assert S.FINISHED in states.values()


def test_only_confirmed_tokens_are_found_by_others() -> None:
    c = ahead(caching=True)
    start(c, endless(0, 7))
    finish_step(c, NODE)  # eight tokens are known, and the eighth is being computed
    words = c.requests[0].all_token_ids()
    assert len(words) == 8
    start(c, make_request(1, [*words, 1], ignore_eos=True))
    assert c.requests[1].num_cached == 4
    land(c)
    start(c, make_request(2, [*words, 1], ignore_eos=True))
    assert c.requests[2].num_cached == 8
    c.run()
    c.check_end()


# Against the plain loop


class Stopping(Cluster):
    """Its engine finds stop strings: functions of what a request has said."""

    def hear(self, events: list[TokenEvent]) -> None:
        super().hear(events)
        for event in events:
            request = event.request
            if not event.finished and sum(request.output_token_ids[-2:]) % 13 == 0:
                self.scheduler.finish(request.number, "stop", self.now)


def serve(topology: str, seed: int, is_ahead: bool) -> Cluster:
    """A history of arrivals; what happens when differs, but not what is asked for."""
    rng = random.Random(seed)
    cluster = build(topology, rng, is_ahead, Stopping)
    requests = [random_request(i, rng) for i in range(rng.randrange(1, 16))]
    for request in requests:
        while rng.random() < 0.6:
            cluster.step()
        cluster.add(request)
    cluster.run()
    cluster.check_end()
    return cluster


def ends(cluster: Cluster) -> dict[int, tuple[list[int], str | None]]:
    return {n: (r.output_token_ids, r.finish_reason) for n, r in cluster.requests.items()}


@pytest.mark.parametrize("topology", TOPOLOGIES)
@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 1 << 30))
def test_each_request_says_the_same_as_without(topology: str, seed: int) -> None:
    assert ends(serve(topology, seed, True)) == ends(serve(topology, seed, False))


@pytest.mark.parametrize("topology", TOPOLOGIES)
@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 1 << 30))
def test_faults_and_cancels_end_only_what_depends_on_them(topology: str, seed: int) -> None:
    rng = random.Random(seed)
    cluster = build(topology, rng, True, Stopping)
    play(cluster, rng, count=rng.randrange(1, 14), faults=seed % 3 > 0)
    cluster.run()
    cluster.check_end()
    for request in cluster.ended:
        assert (request.state is S.FAILED) == (request.error is not None)


def test_the_histories_launch_ahead_drop_and_preempt() -> None:
    """They are worth something only if what they are about happens in them."""
    launched = plain = dropped = preemptions = 0
    for seed in range(30):
        cluster = serve(TOPOLOGIES[seed % 2], seed, True)
        launched += cluster.num_ahead
        plain += sum(isinstance(m, StepPlan) for _, m in cluster.sent) - cluster.num_ahead
        dropped += cluster.scheduler.num_dropped
        preemptions += cluster.scheduler.num_preemptions
    assert launched > plain / 2
    assert dropped > 20
    assert preemptions > 5
