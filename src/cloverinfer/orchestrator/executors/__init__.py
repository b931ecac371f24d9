"""What runs the nodes: threads, processes or Ray actors; one file each."""

from .base import Executor, OnDeath, Progress
from .registry import create_executor

__all__ = ["Executor", "OnDeath", "Progress", "create_executor"]
