"""The far side of a check: does what the near side asks, one ask after the other.

``python -m cloverinfer.verify.far ADDRESS`` is the second process of a check of one host; its
network settings come on standard input, where no other user sees the secret.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable

import msgspec
import numpy as np

from ..config.network import NetworkConfig
from ..core.errors import CloverError, TransportError, describe
from ..transport import create_endpoint, join
from ..transport.choice import offer
from .host import findings
from .memory import num_gpus
from .messages import ACK, LATENCY_BYTES, Answer, Ask, pattern
from .sides import Control, Data

_EMPTY = np.zeros((0, 2), np.int32)


class Far:
    """Serves one near side until it says ``end``."""

    def __init__(self, control: Control, network: NetworkConfig) -> None:
        self._control, self._network = control, network
        self._data: Data | None = None
        self._verdict: bool | None = None

    def serve(self) -> bool:
        """The near side's verdict; ``TransportError`` where it is gone or silent."""
        try:
            while self._verdict is None:
                self._control.say(self._answer(self._control.hear(Ask)))
            return self._verdict
        finally:
            self._close()

    def _answer(self, ask: Ask) -> Answer:
        verbs: dict[str, Callable[[Ask], Answer]] = {
            "findings": self._findings,
            "offer": self._offer,
            "gpus": self._gpus,
            "open": self._open,
            "meet": self._meet,
            "check": self._check,
            "fill": self._fill,
            "echo": self._echo,
            "count": self._count,
            "close": self._close_data,
            "end": self._end,
        }
        if ask.verb not in verbs:
            return Answer(error=f"this side knows no {ask.verb!r}: install the same CloverInfer")
        try:
            return verbs[ask.verb](ask)
        except CloverError as error:  # the near side's to report
            return Answer(error=describe(error))

    def _findings(self, ask: Ask) -> Answer:
        return Answer(findings=findings(self._network))

    def _offer(self, ask: Ask) -> Answer:
        return Answer(offer=offer(f"{socket.gethostname()} there"))

    def _gpus(self, ask: Ask) -> Answer:
        return Answer(gpus=num_gpus())

    def _open(self, ask: Ask) -> Answer:
        self._close()
        join(ask.transport)
        endpoint = create_endpoint(ask.transport, "verify-far", self._network)
        try:
            self._data = Data(endpoint, ask.nbytes, self._control, ask.device)
        except CloverError:
            endpoint.close()
            raise
        return Answer(address=endpoint.address(), region=self._data.region.ref)

    def _opened(self) -> Data:
        if self._data is None:
            raise TransportError("no transport is open")
        return self._data

    def _meet(self, ask: Ask) -> Answer:
        if ask.region is None:
            raise TransportError("a meeting needs a region")
        self._opened().meet(ask.address, ask.region)
        return Answer()

    def _check(self, ask: Ask) -> Answer:
        """Whether the pattern came."""
        data = self._opened()
        data.notice()
        return Answer(wrong=data.memory.wrong(pattern(ask.nbytes, ask.seed)))

    def _fill(self, ask: Ask) -> Answer:
        """Puts the pattern into the near side's region."""
        data = self._opened()
        data.memory.write(pattern(ask.nbytes, ask.seed))
        data.settle(data.put(*data.way(ask.nbytes, ask.length), ask.seed))
        return Answer()

    def _echo(self, ask: Ask) -> Answer:
        """Answers so many notices by puts, each with the same notice."""
        data = self._opened()
        ranges, index = data.way(LATENCY_BYTES, LATENCY_BYTES)
        for _ in range(ask.count):
            data.settle(data.put(ranges, index, data.notice()))
        return Answer()

    def _count(self, ask: Ask) -> Answer:
        """One notice back once so many have come."""
        data = self._opened()
        ranges, _ = data.way(LATENCY_BYTES, LATENCY_BYTES)
        for _ in range(ask.count):
            data.notice()
        data.settle(data.put(ranges, _EMPTY, ACK))
        return Answer()

    def _close_data(self, ask: Ask) -> Answer:
        self._close()
        return Answer(closed=True)

    def _end(self, ask: Ask) -> Answer:
        self._verdict = ask.good
        return Answer()

    def _close(self) -> None:
        data, self._data = self._data, None
        if data is not None:
            data.close()


def main(address: str) -> int:
    given = msgspec.json.decode(sys.stdin.buffer.read(), type=list[NetworkConfig])
    network, talk = given
    endpoint = create_endpoint(address.partition("://")[0], "verify-far", talk)
    try:
        control = Control(endpoint, endpoint.connect(address))
        control.say(Answer())
        Far(control, network).serve()
    except TransportError as error:
        print(f"error: {describe(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # the near side tells
        return 130
    finally:
        endpoint.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
