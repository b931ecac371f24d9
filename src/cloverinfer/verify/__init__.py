"""Checks what this host has for each transport, and moves patterns over them between processes.

``run`` is the command; ``host``, ``cuda`` and ``rdma`` look around; ``near`` drives a second
process or host, where ``far`` does what it asks; ``report`` is what was found and what it means.
Knows transports and nothing above them: no model, no node.
"""
