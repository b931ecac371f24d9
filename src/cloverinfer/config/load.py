"""Reads a cluster's YAML file and ``CLOVER_*`` environment variables into configs."""

from __future__ import annotations


def load_config() -> None:
    raise NotImplementedError
