"""Starts nodes, drives the scheduler, and gives users ``LLM``, ``AsyncLLM`` and the actor."""
