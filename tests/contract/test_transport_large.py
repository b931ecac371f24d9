"""Puts of a gigabyte, over every transport that keeps no copies. Not in ``make test``: see
``make test-large``."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tests.transport_kit import Way, Wire, array, collect, offsets, rows, settle, wire_params
from tests.transport_partner import Start, answers

from cloverinfer.transport import Endpoint

pytestmark = pytest.mark.large
GIGABYTE = 1 << 30


@pytest.fixture(params=wire_params(lambda wire: wire.most >= 256 << 20), scope="module")
def wire(request: pytest.FixtureRequest, ready: Callable[[Wire], Wire]) -> Wire:
    return ready(request.param)


def test_gigabyte_and_a_little_more_at_odd_places(pair: tuple[Endpoint, Endpoint]) -> None:
    nbytes = GIGABYTE + 7
    way = Way(*pair, nbytes=nbytes + 4)
    source = array(way.source)
    source[:] = 77
    source[:: nbytes // 997] = 5
    ranges = way.cut(offsets(3), nbytes)
    settle(way.sender, way.sender.put(ranges, rows((0, 0)), 9))
    collect(pair[1], notices=1)
    want = np.zeros(nbytes + 4, np.uint8)
    want[3 : 3 + nbytes] = source[3 : 3 + nbytes]
    way.expect(want)


def test_gigabyte_in_scattered_pieces(pair: tuple[Endpoint, Endpoint]) -> None:
    way = Way(*pair, nbytes=GIGABYTE, length=16 << 10)
    count = GIGABYTE >> 14
    pieces = array(way.source).reshape(count, -1)
    pieces[:] = (np.arange(count) % 251 + 1)[:, None]
    order = np.random.default_rng(0).permutation(count).astype(np.int32)
    way.put(9, np.stack([np.arange(count, dtype=np.int32), order], 1))
    collect(pair[1], notices=1)
    want = np.zeros_like(pieces)
    want[order] = pieces
    way.expect(want.reshape(-1))


def test_gigabyte_to_another_process_and_back(wire: Wire, start: Start) -> None:
    if not wire.processes:
        pytest.skip(f"{wire.name} stays within one process")
    answers(start(GIGABYTE))
