"""Starts nodes, drives the scheduler, and gives users an engine: ``LLM``, ``AsyncLLM``, ``GlobalScheduler``."""
