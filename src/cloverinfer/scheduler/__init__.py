"""Admission, batching and preemption: pure functions of state and time."""

from .records import HungNode, SchedNode, StepRecord, TokenEvent
from .scheduler import Scheduler

__all__ = ["HungNode", "SchedNode", "Scheduler", "StepRecord", "TokenEvent"]
