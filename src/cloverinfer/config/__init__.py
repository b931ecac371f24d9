"""Configuration: frozen records with defaults, checked on construction; YAML and environment."""

from .cluster import CacheConfig, ClusterConfig, ModelConfig, SchedulerConfig
from .load import load_config

__all__ = ["CacheConfig", "ClusterConfig", "ModelConfig", "SchedulerConfig", "load_config"]
