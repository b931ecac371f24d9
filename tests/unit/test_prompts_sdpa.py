"""Which prompts PyTorch's kernels attend over on a GPU, as far as the host decides."""

import threading
import time
from collections.abc import Callable

import pytest
import torch

from cloverinfer.attention.prompts.base import Span, plan_spans
from cloverinfer.attention.prompts.sdpa import (
    PREPARE_SECONDS,
    Library,
    Saving,
    SdpaPrompts,
    Shapes,
    find_prompts,
)


def whole(row: int, count: int, start: int, length: int) -> Span:
    return Span(row, start, (length,) * count, (length,) * count)


def sdpa_by(shapes: Shapes) -> SdpaPrompts:
    """Without a pool."""
    way = SdpaPrompts.__new__(SdpaPrompts)
    way._shapes = shapes
    return way


def eventually(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 30
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds()


def test_prompts_of_one_length_that_follow_each_other_are_one_call() -> None:
    counts = [300, 300, 1, 300, 400, 100, 256, 256]
    lengths = [300, 300, 50, 300, 900, 100, 256, 256]
    starts = [0, *torch.tensor(counts).cumsum(0).tolist()]
    found = find_prompts(starts, lengths)
    assert found == [
        whole(0, 2, 0, 300),
        whole(3, 1, 601, 300),
        whole(6, 2, 1401, 256),
    ]
    assert (found[0].rows, found[0].tokens) == (slice(0, 2), slice(0, 600))


def test_others_rows_are_left_to_the_paged_kernel() -> None:
    lengths = torch.tensor([300, 7, 300], dtype=torch.int32)
    way = sdpa_by(Shapes(1.0, None))
    planned = plan_spans(way, [0, 300, 301, 601], lengths.tolist(), lengths)
    assert planned is not None
    assert planned.rest_r.tolist() == [0, 7, 0]
    assert lengths.tolist() == [300, 7, 300]
    assert not planned.all_rows
    assert plan_spans(way, [0, 1, 2], [5, 9], lengths[:2]) is None


def test_a_shape_pays_once_it_would_have_saved_its_preparation() -> None:
    each = PREPARE_SECONDS / 2.5
    shapes = Shapes(2 / 512**2, Saving(500, each))
    again, other, short = whole(0, 1, 0, 512), whole(0, 2, 0, 512), whole(0, 1, 0, 499)
    assert [shapes.pay(again) for _ in range(5)] == [False, False, False, True, True]
    assert [shapes.pay(other) for _ in range(3)] == [False, False, True]
    assert not any(shapes.pay(short) for _ in range(9))


def test_a_shape_waits_for_the_library_which_no_step_waits_for() -> None:
    may_load, waited = threading.Event(), list[bool]()
    library = Library(lambda: waited.append(may_load.wait(30)))
    shapes = Shapes(2 / 512**2, Saving(500, PREPARE_SECONDS), library)
    some = whole(0, 1, 0, 512)
    assert [shapes.pay(some) for _ in range(3)] == [False] * 3
    may_load.set()
    assert eventually(lambda: shapes.pay(some))
    assert waited == [True]


def test_a_library_that_cannot_be_loaded_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    def load() -> None:
        raise RuntimeError("no cuDNN here")

    library = Library(load)
    assert not library.loaded()
    assert eventually(lambda: "ours are used: no cuDNN here" in caplog.text)
    assert not library.loaded()
    assert caplog.text.count("no cuDNN") == 1
