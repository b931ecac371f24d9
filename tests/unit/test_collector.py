"""What is set aside from collections of garbage comes back with the last who asked."""

from __future__ import annotations

import gc
import weakref

import pytest

from cloverinfer.core import collector
from cloverinfer.core.collector import set_aside, take_back


class Knot:
    def __init__(self) -> None:
        self.itself = self


def test_cycles_are_set_aside_until_the_last_user_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "_users", 0)
    knot = Knot()
    tied = weakref.ref(knot)
    set_aside()
    set_aside()
    del knot
    gc.collect()
    assert tied() is not None
    take_back()
    gc.collect()
    assert tied() is not None
    take_back()
    gc.collect()
    assert tied() is None
