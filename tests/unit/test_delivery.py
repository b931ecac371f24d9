"""Items from other threads reach their readers in order, with fewer wake-ups than items."""

from __future__ import annotations

import asyncio
import threading

import pytest

from cloverinfer.orchestrator.delivery import Courier, Couriers, Inbox


class CountingLoop:
    """A loop that is woken by hand."""

    def __init__(self) -> None:
        self.due: list[object] = []

    def is_closed(self) -> bool:
        return False

    def call_soon_threadsafe(self, callback: object) -> None:
        self.due.append(callback)


def test_many_items_wake_the_loop_once() -> None:
    loop = CountingLoop()
    courier = Courier(loop)  # type: ignore[arg-type]
    inboxes = [Inbox(loop) for _ in range(3)]  # type: ignore[arg-type]
    for item in range(4):
        for inbox in inboxes:
            courier.put(inbox, item)
    assert len(loop.due) == 1
    loop.due.pop()()  # type: ignore[operator]
    assert [list(inbox._items) for inbox in inboxes] == [[0, 1, 2, 3]] * 3
    courier.put(inboxes[0], 4)
    assert len(loop.due) == 1


def test_every_item_of_many_threads_arrives_in_its_order() -> None:
    async def read(inbox: Inbox, count: int) -> list[tuple[int, int]]:
        return [await asyncio.wait_for(inbox.get(), 20) for _ in range(count)]

    async def run() -> list[list[tuple[int, int]]]:
        loop = asyncio.get_running_loop()
        courier = Couriers().of(loop)
        inboxes = [Inbox(loop) for _ in range(4)]

        def write(thread: int) -> None:
            for item in range(500):
                courier.put(inboxes[item % 4], (thread, item))

        threads = [threading.Thread(target=write, args=(one,)) for one in range(4)]
        for thread in threads:
            thread.start()
        got = await asyncio.gather(*(read(inbox, 500) for inbox in inboxes))
        for thread in threads:
            thread.join(20)
        return list(got)

    for index, items in enumerate(asyncio.run(run())):
        for thread in range(4):
            mine = [item for one, item in items if one == thread]
            assert mine == list(range(index, 500, 4))


def test_a_closed_loop_refuses_and_is_forgotten() -> None:
    couriers = Couriers()
    loop = asyncio.new_event_loop()
    courier = couriers.of(loop)
    assert couriers.of(loop) is courier
    loop.close()
    with pytest.raises(RuntimeError, match="closed"):
        courier.put(Inbox(loop), 1)
    other = asyncio.new_event_loop()
    couriers.of(other)
    assert list(couriers._by_loop) == [other]
    other.close()
