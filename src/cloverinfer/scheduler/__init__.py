"""Admission, batching and preemption: pure functions of state and time."""

from .records import SchedNode, StepRecord, TokenEvent
from .scheduler import Scheduler

__all__ = ["SchedNode", "Scheduler", "StepRecord", "TokenEvent"]
