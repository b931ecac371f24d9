"""Random histories over all topologies: every request ends once, with its own tokens."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloverinfer.config import CacheConfig, SchedulerConfig
from cloverinfer.core.errors import NodeDiedError, RequestError
from cloverinfer.core.request import Request, RequestState
from cloverinfer.scheduler.records import HOME_ROLES

sys.path.insert(0, str(Path(__file__).parent))
from test_scheduler_fakes import Cluster
from tests.scheduler_kit import make_nodes, make_request

TOPOLOGIES = ("colocated", "pd", "pda")
PREFIXES = [[1 + (i * k) % 30 for i in range(40)] for k in (1, 3, 7)]


def build(
    topology: str, rng: random.Random, ahead: bool = False, kind: type[Cluster] = Cluster
) -> Cluster:
    blocks, prefill_size = rng.choice((10, 14, 60)), rng.choice((4, 4, 2, 8, 1))
    nodes = make_nodes(
        topology,
        blocks,
        prefills=rng.choice((1, 2)),
        homes=rng.choice((1, 1, 2, 3)),
        dense=rng.choice((1, 2)),
        prefill_blocks=rng.choice((10, 30)) * 4 // prefill_size,
        prefill_size=prefill_size,
    )
    config = SchedulerConfig(
        max_num_seqs=rng.choice((2, 4, 16)),
        max_num_batched_tokens=rng.choice((2, 4, 8, 16, 64)),
        enable_chunked_prefill=rng.random() < 0.6,
        num_wavefronts=rng.choice((1, 1, 2, 3)),
        async_scheduling=ahead,
    )
    cache = CacheConfig(block_size=4, enable_prefix_caching=rng.random() < 0.6)
    return kind(nodes, config, cache, seed=rng.randrange(1 << 30))


def random_request(number: int, rng: random.Random) -> Request:
    prefix = rng.choice(PREFIXES)[: rng.randrange(0, 20)]
    prompt = prefix + [rng.randrange(1, 30) for _ in range(rng.randrange(0 if prefix else 1, 5))]
    request = make_request(
        number,
        prompt,
        max_tokens=rng.randrange(1, 18),
        ignore_eos=rng.random() < 0.7,
        stop_token_ids=(5,) if rng.random() < 0.2 else (),
        presence_penalty=rng.choice((0.0, 0.0, 1.0)),
    )
    request.priority = rng.choice((0, 0, 0, -1, 2))
    request.cache_salt = rng.choice((None, None, "salt"))
    return request


def play(cluster: Cluster, rng: random.Random, count: int, faults: bool = False) -> None:
    number = 0
    while number < count or rng.random() < 0.8:
        if number < count and rng.random() < 0.3:
            try:
                cluster.add(random_request(number, rng))
            except (NodeDiedError, RequestError):
                assert faults
            number += 1
        cluster.step()
        if cluster.requests and rng.random() < 0.08:
            end_one(cluster, rng)
        if faults and rng.random() < 0.05:
            break_something(cluster, rng)
        if cluster.hung and rng.random() < 0.06:
            cluster.wake(rng.choice(sorted(cluster.hung)))


def end_one(cluster: Cluster, rng: random.Random) -> None:
    number = rng.choice(sorted(cluster.requests))
    if rng.random() < 0.5:
        cluster.scheduler.abort(number, cluster.now)
    else:
        cluster.scheduler.finish(number, "stop", cluster.now)
    cluster.scheduler.check_integrity()
    assert cluster.requests[number].finished


def break_something(cluster: Cluster, rng: random.Random) -> None:
    what = rng.random()
    alive = sorted(set(cluster.nodes) - cluster.dead - cluster.hung.keys())
    if what < 0.1 and len(alive) > 1:
        cluster.kill(rng.choice(alive))
    elif what < 0.6 and cluster.able():
        name, lane = rng.choice(cluster.able())
        homes = [node.name for node in cluster.nodes.values() if node.role in HOME_ROLES]
        cut = [home for home in homes if rng.random() < 0.5]
        prefills = cluster.nodes[name].role == "prefill"
        cluster.fail_step(name, lane, cut=tuple(cut) if prefills else ())
    elif what < 0.7:
        if cluster.scheduler.next_deadline() is not None:
            cluster.expire()
    elif alive:
        cluster.hang(rng.choice(alive))


@pytest.mark.parametrize("topology", TOPOLOGIES)
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 1 << 30))
def test_every_request_ends_once_with_its_own_tokens(topology: str, seed: int) -> None:
    rng = random.Random(seed)
    cluster = build(topology, rng)
    play(cluster, rng, count=rng.randrange(1, 16))
    cluster.run()
    cluster.check_end()
    assert all(request.state is not RequestState.FAILED for request in cluster.ended)


@pytest.mark.parametrize("topology", TOPOLOGIES)
@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 1 << 30))
def test_faults_end_only_what_depends_on_them(topology: str, seed: int) -> None:
    rng = random.Random(seed)
    cluster = build(topology, rng)
    play(cluster, rng, count=rng.randrange(1, 12), faults=True)
    cluster.run()
    cluster.check_end()
    for request in cluster.ended:
        assert (request.state is RequestState.FAILED) == (request.error is not None)


def test_the_histories_preempt_share_and_overtake() -> None:
    """The random tests are worth something only if what they are about happens in them."""
    preemptions = hits = 0
    early = False
    for seed in range(40):
        rng = random.Random(seed)
        cluster = build(TOPOLOGIES[seed % 3], rng)
        play(cluster, rng, count=12)
        cluster.run()
        cluster.check_end()
        preemptions += cluster.scheduler.num_preemptions
        hits += sum(hit for hit, _ in cluster.scheduler.cache_hits().values())
        early |= any(RequestState.PREEMPTED in r.times for r in cluster.ended)
    assert preemptions > 20
    assert hits > 100
    assert early
