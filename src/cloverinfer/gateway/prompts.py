"""Hashes of a prompt's blocks, by which a policy knows the beginnings that it has seen.

Equal hashes mean equal text up to there. Blocks need not be those of an instance's cache: they only
have to be short beside what is worth sharing.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from ..core.errors import ConfigError

BLOCK_TOKENS = 32
BLOCK_BYTES = 128
"""About as much text as a block of tokens."""
MOST_BLOCKS = 1024
"""What is beyond them tells no two prompts apart that an instance should be chosen by."""
_ID_BYTES = array("q").itemsize

Encode = Callable[[str], list[int]]


def load_encode(path: str) -> Encode:
    """A tokenizer's encoding, from a ``tokenizer.json`` or a folder with one; ``ConfigError``."""
    import tokenizers

    file = Path(path)
    file = file / "tokenizer.json" if file.is_dir() else file
    if not file.is_file():
        raise ConfigError(f"orchestrator.tokenizer: {file} is no file; give a tokenizer.json")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"orchestrator.tokenizer: cannot read {file}: {error}") from error
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


def hash_prompt(fields: Mapping[str, msgspec.Raw], encode: Encode | None) -> list[bytes]:
    """One hash per whole block of the prompt; none for a prompt that is no prompt.

    Token ids as they are; text as tokens where ``encode`` is given; chats as the text of their
    messages and tools, since their templates are the instances' own. Of several prompts the first.
    """
    # The model and the salt stand at the front: what they keep apart shares no cache.
    seed = bytes(fields.get("model", b"")) + b"\0" + bytes(fields.get("cache_salt", b""))
    if "messages" in fields:
        text = bytes(fields.get("tools", b"")) + b"\0" + bytes(fields["messages"]).rstrip(b"] \n")
        return _chain(seed + b"\0chat", text, BLOCK_BYTES)
    prompt = _first_prompt(fields.get("prompt"))
    if isinstance(prompt, str) and encode is not None:
        prompt = encode(prompt[: MOST_BLOCKS * BLOCK_BYTES])
    if isinstance(prompt, str):
        return _chain(seed + b"\0text", prompt.encode(), BLOCK_BYTES)
    return _chain(seed + b"\0ids", array("q", prompt).tobytes(), BLOCK_TOKENS * _ID_BYTES)


def _first_prompt(raw: msgspec.Raw | None) -> str | list[int]:
    if raw is None:
        return []
    try:
        prompt = _PROMPT.decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return []  # the instance will say what is wrong with it
    if isinstance(prompt, str):
        return prompt
    first = prompt[0] if prompt else []
    if isinstance(first, int):
        return _ids(prompt)
    return first if isinstance(first, str) else _ids(first)


def _ids(values: Sequence[object]) -> list[int]:
    """Those that may be ids of tokens."""
    return [one for one in values if isinstance(one, int) and 0 <= one < 1 << 63]


_PROMPT = msgspec.json.Decoder(str | list[int | str | list[int]])


def _chain(seed: bytes, data: bytes, size: int) -> list[bytes]:
    """Each hash is of its block and of the hash before it."""
    hashes = []
    last = hashlib.blake2b(seed, digest_size=16).digest()
    for end in range(size, min(len(data), MOST_BLOCKS * size) + 1, size):
        last = hashlib.blake2b(data[end - size : end], key=last, digest_size=16).digest()
        hashes.append(last)
    return hashes
