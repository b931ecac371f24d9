"""The flags of ``cloverinfer generate`` that say how tokens are chosen, and what they make."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..core.errors import RequestError
from ..core.sampling import SamplingParams

PLAIN = (
    "max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "seed",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "ignore_eos", "logprobs",
)  # fmt: skip
"""Parameters whose flags give their value as it is."""


def add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    add = group.add_argument
    add("--chat", action="store_true", help="put the prompt through the model's chat template")
    add("--max-tokens", type=int, default=128, metavar="N", help="most new tokens (default: 128)")
    add("--min-tokens", type=int, default=0, metavar="N", help="no end before this many tokens")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default: 0)")
    add("--top-k", type=int, default=0, metavar="K", help="likeliest tokens kept; 0: all")
    add("--top-p", type=float, default=1.0, metavar="P", help="probability kept (default: 1)")
    text = "least share of the likeliest token's probability (default: 0)"
    add("--min-p", type=float, default=0.0, metavar="P", help=text)
    add("--seed", type=int, metavar="S", help="makes sampling repeatable (default: a fresh one)")
    _add_penalties(add)
    add("--stop", action="append", default=[], metavar="TEXT", help="end before it; repeatable")
    text = "keep it from coming; repeatable"
    add("--bad-word", action="append", default=[], metavar="TEXT", help=text)
    add("--ignore-eos", action="store_true", help="go on past the end of sequence")
    text = "with --json: log-probabilities of each token and of the K likeliest"
    add("--logprobs", type=int, metavar="K", help=text)


def _add_penalties(add: Any) -> None:
    text = "off the logits of tokens generated before, -2 to 2 (default: 0)"
    add("--presence-penalty", type=float, default=0.0, metavar="X", help=text)
    text = "the same for each time they were (default: 0)"
    add("--frequency-penalty", type=float, default=0.0, metavar="X", help=text)
    text = "above 1 discourages tokens of prompt and output (default: 1)"
    add("--repetition-penalty", type=float, default=1.0, metavar="X", help=text)


def add_structured(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what the answer must look like (one of)")
    add = group.add_argument
    add("--json-object", action="store_true", help="any JSON object")
    add("--json-schema", metavar="FILE", help="JSON after the schema in this file")
    add("--regex", metavar="TEXT", help="a text that matches the whole expression")
    add("--choice", action="append", metavar="TEXT", help="one of these; repeatable")
    add("--grammar", metavar="FILE", help="a text of the grammar (Lark or GBNF) in this file")


def sampling_of(args: argparse.Namespace) -> SamplingParams:
    """``RequestError`` names what is out of range."""
    given = {name: getattr(args, name) for name in PLAIN}
    outputs: dict[str, Any] = {
        "json_object": args.json_object or None,
        "json": _read(args.json_schema, "json-schema"),
        "regex": args.regex,
        "choice": args.choice,
        "grammar": _read(args.grammar, "grammar"),
    }
    outputs = {name: value for name, value in outputs.items() if value is not None}
    return SamplingParams(
        **given,
        stop=tuple(args.stop),
        bad_words=tuple(args.bad_word),
        structured_outputs=outputs or None,  # type: ignore[arg-type]
    )


def _read(path: str | None, flag: str) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise RequestError(f"--{flag}: cannot read {path} ({error})", flag) from error
