"""Nodes: plain classes that hold a half, a cache and an endpoint, and their step loops."""
