"""The orchestrator over whole servers: one entry for clients, any number of instances behind it.

An *instance* is a server of its own, ours or vLLM's, reached over HTTP. It holds a role: ``both``
answers whole requests; ``prefill`` and ``decode`` answer in pairs, the KV cache going from one to
the other without passing here. Nothing in this room computes, knows a model or imports torch.
"""
