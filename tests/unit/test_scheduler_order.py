"""Who is served before whom, and who shares prefixes with whom."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cloverinfer.config import CacheConfig, SchedulerConfig

sys.path.insert(0, str(Path(__file__).parent))
from test_scheduler_fakes import Cluster
from tests.scheduler_kit import make_nodes, make_request


def cluster(topology: str, config: SchedulerConfig | None = None, blocks: int = 40) -> Cluster:
    return Cluster(make_nodes(topology, blocks), config, CacheConfig(block_size=4))


def prompt(length: int, first: int = 1) -> list[int]:
    return [(first + i) % 30 + 1 for i in range(length)]


def test_lower_priorities_are_admitted_first_and_arrivals_in_order() -> None:
    c = cluster("pda", SchedulerConfig(max_num_seqs=1))
    requests = [make_request(i, prompt(4), max_tokens=2, ignore_eos=True) for i in range(5)]
    for request, priority in zip(requests, (0, 3, 0, -1, 3), strict=True):
        request.priority = priority
    for request in requests:
        c.add(request)
    c.run()
    c.check_end()
    assert [request.number for request in c.ended] == [3, 0, 2, 1, 4]


@pytest.mark.parametrize(("priorities", "victim"), [((0, 0), 1), ((5, 0), 0), ((5, 6), 1)])
def test_the_least_urgent_is_preempted_and_comes_back_in_its_order(
    priorities: tuple[int, int], victim: int
) -> None:
    c = cluster("colocated", blocks=5)
    requests = [make_request(i, prompt(7, i), max_tokens=9, ignore_eos=True) for i in range(2)]
    for request, priority in zip(requests, priorities, strict=True):
        request.priority = priority
    for request in requests:
        c.add(request)
    c.run()
    c.check_end()
    assert [request.incarnation > 0 for request in requests] == [victim == 0, victim == 1]
    assert c.ended[-1] is requests[victim]


def test_prefixes_are_shared_within_a_salt_alone() -> None:
    c = cluster("colocated")
    cached = []
    for number, salt in enumerate([None, "a", "b", "a", None, ""]):
        request = make_request(number, prompt(9), max_tokens=8, ignore_eos=True)
        request.cache_salt = salt
        c.add(request)
        c.run()
        cached.append(request.num_cached)
    c.check_end()
    assert cached == [0, 0, 0, 8, 8, 0]


def test_blocks_that_decode_fills_keep_their_salt() -> None:
    c = cluster("colocated")
    first = make_request(0, prompt(3), max_tokens=8, ignore_eos=True)
    first.cache_salt = "a"
    c.add(first)
    c.run()
    cached = []
    for number, salt in enumerate(["b", None, "a"], 1):
        request = make_request(number, first.all_token_ids(), max_tokens=1)
        request.cache_salt = salt
        c.add(request)
        c.run()
        cached.append(request.num_cached)
    assert cached == [0, 0, 8]
