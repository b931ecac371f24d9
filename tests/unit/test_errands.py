"""A thread that does things for others, one after the other."""

from __future__ import annotations

import logging
import threading

import pytest

from cloverinfer.nodes.errands import Errands

PATIENCE = 60.0


def test_things_are_done_in_order_and_a_mistake_does_not_end_the_thread(
    caplog: pytest.LogCaptureFixture,
) -> None:
    errands, done, last = Errands("helper"), [], threading.Event()
    with caplog.at_level(logging.ERROR):
        errands.ask(lambda: done.append(0))
        errands.ask(lambda: done.append(1 // 0))
        errands.ask(lambda: done.append(2))
        errands.ask(last.set)
        assert last.wait(PATIENCE)
    assert done == [0, 2]
    assert "helper failed at one thing and goes on" in caplog.text
    errands.close()


def test_closing_drops_what_was_not_begun() -> None:
    errands, begun, go_on, done = Errands("helper"), threading.Event(), threading.Event(), []

    def hold() -> None:
        begun.set()
        assert go_on.wait(PATIENCE)
        done.append("held")

    errands.ask(hold)
    errands.ask(lambda: done.append("late"))
    assert begun.wait(PATIENCE)
    closing = threading.Thread(target=errands.close)
    closing.start()
    assert errands._ending.wait(PATIENCE)
    go_on.set()
    closing.join(PATIENCE)
    assert done == ["held"]
    assert not errands._thread.is_alive()
