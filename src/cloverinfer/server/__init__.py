"""The OpenAI-compatible HTTP API over an engine. It knows HTTP, not nodes or schedulers."""
