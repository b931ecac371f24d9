"""The attention node's hops without Python: what it hands over of a step, and gets back at its end.

It owns no step: tensors that are handed over stay with the node until ``end``.
"""

from __future__ import annotations

from dataclasses import dataclass

from .. import _native
from ..attention.base import AttentionBackend
from ..models.base import QKV
from ..transport import Endpoint, Peer
from ..transport.native import MailboxWire, NearWire
from ..wire.notices import LAYER_BITS
from .gate import Gate, OpenGate
from .hop import HopShape
from .layer_loop import Rows, alike, qkv_addresses

NOWHERE = 0


@dataclass(frozen=True)
class Hops:
    """A step as its hops name it."""

    source: int
    """Number of the dense node."""
    notice: int
    """Of the first layer."""


class Answers:
    """Over ``inproc`` a dense node's own thread asks for answers; over ``shm`` hops are answered in
    ``serve``, which reads the node's mailbox. What is not answered here arrives as ever.
    """

    def __init__(
        self,
        answerer: _native.Answerer,
        wire: NearWire | MailboxWire,
    ) -> None:
        self._answerer, self._wire = answerer, wire
        self._known: dict[int, tuple[list[int], _native.MailboxWriter]] = {}
        self._server: _native.ShmServer | None = None
        if isinstance(wire, NearWire):
            wire.offer(answerer)
        else:
            self._server = _native.ShmServer(
                reader=wire.reader, answerer=answerer, layer_bits=LAYER_BITS
            )

    @classmethod
    def of(
        cls,
        backend: AttentionBackend,
        shape: HopShape,
        endpoint: Endpoint,
        gate: Gate | OpenGate,
    ) -> Answers | None:
        """None where backend or transport have no way, or layers are not alike."""
        attention, wire = backend.native(), endpoint.native()
        if attention is None or wire is None:
            return None
        if alike(shape.specs, shape.num_heads, shape.dtype) is None:
            return None
        answerer = _native.Answerer(table=attention.table, heads=shape.num_heads, gate=gate.native)
        return cls(answerer, wire)

    @property
    def serves(self) -> bool:
        """Whether hops are answered in ``serve``."""
        return self._server is not None

    def begin(self, hops: Hops, rows: Rows, into: QKV, out: int, told: int = NOWHERE) -> None:
        """Answers hops of a step from now on. ``into``: where a wire leaves q, k and v; ``out``:
        address of where output goes; ``told``: of the dense node's record of the step."""
        self._answerer.begin(
            source=hops.source,
            notice=hops.notice,
            rows=rows,
            into=qkv_addresses(into),
            out=out,
            told=told,
        )

    def answer(self, hops: Hops, layer: int) -> bool:
        """One hop, which the node has polled; False: it is the node's own to answer."""
        return self._server is not None and self._server.answer(hops.source, hops.notice | layer)

    def end(self, hops: Hops) -> tuple[int, float]:
        """Layers that were answered, and the seconds of that; nothing is answered afterwards."""
        return self._answerer.end(source=hops.source, notice=hops.notice)

    def know(self, source: int, peer: Peer) -> None:
        """Whose hops come by which rings: others arrive as ever."""
        if not isinstance(self._wire, MailboxWire) or self._server is None:
            return
        rings, writer = self._wire.rings_of(peer), self._wire.writer_to(peer)
        if writer is not None and self._known.get(source) != (rings, writer):
            self._known[source] = rings, writer
            self._server.know(source=source, rings=rings, writer=writer)

    def serve(self, timeout: float) -> None:
        """Answers hops until something else arrives, or for ``timeout`` seconds."""
        assert self._server is not None
        self._server.serve(timeout)

    def close(self) -> None:
        """Waits for the answer under way; the pool may go then."""
        self._answerer.close()
