"""The native copies behind puts, large and small, and the rally, against numpy."""

from __future__ import annotations

import mmap
import threading

import numpy as np
import pytest

from cloverinfer import _native

LARGE = _native.LARGE_COPY_BYTES


def memory(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def copied(dst: np.ndarray, to: np.ndarray, src: np.ndarray, at: np.ndarray, length: int,
           index: np.ndarray) -> np.ndarray:  # fmt: skip
    want = dst.copy()
    for s, d in index:
        want[to[d] : to[d] + length] = src[at[s] : at[s] + length]
    return want


@pytest.mark.parametrize("threads", [None, 1, 3])
@pytest.mark.parametrize("length", [1, 63, 1000, 1025, 4096, 65_537, LARGE, LARGE + 77])
@pytest.mark.parametrize("scattered", [False, True])
def test_large_copies_move_what_the_index_says(
    threads: int | None, length: int, scattered: bool
) -> None:
    # Enough rows to be large, but few enough for a Python loop where pieces are tiny.
    count = max(LARGE // length + 5, 3) if length >= 1000 else 3000
    draw = np.random.default_rng(length)
    src, dst = memory(count * (length + 9), 1), memory(count * (length + 5), 2)
    gap = 3 if scattered else 0
    at = np.arange(count, dtype=np.int64) * (length + gap) + 7
    to = np.arange(count, dtype=np.int64) * (length + gap) + 1
    order = draw.permutation(count) if scattered else np.arange(count)
    index = np.stack([np.arange(count), order], 1).astype(np.int32)
    want = copied(dst, to, src, at, length, index)
    pool = None if threads is None else _native.CopyThreads(threads)
    _native.copy_ranges(dst, to, src, at, length, index, pool)
    assert np.array_equal(dst, want)


def test_rows_outside_leave_a_large_copy_undone() -> None:
    src, dst = memory(2 * LARGE, 1), memory(2 * LARGE, 2)
    before = dst.copy()
    at = np.array([0, LARGE + 1], np.int64)
    index = np.array([[0, 0], [0, 1]], np.int32)
    with pytest.raises(ValueError, match="outside"):
        _native.copy_ranges(dst, at, src, at, LARGE, index, _native.CopyThreads(2))
    assert np.array_equal(dst, before)


@pytest.mark.parametrize("shift", [-100, 100])
def test_large_overlapping_copies_are_moves(shift: int) -> None:
    whole = memory(2 * LARGE + 200, 3)
    want = whole.copy()
    want[100 + shift : 100 + shift + 2 * LARGE] = whole[100 : 100 + 2 * LARGE]
    at, to = np.array([100], np.int64), np.array([100 + shift], np.int64)
    index = np.zeros((1, 2), np.int32)
    _native.copy_ranges(whole, to, whole, at, 2 * LARGE, index, _native.CopyThreads(2))
    assert np.array_equal(whole, want)


def test_copies_from_many_threads_share_the_workers() -> None:
    pool = _native.CopyThreads(2)
    src = memory(LARGE, 4)
    whole, index = np.zeros(1, np.int64), np.zeros((1, 2), np.int32)
    targets = [np.zeros(LARGE, np.uint8) for _ in range(4)]

    def run(target: np.ndarray) -> None:
        for _ in range(5):
            target[:] = 0
            _native.copy_ranges(target, whole, src, whole, LARGE, index, pool)

    threads = [threading.Thread(target=run, args=(target,)) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(np.array_equal(target, src) for target in targets)


def test_no_threads_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        _native.CopyThreads(0)


def test_rally_goes_there_and_back_or_says_that_nobody_answers() -> None:
    table = mmap.mmap(-1, 256)
    answers: list[bool] = []
    thread = threading.Thread(
        target=lambda: answers.append(_native.bell_rally(table, True, 500, 30.0))
    )
    thread.start()
    assert _native.bell_rally(table, False, 500, 30.0)
    thread.join()
    assert answers == [True]
    assert not _native.bell_rally(mmap.mmap(-1, 256), False, 1, 0.05)
    with pytest.raises(ValueError, match="too small"):
        _native.bell_rally(bytearray(8), False, 1, 0.05)
