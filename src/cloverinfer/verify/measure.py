"""One transport: a pattern both ways, then latency and bandwidth, each as a finding."""

from __future__ import annotations

from collections.abc import Callable

from ..config.network import NetworkConfig
from ..core.errors import DeadlineError, TransportError, describe
from .near import Exchange, Near
from .report import FAIL, NOTE, OK, Finding
from .sides import STEP

LARGE, SMALL = 256 << 20, 1 << 20
"""Bytes of the puts whose bandwidth is measured."""
_REGIONS = (LARGE, 32 << 20, SMALL)
"""Bytes of the regions: the first for which there is room."""
PIECE = 40_004
"""Bytes of a pattern's pieces: no multiple of a page, of a line or of eight."""
PATTERN = 200 * PIECE
ROUNDS = 2000
SECONDS = 1.0
"""Time for which one figure is measured, about."""
MOST_PUTS = 64


def check_transport(
    near: Near,
    transport: str,
    network: NetworkConfig,
    emit: Callable[[Finding], None],
    progress: Callable[[str], None],
) -> None:
    """Emits at least one finding. ``TransportError`` where the other side itself is gone, not only
    this transport's way to it."""
    try:
        progress(f"{transport}: meeting")
        with _exchange(near, transport, network) as exchange:
            progress(f"{transport}: moving a pattern both ways")
            emit(_pattern(exchange, transport))
            progress(f"{transport}: measuring")
            emit(_latency(exchange, transport))
            for nbytes in (SMALL, LARGE):
                emit(_bandwidth(exchange, transport, nbytes))
    except TransportError as error:
        emit(Finding(FAIL, transport, describe(error)))
        near.start_over()


def _exchange(near: Near, transport: str, network: NetworkConfig) -> Exchange:
    for nbytes in _REGIONS[:-1]:
        try:
            return Exchange(near, transport, network, nbytes)
        except DeadlineError:
            raise
        except TransportError:
            near.start_over()  # the memory may be too small; a smaller region shows it
    return Exchange(near, transport, network, _REGIONS[-1])


def _pattern(exchange: Exchange, transport: str) -> Finding:
    nbytes = min(PATTERN, exchange.nbytes // PIECE * PIECE)
    wrong = exchange.moved(nbytes, PIECE)
    moved = f"{nbytes:,} bytes each way in pieces of {PIECE:,}"
    if wrong:
        return Finding(FAIL, transport, f"{wrong:,} bytes came wrong of {moved}")
    return Finding(OK, transport, f"every byte right of {moved}", figures={"bytes": float(nbytes)})


def _latency(exchange: Exchange, transport: str) -> Finding:
    trial = exchange.latency(20).median
    seen = exchange.latency(max(20, min(ROUNDS, int(SECONDS / (2 * trial)))))
    times = ", ".join(
        f"{name} {1e6 * seconds:.1f} us"
        for name, seconds in (("min", seen.least), ("median", seen.median), ("p99", seen.p99))
    )
    figures = {"min_s": seen.least, "median_s": seen.median, "p99_s": seen.p99}
    return Finding(OK, transport, f"4 KB one way (half a round trip): {times}", figures=figures)


def _bandwidth(exchange: Exchange, transport: str, nbytes: int) -> Finding:
    what = f"{nbytes >> 20} MB"
    if nbytes > exchange.nbytes:
        text = f"{what} not tried: there is no room for regions of that size"
        return Finding(NOTE, transport, text, "make /dev/shm or the memory larger")
    if nbytes / exchange.bandwidth(SMALL, SMALL, 1) > STEP / 2:
        return Finding(NOTE, transport, f"{what} not tried: it would take too long")
    trial = exchange.bandwidth(nbytes, nbytes, 1)
    count = max(1, min(MOST_PUTS, int(SECONDS * trial / nbytes)))
    rate = exchange.bandwidth(nbytes, nbytes, count)
    figures = {"bytes": float(nbytes), "bytes_per_s": rate}
    return Finding(OK, transport, f"{what} puts: {rate / 1e9:.2f} GB/s", figures=figures)
