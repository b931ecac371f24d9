"""Turns a cluster's configuration into the nodes to start."""

from __future__ import annotations

import os
import secrets

import msgspec

from ..config.cluster import ClusterConfig, ModelConfig
from ..nodes import config as roles
from ..nodes.config import NodeConfig


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def transport_of(cluster: ClusterConfig) -> str:
    if cluster.transport != "auto":
        return cluster.transport
    return "inproc" if cluster.executor == "local" else "shm"


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


def node_configs(cluster: ClusterConfig, model: ModelConfig) -> list[NodeConfig]:
    """One config per node; names are ``<role>-<index>``."""
    counts = role_counts(cluster)
    names = {role: tuple(f"{role}-{i}" for i in range(count)) for role, count in counts.items()}
    threads = cluster.threads or usable_cores()
    return [
        NodeConfig(
            name=name,
            role=role,
            model=model,
            cache=cluster.cache,
            transport=transport_of(cluster),
            network=cluster.network,
            attention_backend=cluster.attention_backend,
            threads=threads,
            lanes=cluster.scheduler.num_wavefronts,
            max_rows=cluster.scheduler.max_num_seqs,
            dense_nodes=names.get(roles.DENSE, ()),
            attention_nodes=names.get(roles.ATTENTION, ()),
        )
        for role in counts
        for name in names[role]
    ]
