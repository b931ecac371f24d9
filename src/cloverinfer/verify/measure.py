"""One transport: a pattern both ways, then latency and bandwidth, each as a finding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..config.network import NetworkConfig
from ..core.errors import DeadlineError, TransportError, describe
from ..transport import capabilities, transport_names
from .memory import num_gpus
from .messages import Ask
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
    """Emits at least one finding; where both sides have GPUs and the transport moves their memory,
    also what it does from GPU to GPU. ``TransportError`` where the other side itself is gone, not
    only this transport's way to it."""
    _check(_Under(near, transport, network), emit, progress)
    gpus = _gpus(near, transport)
    if gpus is not None:
        _check(_Under(near, transport, network, gpus), emit, progress)


@dataclass(frozen=True)
class _Under:
    """What is under check."""

    near: Near
    transport: str
    network: NetworkConfig
    gpus: tuple[int, int] | None = None

    @property
    def subject(self) -> str:
        if self.gpus is None:
            return self.transport
        return f"{self.transport} from GPU {self.gpus[0]} to GPU {self.gpus[1]}"

    def exchange(self) -> Exchange:
        """With regions as large as there is room for."""
        for nbytes in _REGIONS[:-1]:
            try:
                return self._exchange(nbytes)
            except DeadlineError:
                raise
            except TransportError:
                self.near.start_over()  # the memory may be too small; a smaller region shows it
        return self._exchange(_REGIONS[-1])

    def _exchange(self, nbytes: int) -> Exchange:
        return Exchange(self.near, self.transport, self.network, nbytes, self.gpus)


def _check(under: _Under, emit: Callable[[Finding], None], progress: Callable[[str], None]) -> None:
    subject = under.subject
    try:
        progress(f"{subject}: meeting")
        with under.exchange() as exchange:
            progress(f"{subject}: moving a pattern both ways")
            emit(_pattern(exchange, subject))
            progress(f"{subject}: measuring")
            emit(_latency(exchange, subject))
            for nbytes in (SMALL, LARGE):
                emit(_bandwidth(exchange, subject, nbytes))
    except TransportError as error:
        emit(Finding(FAIL, subject, describe(error)))
        under.near.start_over()


def _gpus(near: Near, transport: str) -> tuple[int, int] | None:
    """Our first, and the other side's last: two different ones where one host has several. None
    where a side has none, or the transport does not move their memory."""
    if transport not in transport_names() or "cuda" not in capabilities(transport).memory:
        return None
    theirs = near.ask(Ask("gpus")).gpus
    return (0, theirs - 1) if theirs and num_gpus() else None


def _pattern(exchange: Exchange, subject: str) -> Finding:
    nbytes = min(PATTERN, exchange.nbytes // PIECE * PIECE)
    wrong = exchange.moved(nbytes, PIECE)
    moved = f"{nbytes:,} bytes each way in pieces of {PIECE:,}"
    if wrong:
        return Finding(FAIL, subject, f"{wrong:,} bytes came wrong of {moved}")
    return Finding(OK, subject, f"every byte right of {moved}", figures={"bytes": float(nbytes)})


def _latency(exchange: Exchange, subject: str) -> Finding:
    trial = exchange.latency(20).median
    seen = exchange.latency(max(20, min(ROUNDS, int(SECONDS / (2 * trial)))))
    times = ", ".join(
        f"{name} {1e6 * seconds:.1f} us"
        for name, seconds in (("min", seen.least), ("median", seen.median), ("p99", seen.p99))
    )
    figures = {"min_s": seen.least, "median_s": seen.median, "p99_s": seen.p99}
    return Finding(OK, subject, f"4 KB one way (half a round trip): {times}", figures=figures)


def _bandwidth(exchange: Exchange, subject: str, nbytes: int) -> Finding:
    what = f"{nbytes >> 20} MB"
    if nbytes > exchange.nbytes:
        text = f"{what} not tried: there is no room for regions of that size"
        return Finding(NOTE, subject, text, "make /dev/shm or the memory larger")
    if nbytes / exchange.bandwidth(SMALL, SMALL, 1) > STEP / 2:
        return Finding(NOTE, subject, f"{what} not tried: it would take too long")
    trial = exchange.bandwidth(nbytes, nbytes, 1)
    count = max(1, min(MOST_PUTS, int(SECONDS * trial / nbytes)))
    rate = exchange.bandwidth(nbytes, nbytes, count)
    figures = {"bytes": float(nbytes), "bytes_per_s": rate}
    return Finding(OK, subject, f"{what} puts: {rate / 1e9:.2f} GB/s", figures=figures)
