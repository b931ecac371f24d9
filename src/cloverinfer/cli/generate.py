"""``cloverinfer generate``: completes one prompt, streamed or as one JSON object."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from typing import TYPE_CHECKING, Any

from ..core.errors import CloverError, RequestError
from ..core.logprobs import TokenLogprobs
from ..core.sampling import SamplingParams
from .engines import only_model, running
from .flags import add_common, config_of
from .sampling import add_sampling, add_structured, sampling_of

if TYPE_CHECKING:
    from ..orchestrator.llm import AsyncLLM


def add(commands: Any) -> None:
    generate = commands.add_parser(
        "generate", help="complete one prompt", description="Completes one prompt."
    )
    generate.add_argument("prompt", help="the prompt; - reads it from standard input")
    generate.set_defaults(command=run, parser=generate)
    add_sampling(generate)
    add_structured(generate)
    _add_output(generate)
    add_common(generate)


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument(
        "--json", action="store_true", help="print one JSON object instead of streaming text"
    )
    group.add_argument("--quiet", action="store_true", help="no progress and no tables")


def run(args: argparse.Namespace) -> int:
    config = only_model(config_of(args))
    sampling = sampling_of(args)
    text = _read_prompt(args.prompt)
    with running(config, args.quiet) as engine:
        prompt = _as_chat(engine, text) if args.chat else text
        answer = _collect(engine, prompt, sampling, stream=not args.json)
        nodes, info = engine.nodes(), engine.cluster_info()
    answer |= {"topology": config.cluster.topology, "nodes": nodes}
    answer["transport"] = info["transport"]
    if args.json:
        print(json.dumps(answer, ensure_ascii=False), flush=True)
    elif not args.quiet:
        from ..server import tables

        rows = {"finish_reason": answer["finish_reason"], **(answer["metrics"] or {})}
        tables.show(rows, nodes, sys.stderr)
    return 0


def _read_prompt(prompt: str) -> str:
    try:
        text = sys.stdin.read() if prompt == "-" else prompt
        # Arguments that are not UTF-8 arrive with stand-ins that no tokenizer can read.
        text.encode()
    except UnicodeError as error:
        raise RequestError("the prompt is not valid UTF-8 text", "prompt") from error
    if not text:
        raise RequestError("the prompt is empty", "prompt")
    return text


def _as_chat(engine: AsyncLLM, text: str) -> list[int]:
    tokenizer = engine.tokenizer
    if tokenizer is None or not tokenizer.has_chat_template:
        raise RequestError(f"{engine.model_name} has no chat template: leave out --chat", "chat")
    return tokenizer.chat_token_ids([{"role": "user", "content": text}])


def _plain(record: TokenLogprobs) -> dict[str, Any]:
    """By name; on the wire it is a list."""
    return {name: getattr(record, name) for name in record.__struct_fields__}


def _collect(
    engine: AsyncLLM, prompt: str | list[int], sampling: SamplingParams, stream: bool
) -> dict[str, Any]:
    """The whole answer; its text is written as it comes where ``stream`` is set."""
    text: list[str] = []
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    finish_reason, metrics, error = None, None, None
    # Closing the generator, on Ctrl-C say, aborts the request.
    with contextlib.closing(engine.stream_sync(prompt, sampling)) as chunks:
        for chunk in chunks:
            text.append(chunk.text)
            token_ids += chunk.token_ids
            logprobs += chunk.logprobs or []
            if stream:
                sys.stdout.write(chunk.text)
                sys.stdout.flush()
            finish_reason, metrics, error = chunk.finish_reason, chunk.metrics, chunk.error
    if stream:
        print(flush=True)
    if finish_reason in ("error", "abort", None):
        raise CloverError(error or "the answer ended before it was finished")
    asked = sampling.logprobs is not None
    answer = {"logprobs": [_plain(record) for record in logprobs]} if asked else {}
    return answer | {
        "text": "".join(text),
        "token_ids": token_ids,
        "finish_reason": finish_reason,
        "metrics": metrics,
    }
