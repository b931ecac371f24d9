"""Makes the node that a config describes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..models import resolve_model
from ..transport import create_endpoint
from . import config as roles
from .attention import AttentionNode
from .base import Node
from .config import NodeConfig
from .dense import DecodeDenseNode
from .gate import Gate, OpenGate
from .gpu import NodeDevice
from .local import ColocatedNode, DecodeNode
from .prefill import PrefillNode

_CLASSES: dict[str, Callable[..., Node]] = {
    roles.PREFILL: PrefillNode,
    roles.DENSE: DecodeDenseNode,
    roles.ATTENTION: AttentionNode,
    roles.DECODE: DecodeNode,
    roles.COLOCATED: ColocatedNode,
}


def build_node(config: NodeConfig, gate: Gate | OpenGate | None = None) -> Node:
    """The node, with weights and pool; a ``CloverError`` says why it cannot be made."""
    model = resolve_model(config.model, device=torch.device(config.device).type)
    endpoint = create_endpoint(config.transport, config.name, config.network)
    try:
        with NodeDevice(config.device).starting():
            return _CLASSES[config.role](config, model, endpoint, gate or OpenGate())
    except BaseException:
        endpoint.close()
        raise
