"""What every transport must do: sentences of ``transport/base.py`` as tests. Memory and puts."""

from __future__ import annotations

import mmap
import os
import time

import msgspec
import numpy as np
import pytest
from tests.transport_kit import (
    PATIENCE,
    WIRES,
    Make,
    Way,
    Wire,
    array,
    collect,
    finish,
    offsets,
    put_error,
    resident_bytes,
    rows,
    segments,
    settle,
    way_error,
)

from cloverinfer.core.errors import ConfigError, TransportError
from cloverinfer.transport import (
    Capabilities,
    Endpoint,
    Peer,
    RegionRef,
    Slices,
    Ticket,
    create_endpoint,
    transport_names,
)

# -- names, addresses, capabilities


def test_registry_knows_every_transport_and_refuses_others() -> None:
    assert {wire.name for wire in WIRES} <= set(transport_names())
    with pytest.raises(ConfigError, match=r"'pigeon'.*inproc"):
        create_endpoint("pigeon", "a")


def test_capabilities_and_address_name_the_transport(
    wire: Wire, pair: tuple[Endpoint, Endpoint]
) -> None:
    a, b = pair
    assert isinstance(a.capabilities, Capabilities)
    assert a.capabilities.name == wire.name
    assert a.capabilities.max_message_bytes >= 4 << 20
    assert a.address().startswith(f"{wire.name}://")
    assert a.address() == a.address() != b.address()


# -- memory


def test_registered_sizes_are_zeroed_page_aligned_and_writable(make: Make) -> None:
    region = make("a").register(10_000)
    memory = array(region)
    assert region.ref.nbytes == region.buffer.nbytes == len(memory) == 10_000
    assert region.buffer.format == "B"
    assert not memory.any()
    assert memory.ctypes.data % mmap.PAGESIZE == 0
    memory[:] = 255
    assert region.buffer[9_999] == 255


def test_region_refs_differ_and_travel(make: Make) -> None:
    a = make("a")
    refs = [a.register(64).ref for _ in range(3)]
    assert len({ref.name for ref in refs}) == 3
    assert all(ref.address == a.address() for ref in refs)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(refs[0]), type=RegionRef) == refs[0]


def test_callers_memory_is_used_in_place(pair: tuple[Endpoint, Endpoint]) -> None:
    a, b = pair
    mine = np.arange(1000, dtype=np.uint32)
    region = a.register(memoryview(mine))
    assert region.ref.nbytes == 4000
    mine[0] = 99
    assert region.buffer[0] == 99
    target = b.register(4000)
    ranges = a.prepare(
        a.connect(b.address()),
        Slices(region, offsets(0), 4000),
        Slices(target.ref, offsets(0), 4000),
    )
    settle(a, a.put(ranges, rows((0, 0)), 1))
    collect(b, notices=1)
    if b.capabilities.moves_data:
        np.testing.assert_array_equal(array(target).view(np.uint32), mine)


def test_puts_into_callers_memory_work_or_are_refused(pair: tuple[Endpoint, Endpoint]) -> None:
    a, b = pair
    mine = bytearray(64)
    source, target = a.register(64), b.register(memoryview(mine))
    array(source)[:] = 3
    peer = a.connect(b.address())
    local, remote = Slices(source, offsets(0), 64), Slices(target.ref, offsets(0), 64)
    if not b.capabilities.puts_into_any_memory:
        assert target.ref.name in way_error(a, peer, local, remote)
        return
    settle(a, a.put(a.prepare(peer, local, remote), rows((0, 0)), 1))
    collect(b, notices=1)
    assert mine == bytes([3 if b.capabilities.moves_data else 0]) * 64


@pytest.mark.parametrize("memory", [0, -1, memoryview(b"constant"), memoryview(bytearray())])
def test_memory_that_cannot_be_registered_is_refused(make: Make, memory: int | memoryview) -> None:
    with pytest.raises(ValueError, match=r"region|memory"):
        make("a").register(memory)


def test_memory_that_no_host_has_is_refused(make: Make) -> None:
    for nbytes in (1 << 62, 1 << 80):
        with pytest.raises(TransportError, match=r"smaller pools"):
            make("a").register(nbytes)


def test_puts_into_a_closed_region_fail(pair: tuple[Endpoint, Endpoint]) -> None:
    way = Way(*pair, nbytes=4096)
    way.put(1)
    collect(pair[1], notices=1)
    way.target.close()
    way.target.close()
    for index in (rows((0, 0)), rows()):
        assert put_error(way.sender, way.ranges, index)
    assert way_error(way.sender, way.peer, *way.slices(offsets(0), 4096))
    assert not pair[1].poll(0.05)


def test_puts_from_a_closed_region_fail(pair: tuple[Endpoint, Endpoint]) -> None:
    way = Way(*pair, nbytes=4096)
    way.source.close()
    with pytest.raises(TransportError, match="closed"):
        way.sender.put(way.ranges, rows((0, 0)), 2)
    with pytest.raises(TransportError, match="closed"):
        way.cut(offsets(0), 0)


def test_registering_in_a_loop_does_not_grow(wire: Wire, pair: tuple[Endpoint, Endpoint]) -> None:
    def once() -> tuple[int, int]:
        way = Way(*pair, nbytes=8192)
        way.put(1)
        collect(pair[1], notices=1)
        way.source.close()
        way.target.close()
        del way
        return len(segments()), len(os.listdir("/proc/self/fd"))

    counts = [once() for _ in range(10 if wire.loose_files else 50)]
    settled = [count[: 1 if wire.loose_files else 2] for count in counts[2:]]
    assert len(set(settled)) == 1


def test_closed_regions_give_their_memory_back(wire: Wire, pair: tuple[Endpoint, Endpoint]) -> None:
    if not wire.steady_memory:
        pytest.skip(f"{wire.name} keeps what was put on purpose")
    nbytes, times = 4 << 20, 60

    def once() -> int:
        way = Way(*pair, nbytes=nbytes)
        array(way.source)[:] = 1
        way.put(1)
        collect(pair[1], notices=1)
        way.source.close()
        way.target.close()
        del way
        return resident_bytes()

    before = max(once() for _ in range(3))
    for _ in range(times):
        after = once()
    # All of it would be 480 MB; a third of one side's is what a heap may keep.
    assert after - before < times * nbytes // 3


# -- peers


def test_one_peer_object_per_address(pair: tuple[Endpoint, Endpoint]) -> None:
    a, b = pair
    to_b = a.connect(b.address())
    assert isinstance(to_b, Peer)
    assert to_b.address == b.address()
    assert a.connect(b.address()) is to_b
    a.send(to_b, b"first")
    reported = collect(b, messages=1).messages[0][0]
    assert reported.address == a.address()
    b.send(reported, b"answer")
    assert collect(a, messages=1).messages == [(to_b, b"answer")]
    assert b.connect(a.address()) is reported


def test_both_sides_may_connect_first_and_meet(pair: tuple[Endpoint, Endpoint]) -> None:
    a, b = pair
    to_a = b.connect(a.address())
    to_b = a.connect(b.address())
    a.send(to_b, b"from a")
    b.send(to_a, b"from b")
    assert collect(b, messages=1).messages == [(to_a, b"from a")]
    assert collect(a, messages=1).messages == [(to_b, b"from b")]


def test_connecting_to_nobody_fails(wire: Wire, make: Make) -> None:
    a, gone = make("a"), make("gone")
    address = gone.address()
    gone.close()
    for nobody in (address, f"{wire.name}://cloverinfer-1-abc", f"{wire.name}://../x", "tcp://h:1"):
        with pytest.raises(TransportError):
            a.connect(nobody, timeout=5.0)


# -- prepare and put


def test_puts_move_what_the_index_says(pair: tuple[Endpoint, Endpoint]) -> None:
    a, b = pair
    draw = np.random.default_rng(1)
    source, target = a.register(1 << 16), b.register(1 << 16)
    peer = a.connect(b.address())
    array(source)[:] = draw.integers(1, 256, 1 << 16)
    want = np.zeros(1 << 16, np.uint8)
    for notice, length in enumerate([1, 3, 64, 1000, 4097]):
        at = draw.integers(0, (1 << 16) - length, 50)  # unaligned, overlapping
        to = draw.permutation(np.arange(1, (1 << 16) - length, length))[:40]
        ranges = a.prepare(peer, Slices(source, at, length), Slices(target.ref, to, length))
        count = min(len(to), 30)
        index = np.stack([draw.integers(0, 50, count), draw.permutation(len(to))[:count]], 1)
        for s, d in index:
            want[to[d] : to[d] + length] = array(source)[at[s] : at[s] + length]
        settle(a, a.put(ranges, index.astype(np.int32), notice))
    assert [n for _, n in collect(b, notices=5).notices] == [0, 1, 2, 3, 4]
    np.testing.assert_array_equal(array(target), want if b.capabilities.moves_data else 0)


def test_adjoining_pieces_arrive_whole(pair: tuple[Endpoint, Endpoint]) -> None:
    way = Way(*pair, nbytes=1 << 14, length=1 << 10)
    array(way.source)[:] = np.random.default_rng(2).integers(1, 256, 1 << 14)
    way.put(0, np.repeat(np.arange(16, dtype=np.int32)[:, None], 2, axis=1))
    collect(pair[1], notices=1)
    way.expect(array(way.source).copy())


@pytest.mark.parametrize(
    ("sources", "targets"), [((0, 1, 2), (1, 4, 5)), ((1, 4, 5), (0, 1, 2)), ((0, 2, 1), (0, 1, 2))]
)
def test_pieces_that_adjoin_on_one_side_only(
    pair: tuple[Endpoint, Endpoint], sources: tuple[int, ...], targets: tuple[int, ...]
) -> None:
    way = Way(*pair, nbytes=60, length=10)
    array(way.source)[:] = np.arange(1, 61)
    way.put(0, rows(*zip(sources, targets, strict=True)))
    collect(pair[1], notices=1)
    want = np.zeros((6, 10), np.uint8)
    want[list(targets)] = array(way.source).reshape(6, 10)[list(sources)]
    way.expect(want.reshape(60))


@pytest.mark.parametrize("nbytes", [1, 4096, 1 << 20, 64 << 20, 256 << 20])
def test_sizes(wire: Wire, pair: tuple[Endpoint, Endpoint], nbytes: int) -> None:
    if nbytes > wire.most:
        pytest.skip(f"{wire.name} keeps several copies of what is put")
    way = Way(*pair, nbytes=nbytes)
    whole = array(way.source)
    whole[:] = 77
    whole[:: max(nbytes // 97, 1)] = 5
    way.put(9)
    collect(pair[1], notices=1)
    way.expect(whole)


def test_empty_index_is_a_notice_alone(pair: tuple[Endpoint, Endpoint]) -> None:
    way = Way(*pair, nbytes=64)
    array(way.source)[:] = 1
    back = pair[1].connect(pair[0].address())
    for notice in (0, 1, 1 << 31, (1 << 32) - 1):
        way.put(notice, rows())
        assert collect(pair[1], notices=1).notices == [(back, notice)]
    assert not array(way.target).any()


def test_local_memory_may_be_reused_once_the_ticket_is_done(
    pair: tuple[Endpoint, Endpoint],
) -> None:
    way = Way(*pair, nbytes=1 << 20)
    array(way.source)[:] = 1
    way.put(1)
    array(way.source)[:] = 2
    collect(pair[1], notices=1)
    way.expect(np.full(1 << 20, 1, np.uint8))


def test_bad_arguments_are_refused_and_move_nothing(pair: tuple[Endpoint, Endpoint]) -> None:
    way = Way(*pair, nbytes=256, length=64)
    array(way.source)[:] = 1
    for index in (rows((0, 0), (4, 0)), rows((0, 0), (0, 4)), rows((-1, 0)), rows((0, -1))):
        with pytest.raises(ValueError, match="index row"):
            way.sender.put(way.ranges, index, 0)
    for index in (np.zeros((1, 2), np.int64), np.zeros((2, 3), np.int32), np.zeros(2, np.int32)):
        with pytest.raises(ValueError, match="index must"):
            way.sender.put(way.ranges, index, 0)
    for notice in (-1, 1 << 32, 1.5, "1", None):
        with pytest.raises(ValueError, match="32 bits"):
            way.sender.put(way.ranges, rows((0, 0)), notice)  # type: ignore[arg-type]
    assert not pair[1].poll(0.05)
    assert not array(way.target).any()


def test_notices_of_every_kind_of_integer(pair: tuple[Endpoint, Endpoint]) -> None:
    way = Way(*pair, nbytes=64)
    wanted = [0, 5, 7, (1 << 32) - 1]
    for number, kind in zip(wanted, (np.int32, np.int64, np.uint8, np.uint32), strict=True):
        way.put(kind(number))  # type: ignore[arg-type]
    arrived = [notice for _, notice in collect(pair[1], notices=4).notices]
    assert arrived == wanted
    assert {type(notice) for notice in arrived} == {int}


def test_bad_slices_are_refused(pair: tuple[Endpoint, Endpoint]) -> None:
    a, b = pair
    way = Way(a, b, nbytes=100)
    for bad in (offsets(0, 93), offsets(-1), offsets((1 << 63) - 1), offsets(-1 << 63)):
        for region in (way.source, way.target.ref):
            with pytest.raises(ValueError, match="outside"):
                Slices(region, bad, 8)
    for not_offsets in ([0], 0, None):
        with pytest.raises(ValueError, match="array"):
            Slices(way.source, not_offsets, 8)  # type: ignore[arg-type]
    for length in (-1, 8.0, 1 << 70):
        with pytest.raises(ValueError, match=r"length|outside"):
            Slices(way.source, offsets(0), length)  # type: ignore[arg-type]
    local, remote = Slices(way.source, offsets(0), 8), Slices(way.target.ref, offsets(0), 8)
    with pytest.raises(ValueError, match="differ"):
        a.prepare(way.peer, local, Slices(way.target.ref, offsets(0), 9))
    with pytest.raises(ValueError, match="local"):
        a.prepare(way.peer, Slices(way.target, offsets(0), 8), remote)
    with pytest.raises(ValueError, match="remote"):
        a.prepare(way.peer, local, Slices(way.source.ref, offsets(0), 8))
    with pytest.raises(ValueError, match="integers"):
        a.prepare(way.peer, Slices(way.source, np.array([0.5]), 8), remote)
    for ref in (
        RegionRef(b.address(), "g999", 100),
        RegionRef(b.address(), "g" + 30 * "9", 100),
        RegionRef(b.address(), way.target.ref.name, 1 << 20),
    ):
        assert ref.name in way_error(a, way.peer, local, Slices(ref, offsets(0), 8))
    assert not array(way.target).any()


def test_put_of_too_many_bytes_is_refused_up_front(pair: tuple[Endpoint, Endpoint]) -> None:
    way = Way(*pair, nbytes=16 << 20)
    array(way.source)[:] = 1
    times = way.sender.capabilities.max_put_bytes // (16 << 20) + 1
    with pytest.raises(TransportError, match=str(way.sender.capabilities.max_put_bytes)):
        way.sender.put(way.ranges, np.zeros((times, 2), np.int32), 1)
    assert not pair[1].poll(0.05)
    assert not array(way.target).any()


# -- fences


def test_a_fenced_peer_s_bytes_stay_and_it_puts_again_once_connected(
    wire: Wire, pair: tuple[Endpoint, Endpoint]
) -> None:
    sender, receiver = pair
    way = Way(sender, receiver, nbytes=4096)
    array(way.source)[:] = 7
    way.put(1)
    collect(receiver, notices=1)
    if wire.name == "nixl":
        with pytest.raises(TransportError, match="cannot be fenced"):
            receiver.fence(sender.address())
        return
    receiver.fence(sender.address())
    way.expect(np.full(4096, 7, np.uint8))
    until = time.monotonic() + PATIENCE
    while way_again(way, sender, receiver) is None:
        assert time.monotonic() < until
    assert [notice for _, notice in collect(receiver, notices=1).notices] == [2]


def way_again(way: Way, sender: Endpoint, receiver: Endpoint) -> Ticket | None:
    """A put that ends well; None where the sender has not seen the end of its link yet."""
    sender.connect(receiver.address())
    try:
        ticket = way.start(2)
        finish(sender, ticket)
    except TransportError:
        return None
    return ticket if ticket.error is None else None
