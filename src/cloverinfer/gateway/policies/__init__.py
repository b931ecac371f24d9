"""Which of several instances takes a request; one file per policy, named as its key."""

from .base import Candidate, Policy
from .registry import create_policy, policy_names

__all__ = ["Candidate", "Policy", "create_policy", "policy_names"]
