"""The gate is a lock, and fair."""

import threading
import time

from cloverinfer.nodes.gate import Gate


def test_one_at_a_time_and_nobody_starves():
    gate, order, inside = Gate(), [], []

    def work(name):
        for _ in range(200):
            with gate:
                inside.append(name)
                assert len(inside) == 1
                order.append(name)
                time.sleep(0)
                inside.pop()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(order) == 600


def test_a_waiter_comes_before_who_held_it_last():
    gate, order = Gate(), []
    waiting = threading.Event()

    def waiter():
        waiting.set()
        with gate:
            order.append("waiter")

    with gate:
        thread = threading.Thread(target=waiter)
        thread.start()
        waiting.wait(60)
        while not gate.native.waiting:
            time.sleep(0.001)
    with gate:
        order.append("holder")
    thread.join(60)
    assert order == ["waiter", "holder"]
