"""What a node needs to take KV transfers into its pool: a receiver, and rings where it converts."""

from __future__ import annotations

from ..attention.base import AttentionBackend
from ..core.errors import ConfigError, DeadlineError, TransportError
from ..kvcache.checksum import BlockSums
from ..wire.messages import Fence, Fenced, Message, encode
from .base import Node, log
from .config import PREFILL
from .pool import Pool
from .staging import Staging, is_staged
from .stores import store_of
from .transfers import TransferReceiver

MIB = 1 << 20
FENCE_SECONDS = 0.5
"""How long fencing a writer may keep the node from its work, before it tries again."""


class Inlet:
    """Of one node, made with its pool; ``meet`` once the node knows its peers."""

    def __init__(self, node: Node, backend: AttentionBackend, pool: Pool) -> None:
        self._node = node
        self._direct = backend.capabilities.direct_puts
        checksums = node.config.network.checksum != "none"
        layout, register = pool.layout, node.endpoint.register
        self._staging = Staging(
            layout,
            lambda nbytes: pool.copies.lock(register(nbytes)),
            node.tell,
            store_of(pool, backend),
            node.later,
        )
        self.receiver = TransferReceiver(
            node.config.name,
            layout,
            node.report,
            self._staging,
            BlockSums(layout, pool.host) if checksums else None,
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
