"""What flags may name. Light to import: the command line lists it without loading the room."""

from __future__ import annotations

WORKLOADS = ("random", "sharegpt", "mooncake", "azure")
TRACES = ("mooncake", "azure")
"""Workloads whose requests have times."""
ARRIVALS = ("poisson", "constant", "trace")
ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
"""Path by backend, whose names are those of ``vllm bench serve``."""
PROMPT_FORMS = ("text", "ids")
