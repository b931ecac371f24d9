"""The null transport records what was asked of it, in order."""

from __future__ import annotations

import numpy as np
from tests.transport_kit import offsets, rows

from cloverinfer.transport import Slices
from cloverinfer.transport.null import NullEndpoint


def test_calls_are_recorded() -> None:
    a = NullEndpoint("a")
    own = a.connect(a.address())
    region = a.register(64)
    slices = Slices(region, offsets(0), 64), Slices(region.ref, offsets(0), 64)
    ranges = a.prepare(own, *slices)
    index = rows((0, 0))
    a.put(ranges, index, 5)
    index[:] = 9
    a.send(own, b"message")
    a.poll(0.0)
    a.close()
    verbs = ["address", "connect", "register", "prepare", "put", "send", "poll", "close"]
    assert [call.verb for call in a.calls] == verbs
    put = a.calls[4].arguments
    assert put["ranges"] is ranges
    assert put["notice"] == 5
    np.testing.assert_array_equal(put["index"], [[0, 0]])
    assert a.calls[5].arguments["message"] == b"message"
