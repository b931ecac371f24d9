"""Turns a cluster's configuration into the nodes to start."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

import msgspec

from ..config.cluster import CacheConfig, ClusterConfig, ModelConfig
from ..core.errors import ConfigError
from ..nodes import config as roles
from ..nodes.config import NodeConfig
from ..transport.choice import Choice, Offer, choose_for_all, reason_against
from .devices import backend_at, is_gpu, node_devices, nodes_beside
from .placement import Placement, network_at


def ignored_settings(cluster: ClusterConfig) -> list[str]:
    """What was asked for and has no effect here, in sentences."""
    if cluster.scheduler.async_scheduling and cluster.topology == "pda":
        return [
            "scheduler.async_scheduling has no effect in topology pda: steps of dense nodes are "
            "not sent ahead (colocated and pd have nodes that take it)"
        ]
    return []


def choose_transport(
    cluster: ClusterConfig, placement: Placement, devices: Mapping[str, str] | None = None
) -> Choice:
    """The first transport that connects every two parts of the cluster that exchange data, or the
    one that ``cluster.transport`` names; ``ConfigError`` where it cannot connect them.

    ``devices``: as of ``node_devices``; None: the host's memory is all there is.
    """
    pairs = _pairs(cluster, placement, devices or {})
    if cluster.transport == "auto":
        choice = choose_for_all(pairs)
        if not choice.transport:
            reasons = "; ".join(f"{one.transport}: {one.reason}" for one in choice.passed_over)
            raise ConfigError(f"no transport connects all nodes: {reasons}")
        return choice
    # With another executor it is the nodes that join Ray.
    reason = "" if cluster.transport == "ray" else reason_against(cluster.transport, pairs)
    if reason:
        raise ConfigError(f"cluster.transport {cluster.transport} cannot be used: {reason}")
    return Choice(cluster.transport)


def _pairs(
    cluster: ClusterConfig, placement: Placement, devices: Mapping[str, str]
) -> list[tuple[Offer, Offer]]:
    """Who exchanges data with whom: the scheduler with every node, and the roles of a request's
    way with one another."""
    names = node_names(cluster)
    ends = {name: place.offer for name, place in placement.nodes.items()}
    for pair in _MOVERS:
        for name in (name for role in pair if set(pair) <= set(names) for name in names[role]):
            ends[name] = _on_device(ends[name], devices.get(name, "cpu"))
    pairs = [(placement.scheduler.offer, end) for end in ends.values()]
    for one, other in _PARTNERS:
        pairs += [(ends[a], ends[b]) for a in names.get(one, ()) for b in names.get(other, ())]
    return pairs


_MOVERS = ((roles.PREFILL, roles.DECODE), (roles.PREFILL, roles.ATTENTION))
"""Roles that move blocks from pool to pool."""
_PARTNERS = (*_MOVERS, (roles.DENSE, roles.ATTENTION))


def _on_device(end: Offer, device: str) -> Offer:
    """An end whose pool is on ``device``; what else it exchanges is in the host's memory."""
    if not is_gpu(device):
        return end
    index = int(device.partition(":")[2])
    return msgspec.structs.replace(end, memory=("host", "cuda"), device=index)


def with_secret(cluster: ClusterConfig) -> ClusterConfig:
    """The same, with a fresh secret that its nodes share where none is configured."""
    if cluster.network.secret is not None:
        return cluster
    network = msgspec.structs.replace(cluster.network, secret=secrets.token_hex(32))
    return msgspec.structs.replace(cluster, network=network)


def role_counts(cluster: ClusterConfig) -> dict[str, int]:
    """How many nodes of each role the topology has."""
    if cluster.topology == "colocated":
        return {roles.COLOCATED: 1}
    if cluster.topology == "pd":
        return {
            roles.PREFILL: cluster.num_prefill_workers,
            roles.DECODE: cluster.num_decode_dense_nodes,
        }
    return {
        roles.PREFILL: cluster.num_prefill_workers,
        roles.DENSE: cluster.num_decode_dense_nodes,
        roles.ATTENTION: cluster.num_attention_nodes,
    }


def node_names(cluster: ClusterConfig) -> dict[str, tuple[str, ...]]:
    """Names by role: ``<role>-<index>``."""
    counts = role_counts(cluster)
    return {role: tuple(f"{role}-{i}" for i in range(count)) for role, count in counts.items()}


def node_configs(
    cluster: ClusterConfig, model: ModelConfig, placement: Placement
) -> list[NodeConfig]:
    """One config per node, on the transport that ``cluster`` names."""
    assert cluster.transport != "auto", "choose a transport first"
    names = node_names(cluster)
    places = placement.nodes
    devices = node_devices(cluster, model, names, placement)
    beside = {name: nodes_beside(devices, name, placement) for name in devices}
    attending = names.get(roles.ATTENTION, ())
    limits = cluster.scheduler
    return [
        NodeConfig(
            name=name,
            role=role,
            model=_model_of(role, model),
            cache=_cache_of(role, cluster.cache),
            transport=cluster.transport,
            network=network_at(cluster.network, places[name], devices[name]),
            attention_backend=backend_at(cluster, devices[name]),
            layer_loop=cluster.layer_loop,
            batch_invariant=cluster.batch_invariant,
            prompt_attention=cluster.prompt_attention,
            threads=cluster.threads or places[name].cores,
            lanes=limits.num_wavefronts,
            max_rows=limits.rows,
            max_tokens=limits.max_num_batched_tokens if limits.enable_chunked_prefill else None,
            device=devices[name],
            device_nodes=len(beside[name]),
            device_halves=sum(other not in attending for other in beside[name]),
            dense_nodes=names.get(roles.DENSE, ()),
            attention_nodes=names.get(roles.ATTENTION, ()),
        )
        for role in names
        for name in names[role]
    ]


def _model_of(role: str, model: ModelConfig) -> ModelConfig:
    if role != roles.PREFILL or model.prefill_dtype is None:
        return model
    return msgspec.structs.replace(model, dtype=model.prefill_dtype)


def _cache_of(role: str, cache: CacheConfig) -> CacheConfig:
    """A prefill node's own block size, its pool for as many tokens as the others'."""
    size = cache.prefill_block_size
    if role != roles.PREFILL or size is None:
        return cache
    blocks = cache.num_blocks
    if blocks is not None:
        blocks = -(-blocks * cache.block_size // size)
    return msgspec.structs.replace(cache, block_size=size, num_blocks=blocks)
