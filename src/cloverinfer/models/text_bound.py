"""How many characters one token may stand for, so that a text that is far too long is refused
before it is read.

It reads the description of a tokenizer (its ``tokenizer.json``) and knows no limits of a model.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator
from typing import Any

LONGEST_COMPOSED = 4
"""Code points that NFC and NFKC make one of at most."""
_KEEPS = frozenset({
    "Sequence", "ByteLevel", "Metaspace", "Digits", "Prepend", "Lowercase", "NFD", "NFKD",
})  # fmt: skip
"""Normalizers and pre-tokenizers that leave no character out."""


def characters_per_token(description: dict[str, Any], vocab: Collection[str]) -> int | None:
    """Most characters of a text that one of its tokens stands for; None where there is no such
    bound, as characters may be left out or many unknown ones become one token."""
    steps = [*_steps(description, "normalizer"), *_steps(description, "pre_tokenizer")]
    kinds = {step["type"] for step in steps}
    added = description.get("added_tokens") or ()
    if any(token.get("lstrip") or token.get("rstrip") for token in added):
        return None  # they take any number of blanks with them
    if not (all(map(_keeps, steps)) and _knows_all(description, kinds, vocab)):
        return None
    longest = max(map(len, vocab), default=1)
    return longest * LONGEST_COMPOSED if kinds & {"NFC", "NFKC"} else longest


def _steps(description: dict[str, Any], part: str) -> Iterator[dict[str, Any]]:
    todo = [description.get(part)]
    while todo:
        one = todo.pop()
        if one is not None:
            yield one
            todo += one.get("normalizers", one.get("pretokenizers", []))


def _keeps(step: dict[str, Any]) -> bool:
    kind = step["type"]
    if kind in ("Split", "Punctuation"):
        return bool(step.get("behavior") != "Removed")
    if kind == "Replace":
        old = step.get("pattern", {}).get("String")
        return old is not None and len(step.get("content", "")) >= len(old)
    return kind in _KEEPS or kind in ("NFC", "NFKC")


def _knows_all(description: dict[str, Any], kinds: set[str], vocab: Collection[str]) -> bool:
    """Whether it has a token for every byte, so that nothing is unknown."""
    model = description.get("model") or {}
    if "ByteLevel" in kinds:
        return model.get("type") == "BPE" and all(letter in vocab for letter in byte_letters())
    bytes_of_own = (f"<0x{byte:02X}>" in vocab for byte in range(256))
    return bool(model.get("byte_fallback")) and all(bytes_of_own)


@functools.lru_cache
def byte_letters() -> dict[str, int]:
    """The byte that each letter of a byte-level vocabulary stands for.

    Printable bytes of Latin-1 stand for themselves; the others, in order, are letters from U+0100.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    table = {chr(byte): byte for byte in plain}
    return table | {chr(256 + i): byte for i, byte in enumerate(others)}
