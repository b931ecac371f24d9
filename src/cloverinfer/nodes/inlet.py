"""What a node needs to take KV transfers into its pool: a receiver, and rings where it converts."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from ..attention.base import AttentionBackend
from ..core.errors import ConfigError, DeadlineError, TransportError
from ..kvcache.checksum import BlockSums
from ..kvcache.convert import Array, PoolWriter, convert
from ..kvcache.layout import CANONICAL_LAYOUT, SCALE_BYTES, PoolLayout
from ..transport import Region
from ..wire.messages import Fence, Fenced, Message, encode
from .base import Node, log
from .config import PREFILL
from .staging import Staging, Store, is_staged
from .transfers import TransferReceiver

MIB = 1 << 20
FENCE_SECONDS = 0.5
"""How long fencing a writer may keep the node from its work, before it tries again."""


def layout_name_of(backend: AttentionBackend) -> str:
    """Peers may put straight into pools of the canonical layout alone."""
    able = backend.capabilities
    return CANONICAL_LAYOUT if able.direct_puts else f"{able.name}'s own"


class Inlet:
    """Of one node, made with its pool; ``meet`` once the node knows its peers."""

    def __init__(
        self, node: Node, backend: AttentionBackend, pool: Region, layout: PoolLayout
    ) -> None:
        self._node = node
        self._direct = backend.capabilities.direct_puts
        checksums = node.config.network.checksum != "none"
        self._staging = Staging(
            layout,
            node.endpoint.register,
            node.tell,
            PoolWriter(layout, pool.buffer).store if self._direct else _appender(backend, layout),
        )
        self.receiver = TransferReceiver(
            node.config.name,
            layout,
            node.report,
            self._staging,
            BlockSums(layout, pool.buffer) if checksums else None,
        )

    def meet(self) -> None:
        """``ConfigError`` for a prefill node whose blocks this pool can never take."""
        own = self._node.peer_info()
        senders = [peer for peer in self._node.peers.values() if peer.role == PREFILL]
        staged = [peer for peer in senders if is_staged(peer, own)]
        for peer in staged if not self._direct else ():
            assert peer.layout is not None
            assert own.layout is not None
            mine, theirs = own.layout.specs[0].kv_heads, peer.layout.specs[0].kv_heads
            if mine != theirs:
                raise ConfigError(
                    f"kv_heads are {theirs} on {peer.name} and {mine} here, and {own.layout_name} "
                    "layout takes whole tokens only"
                )
        self._staging.meet(senders, staged, self._node.config.network.staging_mib * MIB)

    def handle(self, source: str, message: Message) -> bool:
        """Takes what is about transfers, from the node called ``source``; False for the rest."""
        if not isinstance(message, Fence):
            return self.receiver.handle(source, message)
        self._fence(message)
        return True

    def _fence(self, fence: Fence) -> None:
        """Without an answer the blocks stay taken, which costs room and no wrong token."""
        node = self._node
        try:
            node.endpoint.fence(node.peers[fence.writer].address, FENCE_SECONDS)
        except DeadlineError:
            own = node.endpoint.connect(node.endpoint.address())
            node.endpoint.send(own, encode(fence))  # what has arrived meanwhile comes first
        except TransportError as problem:
            log.warning("%s: blocks stay taken: %s", node.config.name, problem)
        else:
            node.report(Fenced(node.config.name, fence.number))


def _appender(backend: AttentionBackend, layout: PoolLayout) -> Store:
    """Stores tokens through the backend, which alone knows its pool's layout."""

    def store(
        layer: int, k_tnd: Array, v_tne: Array, slots_t: npt.NDArray[np.int64], first_head: int
    ) -> None:
        assert first_head == 0, "heads were checked at the meeting"
        stored = layout.specs[layer].dtype
        if stored in SCALE_BYTES:  # backends take floats
            k_tnd, v_tne = (convert(x, stored, "float32") for x in (k_tnd, v_tne))
            stored = "float32"
        dtype = getattr(torch, stored)
        k, v = (torch.from_numpy(np.ascontiguousarray(x)) for x in (k_tnd, v_tne))
        backend.append(layer, k.view(dtype), v.view(dtype), torch.from_numpy(slots_t))

    return store
