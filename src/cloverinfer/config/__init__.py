"""Configuration: frozen records with defaults, checked on construction; YAML and environment."""

from .cluster import CacheConfig, ClusterConfig, ModelConfig, SchedulerConfig
from .load import Config, check_node_counts, load_config
from .network import NetworkConfig
from .server import ServerConfig

__all__ = [
    "CacheConfig",
    "ClusterConfig",
    "Config",
    "ModelConfig",
    "NetworkConfig",
    "SchedulerConfig",
    "ServerConfig",
    "check_node_counts",
    "load_config",
]
