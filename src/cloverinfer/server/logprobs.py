"""Log-probabilities in the forms of both endpoints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..core.logprobs import TokenLogprobs
from .engine import Tokenizer

LOWEST = -9999.0
"""JSON has no infinity: what a model holds to be impossible."""


def _number(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST


class Speller:
    """How a model's tokens are written in answers; one that has no tokenizer writes ids."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def bytes_of(self, token_id: int) -> bytes:
        if self._tokenizer is None:
            return f"token_id:{token_id}".encode()
        return self._tokenizer.token_bytes(token_id)

    def text_of(self, token_id: int) -> str:
        """Its text; where that is no whole character, its bytes as OpenAI spells them."""
        raw = self.bytes_of(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(records: Sequence[TokenLogprobs], speller: Speller) -> dict[str, Any]:
    """``choices[].logprobs`` of a chat."""

    def one(token_id: int, logprob: float) -> dict[str, Any]:
        raw = speller.bytes_of(token_id)
        text = speller.text_of(token_id)
        return {"token": text, "logprob": _number(logprob), "bytes": list(raw)}

    content = []
    for record in records:
        top = zip(record.top_ids, record.top_logprobs, strict=True)
        likeliest = [one(token_id, logprob) for token_id, logprob in top]
        content.append({**one(record.token_id, record.logprob), "top_logprobs": likeliest})
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """``choices[].logprobs`` of a completion, whose offsets go on from piece to piece."""

    def __init__(self, speller: Speller, first: int = 0) -> None:
        """``first``: the token without a probability, with which a prompt begins."""
        self._speller = speller
        self._first = first
        self._offset = 0

    def piece(self, records: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """The next tokens; None stands for the first of a prompt."""
        tokens, logprobs, top, offsets = [], [], [], []
        for record in records:
            token = self._speller.text_of(self._first if record is None else record.token_id)
            tokens.append(token)
            offsets.append(self._offset)
            self._offset += len(token)
            logprobs.append(None if record is None else _number(record.logprob))
            top.append(None if record is None else self._top(record, token))
        return {
            "tokens": tokens,
            "token_logprobs": logprobs,
            "top_logprobs": top,
            "text_offset": offsets,
        }

    def _top(self, record: TokenLogprobs, token: str) -> dict[str, float]:
        found: dict[str, float] = {}
        for token_id, logprob in zip(record.top_ids, record.top_logprobs, strict=True):
            # Two tokens may be spelled alike; the likelier one, which comes first, stays.
            found.setdefault(self._speller.text_of(token_id), _number(logprob))
        # The chosen token is always among them, as OpenAI has it.
        found.setdefault(token, _number(record.logprob))
        return found


def prompt_logprobs(
    records: Sequence[TokenLogprobs | None], speller: Speller
) -> list[dict[str, Any] | None]:
    """vLLM's ``prompt_logprobs``: for each prompt token its own and the likeliest ones, by id."""
    rows: list[dict[str, Any] | None] = []
    for record in records:
        if record is None:
            rows.append(None)
            continue
        found = {str(record.token_id): (record.logprob, record.rank)}
        top = zip(record.top_ids, record.top_logprobs, strict=True)
        for place, (token_id, logprob) in enumerate(top):
            found.setdefault(str(token_id), (logprob, place + 1))
        rows.append(
            {
                key: {
                    "logprob": _number(logprob),
                    "rank": rank,
                    "decoded_token": speller.text_of(int(key)),
                }
                for key, (logprob, rank) in found.items()
            }
        )
    return rows
