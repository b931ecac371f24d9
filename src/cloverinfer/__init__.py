"""CloverInfer: disaggregated LLM inference.

Names are imported when first used, so that ``import cloverinfer`` is quick and Ray is loaded only
by those who use it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_LAZY = {
    "CacheConfig": "config",
    "ClusterConfig": "config",
    "ModelConfig": "config",
    "SchedulerConfig": "config",
    "SamplingParams": "core.sampling",
    "LLM": "orchestrator.llm",
    "AsyncLLM": "orchestrator.llm",
    "GlobalScheduler": "orchestrator.global_scheduler",
}
__all__ = [
    "LLM",
    "AsyncLLM",
    "CacheConfig",
    "ClusterConfig",
    "GlobalScheduler",
    "ModelConfig",
    "SamplingParams",
    "SchedulerConfig",
    "__version__",
]

if TYPE_CHECKING:
    from .config import CacheConfig, ClusterConfig, ModelConfig, SchedulerConfig
    from .core.sampling import SamplingParams
    from .orchestrator.global_scheduler import GlobalScheduler
    from .orchestrator.llm import LLM, AsyncLLM


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
