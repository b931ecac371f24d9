"""The commands ``cloverinfer generate`` and ``cloverinfer serve``.

Text, JSON and the ready line go to stdout; progress, tables and errors to stderr. Exit status: 0;
1 where something failed; 2 for bad input or configuration; 130 after Ctrl-C, 143 after SIGTERM,
141 when stdout is closed early. What is slow to import is imported where it is used, so that
``--help`` and bad flags answer at once.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from . import __version__
from .config import (
    CacheConfig,
    ClusterConfig,
    Config,
    ModelConfig,
    SchedulerConfig,
    ServerConfig,
    load_config,
)
from .config.cluster import (
    ATTENTION_BACKENDS,
    DTYPES,
    EXECUTORS,
    LOAD_FORMATS,
    TOPOLOGIES,
    TRANSPORTS,
)
from .core.errors import CloverError, RequestError
from .core.sampling import SamplingParams

if TYPE_CHECKING:
    from .orchestrator.llm import AsyncLLM

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_BROKEN_PIPE = 128 + signal.SIGPIPE
EXIT_TERMINATED = 128 + signal.SIGTERM
DEFAULTS = {"cluster": {"executor": "local"}}
"""What a command starts from where the records say otherwise: no Ray unless asked for."""


class _Terminated(BaseException):
    """SIGTERM arrived; not an ``Exception``, so that nothing on the way takes it for a failure."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    args = _parse(argv)
    before = signal.signal(signal.SIGTERM, _on_terminate)
    try:
        return int(args.command(args))
    except ValueError as error:
        if not isinstance(error, CloverError):
            raise
        return _fail(str(error), EXIT_USAGE)
    except CloverError as error:
        return _fail(str(error), EXIT_FAILED)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except _Terminated:
        return EXIT_TERMINATED
    except BrokenPipeError:
        # The interpreter flushes stdout once more as it ends; let that go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    finally:
        signal.signal(signal.SIGTERM, before)


def _on_terminate(number: int, frame: object) -> NoReturn:
    raise _Terminated


def _fail(message: str, status: int) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return status


# ---- the command line


class _Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        # A flag added later must not change what an abbreviation in a script means.
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        print(f"error: {message} (see {self.prog} --help)", file=sys.stderr)
        sys.exit(EXIT_USAGE)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command's arguments; what it does not know is refused with its own help in mind."""
    args, unknown = _parser().parse_known_args(argv)
    if unknown:
        _refuse(unknown[0].split("=")[0], args.parser)
    return args


def _refuse(wrong: str, command: argparse.ArgumentParser) -> NoReturn:
    if not wrong.startswith("-"):
        command.error(f"unexpected {wrong!r}; put a prompt of several words in quotes")
    known = [flag for action in command._actions for flag in action.option_strings]
    close = difflib.get_close_matches(wrong, known, 1)
    command.error(f"unknown flag {wrong}" + (f"; did you mean {close[0]}?" if close else ""))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="cloverinfer",
        description="LLM inference with prefill, dense and attention on nodes of their own.",
    )
    parser.add_argument("--version", action="version", version=f"cloverinfer {__version__}")
    commands = parser.add_subparsers(required=True, metavar="generate | serve")
    generate = commands.add_parser(
        "generate", help="complete one prompt", description="Completes one prompt."
    )
    generate.add_argument("prompt", help="the prompt; - reads it from standard input")
    generate.set_defaults(command=_generate, parser=generate)
    _add_sampling(generate)
    _add_output(generate)
    _add_common(generate)
    serve = commands.add_parser(
        "serve",
        help="serve an OpenAI-compatible API",
        description="Serves an OpenAI-compatible API until Ctrl-C or SIGTERM.",
    )
    serve.set_defaults(command=_serve, parser=serve)
    _add_server(serve)
    _add_common(serve)
    return parser


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    add = group.add_argument
    add("--chat", action="store_true", help="put the prompt through the model's chat template")
    add("--max-tokens", type=int, default=128, metavar="N", help="most new tokens (default: 128)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default: 0)")
    add("--top-k", type=int, default=0, metavar="K", help="likeliest tokens kept; 0: all")
    add("--top-p", type=float, default=1.0, metavar="P", help="probability kept (default: 1)")
    add("--seed", type=int, metavar="S", help="makes sampling repeatable (default: a fresh one)")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before it; repeatable")
    add("--ignore-eos", action="store_true", help="go on past the end of sequence")


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument(
        "--json", action="store_true", help="print one JSON object instead of streaming text"
    )
    group.add_argument("--quiet", action="store_true", help="no progress and no tables")


def _add_server(parser: argparse.ArgumentParser) -> None:
    server = ServerConfig()
    group = parser.add_argument_group("server")
    _option(group, "--host", "server.host", f"address to listen on (default: {server.host})")
    _option(group, "--port", "server.port", f"0 takes a free one (default: {server.port})", int)
    _option(group, "--served-model-name", "server.served_model_name", "default: the model's own")
    _option(group, "--api-key", "server.api_key", "ask for this bearer token (default: none)")
    group.add_argument("--quiet", action="store_true", help="no progress")


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", help="YAML settings; flags win over them")
    _add_model(parser)
    _add_cluster(parser)
    _add_limits(parser)


def _add_model(parser: argparse.ArgumentParser) -> None:
    model = ModelConfig()
    group = parser.add_argument_group("model")
    text = f"known name, Hugging Face directory or GGUF file (default: {model.model_path})"
    _option(group, "--model", "model.model_path", text)
    _option(group, "--dtype", "model.dtype", f"default: {model.dtype}", choices=DTYPES)
    text = f"default: {model.load_format}"
    _option(group, "--load-format", "model.load_format", text, choices=LOAD_FORMATS)
    text = "longest prompt + output in tokens (default: the model's own)"
    _option(group, "--max-model-len", "model.max_model_len", text, int)


def _add_cluster(parser: argparse.ArgumentParser) -> None:
    cluster = ClusterConfig()
    group = parser.add_argument_group("cluster")
    text = f"default: {cluster.topology}"
    _option(group, "--topology", "cluster.topology", text, choices=TOPOLOGIES)
    text = f"what runs the nodes (default: {DEFAULTS['cluster']['executor']})"
    _option(group, "--executor", "cluster.executor", text, choices=EXECUTORS)
    text = "prefill nodes of pd and pda (default: 1)"
    _option(group, "--prefill", "cluster.num_prefill_workers", text, int)
    text = "dense nodes of pd and pda (default: 1)"
    _option(group, "--dense", "cluster.num_decode_dense_nodes", text, int)
    text = "attention nodes of pda (default: 1)"
    _option(group, "--attention", "cluster.num_attention_nodes", text, int)
    text = f"default: {cluster.transport}"
    _option(group, "--transport", "cluster.transport", text, choices=TRANSPORTS)
    text = f"default: {cluster.attention_backend}"
    _option(
        group, "--attention-backend", "cluster.attention_backend", text, choices=ATTENTION_BACKENDS
    )
    text = "compute threads of each process (default: the cores it may use)"
    _option(group, "--threads", "cluster.threads", text, int)
    text = f"seconds that the nodes may take to start (default: {cluster.start_timeout:g})"
    _option(group, "--start-timeout", "cluster.start_timeout", text, float)


def _add_limits(parser: argparse.ArgumentParser) -> None:
    cache, limits = CacheConfig(), SchedulerConfig()
    group = parser.add_argument_group("cache and scheduler")
    text = f"tokens per block (default: {cache.block_size})"
    _option(group, "--block-size", "cache.block_size", text, int)
    text = f"KV pool of each attention node in GiB (default: {cache.memory_gib:g})"
    _option(group, "--memory-gib", "cache.memory_gib", text, float)
    text = "blocks per pool (default: by --memory-gib)"
    _option(group, "--num-blocks", "cache.num_blocks", text, int)
    _switch(group, "--prefix-caching", "cache.enable_prefix_caching", "keep full blocks findable")
    text = f"requests decoded at a time (default: {limits.max_num_seqs})"
    _option(group, "--max-num-seqs", "scheduler.max_num_seqs", text, int)
    text = f"token budget of one forward (default: {limits.max_num_batched_tokens})"
    _option(group, "--max-num-batched-tokens", "scheduler.max_num_batched_tokens", text, int)
    text = f"requests that may wait (default: {limits.max_queue})"
    _option(group, "--max-queue", "scheduler.max_queue", text, int)
    text = f"micro-batches in flight, 1 to 4 (default: {limits.num_wavefronts})"
    _option(group, "--num-wavefronts", "scheduler.num_wavefronts", text, int)
    text = "split long prompts"
    _switch(group, "--chunked-prefill", "scheduler.enable_chunked_prefill", text)


def _option(
    group: Any,
    flag: str,
    key: str,
    text: str,
    kind: Callable[[str], Any] = str,
    choices: tuple[str, ...] | None = None,
) -> None:
    """A flag that sets a configuration key; None means that it was not given."""
    metavar = None if choices else {int: "N", float: "X"}.get(kind, "TEXT")  # type: ignore[call-overload]
    group.add_argument(flag, dest=key, type=kind, choices=choices, metavar=metavar, help=text)


def _switch(group: Any, flag: str, key: str, text: str) -> None:
    action = argparse.BooleanOptionalAction
    group.add_argument(flag, dest=key, action=action, help=f"{text} (default: on)")


def _config(args: argparse.Namespace) -> Config:
    """The settings in force, from flags, environment and file."""
    overrides: dict[str, dict[str, Any]] = {}
    for key, value in vars(args).items():
        section, dot, field = key.partition(".")
        if dot and value is not None:
            overrides.setdefault(section, {})[field] = value
    return load_config(args.config, overrides, defaults=DEFAULTS)


# ---- generate


def _generate(args: argparse.Namespace) -> int:
    config = _config(args)
    sampling = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        stop=tuple(args.stop),
        ignore_eos=args.ignore_eos,
    )
    text = _read_prompt(args.prompt)
    with _engine(config, args.quiet) as engine:
        prompt = _as_chat(engine, text) if args.chat else text
        answer = _collect(engine, prompt, sampling, stream=not args.json)
        nodes = engine.nodes()
    answer |= {"topology": config.cluster.topology, "nodes": nodes}
    if args.json:
        print(json.dumps(answer, ensure_ascii=False), flush=True)
    elif not args.quiet:
        from .server import tables

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


def _collect(
    engine: AsyncLLM, prompt: str | list[int], sampling: SamplingParams, stream: bool
) -> dict[str, Any]:
    """The whole answer; its text is written as it comes where ``stream`` is set."""
    text: list[str] = []
    token_ids: list[int] = []
    finish_reason, metrics, error = None, None, None
    # Closing the generator, on Ctrl-C say, aborts the request.
    with contextlib.closing(engine.stream_sync(prompt, sampling)) as chunks:
        for chunk in chunks:
            text.append(chunk.text)
            token_ids += chunk.token_ids
            if stream:
                sys.stdout.write(chunk.text)
                sys.stdout.flush()
            finish_reason, metrics, error = chunk.finish_reason, chunk.metrics, chunk.error
    if stream:
        print(flush=True)
    if finish_reason in ("error", "abort", None):
        raise CloverError(error or "the answer ended before it was finished")
    return {
        "text": "".join(text),
        "token_ids": token_ids,
        "finish_reason": finish_reason,
        "metrics": metrics,
    }


# ---- serve


def _serve(args: argparse.Namespace) -> int:
    config = _config(args)
    from .server import run

    # Bound first: a port that is taken is told before the model is loaded.
    with contextlib.closing(run.bind(config.server.host, config.server.port)) as sock:
        with _engine(config, args.quiet) as engine:
            from .server.app import build_app

            app = build_app(engine, config.server.served_model_name, config.server.api_key)
            run.serve(app, sock, lambda line: print(line, flush=True))
            if engine.failure is not None:
                raise CloverError(engine.failure)
    return 0


# ---- the engine


@contextlib.contextmanager
def _engine(config: Config, quiet: bool) -> Iterator[AsyncLLM]:
    """A running engine, closed whatever happens; signals wait while it closes."""
    progress = None if quiet else _progress
    if not quiet:
        _progress(f"loading {config.model.model_path}")
    from .orchestrator.llm import AsyncLLM

    engine = AsyncLLM(config.model, config.cluster, progress)
    try:
        yield engine
    finally:
        with _signals_ignored():
            engine.close()


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _signals_ignored() -> Iterator[None]:
    """A second Ctrl-C must not cut the closing short and leave processes behind."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
