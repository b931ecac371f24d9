"""Which device each node computes on. Knows roles and what hosts have; measures nothing, so that
the answer is the same whenever it is asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import msgspec

from ..config.cluster import CPU_ROWS, GPU_ROWS, ClusterConfig, ModelConfig, SchedulerConfig
from ..core.errors import ConfigError
from ..nodes import config as roles
from ..scheduler.records import DENSE_ROLES
from .placement import Place, Placement

GPU_ROLES = frozenset({roles.COLOCATED, roles.PREFILL, roles.DECODE, roles.DENSE, roles.ATTENTION})
"""Roles whose nodes can compute on a GPU."""
_DECODE_ATTENTION = frozenset({roles.COLOCATED, roles.DECODE, roles.ATTENTION})
"""Roles that attend for decode steps, with the backend that the cluster names."""
_HOST_BACKENDS = ("cpu", "torch")


def node_devices(
    cluster: ClusterConfig,
    model: ModelConfig,
    names: Mapping[str, tuple[str, ...]],
    placement: Placement,
) -> dict[str, str]:
    """``cpu`` or ``cuda:N`` for every node, whose names are given by role: the GPUs of its host in
    turn, or the one that ``cluster.device`` names. ``ConfigError`` where that cannot be.
    """
    turns: Counter[str] = Counter()
    devices: dict[str, str] = {}
    for role in names:
        for name in names[role]:
            place = placement.nodes[name]
            device = "cpu"
            if _wants_gpu(cluster, model, role):
                device = _device_at(cluster.device, name, place, turns)
            devices[name] = device
            _check_backend(cluster, role, name, device, place)
            _check_cache(cluster, name, device)
    if cluster.device.startswith("cuda") and not any(map(is_gpu, devices.values())):
        raise ConfigError(_nothing_there(cluster))
    return devices


def is_gpu(device: str) -> bool:
    return device != "cpu"


def nodes_beside(devices: Mapping[str, str], name: str, placement: Placement) -> list[str]:
    """Names of the nodes that share the device of the node called ``name``, its own included."""
    host, device = placement.nodes[name].offer.host, devices[name]
    return [
        other
        for other, place in placement.nodes.items()
        if devices[other] == device and place.offer.host == host
    ]


def backend_at(cluster: ClusterConfig, device: str) -> str:
    """The attention backend of a node on ``device``: prefill nodes on a GPU attend there, whatever
    backend the decode nodes have."""
    return "cuda" if is_gpu(device) else cluster.attention_backend


def device_hint(cluster: ClusterConfig, model: ModelConfig, gpus: int) -> str:
    """``cuda`` where nodes of this host, which has so many GPUs, would be on one; else ``cpu``."""
    names = GPU_ROLES if gpus or cluster.device.startswith("cuda") else ()
    return "cuda" if any(_wants_gpu(cluster, model, role) for role in names) else "cpu"


def with_dtype(model: ModelConfig, dtype: str, devices: Mapping[str, str]) -> ModelConfig:
    """``model`` with the type that it was resolved to, where nodes are on different devices, which
    would each choose for themselves."""
    if model.dtype != "auto" or not any(map(is_gpu, devices.values())):
        return model
    return msgspec.structs.replace(model, dtype=dtype)


def with_rows(
    scheduler: SchedulerConfig, names: Mapping[str, tuple[str, ...]], devices: Mapping[str, str]
) -> SchedulerConfig:
    """``scheduler`` with the ``max_num_seqs`` of the devices that decode, where it says none."""
    if scheduler.max_num_seqs is not None:
        return scheduler
    decoding = [name for role in names if role in DENSE_ROLES for name in names[role]]
    on_gpus = all(is_gpu(devices[name]) for name in decoding)
    return msgspec.structs.replace(scheduler, max_num_seqs=GPU_ROWS if on_gpus else CPU_ROWS)


def _wants_gpu(cluster: ClusterConfig, model: ModelConfig, role: str) -> bool:
    if cluster.device == "cpu" or role not in GPU_ROLES:
        return False
    if model.quantization not in (None, "fp8"):
        if cluster.device == "auto":
            return False
        raise ConfigError(
            f"model.quantization {model.quantization} is for CPUs, and cluster.device is "
            f"{cluster.device}: leave either out"
        )
    return not (role in _DECODE_ATTENTION and cluster.attention_backend in _HOST_BACKENDS)


def _device_at(wanted: str, name: str, place: Place, turns: Counter[str]) -> str:
    if not place.gpus:
        if wanted == "auto":
            return "cpu"
        raise ConfigError(f"cluster.device {wanted}: none for {name}: {place.no_gpu}")
    if ":" in wanted:
        index = int(wanted.partition(":")[2])
        if index >= place.gpus:
            raise ConfigError(
                f"cluster.device {wanted}: the host of {name} has {place.gpus} GPUs, "
                f"cuda:0 to cuda:{place.gpus - 1}"
            )
        return f"cuda:{index}"
    index = turns[place.offer.host] % place.gpus
    turns[place.offer.host] += 1
    return f"cuda:{index}"


def _check_backend(cluster: ClusterConfig, role: str, name: str, device: str, place: Place) -> None:
    if cluster.attention_backend != "cuda" or is_gpu(device) or role == roles.DENSE:
        return
    reason = place.no_gpu or f"cluster.device is {cluster.device} and {name} is on the CPU"
    raise ConfigError(f"cluster.attention_backend cuda cannot be used: {reason}")


def _check_cache(cluster: ClusterConfig, name: str, device: str) -> None:
    if cluster.cache.kv_cache_dtype == "fp8" and not is_gpu(device):
        raise ConfigError(
            f"cache.kv_cache_dtype fp8 needs nodes on GPUs, and {name} is on the CPU: use int8 on "
            "CPUs, or leave it out"
        )


def _nothing_there(cluster: ClusterConfig) -> str:
    return (
        f"cluster.device {cluster.device}: no node of topology {cluster.topology} with "
        f"attention_backend {cluster.attention_backend} computes on a GPU: leave either out"
    )
