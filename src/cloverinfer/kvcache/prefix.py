"""Keys of full blocks: a digest over the parent's key and the block's tokens, so that equal keys
mean equal prefixes from the first token on."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

ROOT = b""
"""Parent of a first block of a request without a salt."""


def block_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """SHA-256 over the parent's key and the tokens (64 bits each)."""
    return hashlib.sha256(parent + array("q", tokens).tobytes()).digest()


def root_key(salt: str | None) -> bytes:
    """Parent of a first block; prefixes of requests with different salts never meet."""
    return ROOT if salt is None else hashlib.sha256(b"salt:" + salt.encode()).digest()


def extend_keys(
    keys: list[bytes],
    token_ids: Sequence[int],
    block_size: int,
    count: int,
    salt: str | None = None,
) -> None:
    """Lengthens ``keys`` to those of the first ``count`` blocks of ``token_ids``."""
    assert count * block_size <= len(token_ids), "not that many full blocks"
    while len(keys) < count:
        start = len(keys) * block_size
        parent = keys[-1] if keys else root_key(salt)
        keys.append(block_key(parent, token_ids[start : start + block_size]))
