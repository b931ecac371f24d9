"""Configuration: frozen records with defaults, checked on construction; YAML and environment."""

from .cluster import CacheConfig, ClusterConfig, ModelConfig, SchedulerConfig
from .load import Config, ServedModel, check_node_counts, load_config
from .network import NetworkConfig
from .orchestrator import OrchestratorConfig
from .server import ChatConfig, ServerConfig

__all__ = [
    "CacheConfig",
    "ChatConfig",
    "ClusterConfig",
    "Config",
    "ModelConfig",
    "NetworkConfig",
    "OrchestratorConfig",
    "SchedulerConfig",
    "ServedModel",
    "ServerConfig",
    "check_node_counts",
    "load_config",
]
