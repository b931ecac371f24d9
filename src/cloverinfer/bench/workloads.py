"""What is sent: prompts of random lengths, conversations of a file, or a trace's lengths and times.

Everything is drawn from one seed: the same flags give the same requests. It knows no server.
"""

from __future__ import annotations

import csv
import datetime
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..core.errors import ConfigError
from .records import Prompt, Sample

BLOCK = 512
"""Tokens that one hash id of a Mooncake trace stands for."""
SHORTEST = 4
"""Tokens below which a conversation's turn is left out."""
TEXT = (
    "the of and to in a is that for it as was with be by on not he his but at are this have from "
    "or had an they which one you were all her she there would their we him been has when who "
    "will no more if out so up said what its about than into them can only other time new"
)
"""Words that are one token in most vocabularies."""
WORDS = TEXT.split()


class Tokenizer(Protocol):
    @property
    def vocab_size(self) -> int: ...
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class Writer:
    """Makes prompts of given lengths.

    With a tokenizer the length is right to a token or so; without one, prompts are words, which
    are about a token each: the server's usage says how many they were. ``ids``: prompts are token
    ids, below ``vocab_size`` (or the tokenizer's), and their length is exact.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, ids: bool = False, vocab_size: int | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab = vocab_size or (tokenizer.vocab_size if tokenizer is not None else 0)
        if ids and self._vocab < 2:
            raise ConfigError("--prompt-form ids needs --tokenizer or --vocab-size")
        self._ids = ids

    def write(self, parts: Sequence[tuple[np.random.Generator, int]]) -> Sample:
        """A prompt of several parts, each of so many tokens drawn from a generator of its own, so
        that equal parts make equal beginnings; with 0 output tokens."""
        total = sum(count for _, count in parts)
        if self._ids:
            return Sample(self._draw(parts, self._vocab), 0, total)
        if self._tokenizer is None:
            words = [WORDS[one] for one in self._draw(parts, len(WORDS))]
            return Sample(" ".join(words), 0)
        text = self._tokenizer.decode(self._draw(parts, self._vocab))
        # What was decoded may be more or fewer tokens when it is read again.
        again = self._tokenizer.encode(text, add_special_tokens=False)[:total]
        return Sample(self._tokenizer.decode(again), 0, len(again))

    def count(self, text: str) -> int:
        """Tokens of a text; words where there is no tokenizer."""
        if self._tokenizer is None:
            return len(text.split())
        return len(self._tokenizer.encode(text, add_special_tokens=False))

    def _draw(self, parts: Sequence[tuple[np.random.Generator, int]], below: int) -> list[int]:
        drawn = [rng.integers(0, below, size=count) for rng, count in parts]
        return [int(one) for one in np.concatenate(drawn)] if drawn else []


@dataclass(frozen=True)
class Limits:
    """What a trace's lengths are cut to, so that a small model can take them; None: as they are."""

    prompt: int | None = None
    output: int | None = None

    def of(self, prompt: int, output: int) -> tuple[int, int]:
        prompt = prompt if self.prompt is None else min(prompt, self.prompt)
        return max(1, prompt), max(1, output if self.output is None else min(output, self.output))


@dataclass(frozen=True)
class Lengths:
    """Of random prompts: tokens, and how far they vary (0: not; 0.5: from half to half more)."""

    prompt: int = 1024
    output: int = 128
    spread: float = 0.0
    prefix: int = 0
    """Tokens that begin all prompts, beside ``prompt``."""

    def __post_init__(self) -> None:
        if self.prompt < 1 or self.output < 1 or self.prefix < 0:
            raise ConfigError("lengths must be at least 1 token, prefixes at least 0")
        if not 0 <= self.spread < 1:
            raise ConfigError(f"--random-range-ratio must be in [0, 1), not {self.spread}")


def random(count: int, lengths: Lengths, writer: Writer, seed: int) -> list[Sample]:
    """Lengths are uniform within their range, prompts differ after the common prefix."""
    rng = np.random.default_rng(seed)
    samples: list[Sample] = []
    for _ in range(count):
        prompt, output = (_around(rng, one, lengths) for one in (lengths.prompt, lengths.output))
        # A generator of the same seed again: the prefix is the same in all.
        parts = [(np.random.default_rng(seed + 1), lengths.prefix), (rng, prompt)]
        samples.append(_asking(writer.write(parts), output))
    return samples


def _around(rng: np.random.Generator, mean: int, lengths: Lengths) -> int:
    low, high = int(mean * (1 - lengths.spread)), int(mean * (1 + lengths.spread))
    return max(1, int(rng.integers(low, high + 1)))


def sharegpt(path: Path, count: int, writer: Writer, limits: Limits, seed: int) -> list[Sample]:
    """First turns of a ShareGPT file's conversations, in random order; the answer's length is what
    is asked for."""
    rows = _json(path)
    if not isinstance(rows, list):
        raise ConfigError(f"{path}: a list of conversations is needed")
    turns = [row.get("conversations") for row in rows if isinstance(row, dict)]
    pairs = [(str(t[0]["value"]), str(t[1]["value"])) for t in turns if t and len(t) > 1]
    order = np.random.default_rng(seed).permutation(len(pairs))
    samples: list[Sample] = []
    for prompt, answer in (pairs[i] for i in order):
        if len(samples) == count:
            break
        lengths = writer.count(prompt), writer.count(answer)
        fits = limits.prompt is None or lengths[0] <= limits.prompt
        if fits and min(lengths) >= SHORTEST:
            samples.append(Sample(prompt, limits.of(*lengths)[1]))
    if not samples:
        raise ConfigError(f"{path}: no conversation has two turns that fit the limits")
    return samples


def mooncake(
    path: Path, count: int, writer: Writer, limits: Limits, scale: float = 1.0
) -> list[Sample]:
    """A Mooncake trace (JSON lines): its lengths, times (``scale``: seconds per second), and
    prefixes: equal hash ids are equal blocks of 512 tokens."""
    samples: list[Sample] = []
    for number, line in enumerate(_lines(path), 1):
        if len(samples) == count:
            break
        try:
            row = json.loads(line)
            at = float(row["timestamp"]) / 1e3 * scale
            ids = [int(one) for one in row.get("hash_ids", [])]
            prompt, output = limits.of(int(row["input_length"]), int(row["output_length"]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _wrong_row(path, number, error) from error
        parts = list(_blocks(ids, prompt, number))
        samples.append(_asking(writer.write(parts), output, at))
    return _needed(samples, path)


def _blocks(
    ids: Sequence[int], tokens: int, number: int
) -> Iterator[tuple[np.random.Generator, int]]:
    for i in range(-(-tokens // BLOCK)):
        # A block without an id is this request's own.
        seed = (1, ids[i]) if i < len(ids) else (2, number * 4096 + i)
        yield np.random.default_rng(seed), min(BLOCK, tokens - i * BLOCK)


def azure(
    path: Path, count: int, writer: Writer, limits: Limits, scale: float = 1.0
) -> list[Sample]:
    """A trace of the Azure public data set (CSV): its lengths and times; prompts share nothing."""
    samples: list[Sample] = []
    first: datetime.datetime | None = None
    for number, row in enumerate(csv.DictReader(_lines(path)), 2):
        if len(samples) == count:
            break
        try:
            # Seconds have seven decimals there, and six here.
            time = datetime.datetime.fromisoformat(row["TIMESTAMP"].strip()[:26])
            lengths = limits.of(int(row["ContextTokens"]), int(row["GeneratedTokens"]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _wrong_row(path, number, error) from error
        first = first or time
        rng = np.random.default_rng((3, number))
        sample = writer.write([(rng, lengths[0])])
        samples.append(_asking(sample, lengths[1], (time - first).total_seconds() * scale))
    return _needed(samples, path)


def _wrong_row(path: Path, number: int, error: Exception) -> ConfigError:
    what = f"{type(error).__name__}: {error}"
    return ConfigError(f"{path}, line {number}: not a row of such a trace ({what})")


def _asking(sample: Sample, output: int, at: float | None = None) -> Sample:
    return Sample(sample.prompt, output, sample.prompt_tokens, at)


def _needed(samples: list[Sample], path: Path) -> list[Sample]:
    if not samples:
        raise ConfigError(f"{path}: there are no requests in it")
    return sorted(samples, key=lambda one: one.at or 0.0)


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8") as lines:
            yield from lines
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


__all__ = ["Lengths", "Limits", "Prompt", "Writer", "azure", "mooncake", "random", "sharegpt"]
