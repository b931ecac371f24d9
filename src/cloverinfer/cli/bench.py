"""``cloverinfer bench serve`` and ``bench offline``: load on a server or an engine, and a report.

The report is Markdown on stdout, or with ``--json -`` JSON; progress goes to stderr. Exit status
beside the usual: 1 where no request was completed, 130 after Ctrl-C, with the figures so far.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..bench.names import ARRIVALS, ENDPOINTS, PROMPT_FORMS, WORKLOADS
from ..core.errors import ConfigError
from .engines import only_model, running
from .flags import add_common, config_of

if TYPE_CHECKING:
    from ..bench.client import Target
    from ..bench.plan import Load, Plan
    from ..bench.session import Outcome
    from ..bench.workloads import Tokenizer, Writer

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


def add(commands: Any) -> None:
    bench = commands.add_parser("bench", help="measure", description="Measures under load.")
    kinds = bench.add_subparsers(required=True, metavar="serve | offline")
    serve = kinds.add_parser(
        "serve",
        help="load on an OpenAI-compatible server",
        description="Sends requests to an OpenAI-compatible server and reports what came of them.",
    )
    serve.set_defaults(command=run_serve, parser=serve)
    _add_target(serve)
    _add_load(serve)
    _add_report(serve)
    offline = kinds.add_parser(
        "offline",
        help="load on an engine in this process",
        description="Runs the same load on an engine in this process, without HTTP.",
    )
    offline.set_defaults(command=run_offline, parser=offline)
    _add_load(offline)
    _add_report(offline)
    add_common(offline)


def _add_target(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("server").add_argument
    add(
        "--base-url",
        metavar="URL",
        help="URL or HOST:PORT of the server (default: by --host and --port)",
    )
    add("--host", default="127.0.0.1", metavar="HOST", help="its host (default: 127.0.0.1)")
    add("--port", type=int, default=8000, metavar="N", help="its TCP port (default: 8000)")
    text = "completions or chats (default: openai)"
    add("--backend", default="openai", choices=tuple(ENDPOINTS), help=text)
    add("--endpoint", metavar="PATH", help="path on it (default: the backend's own)")
    add("--model", metavar="NAME", help="as the server calls it (default: its first)")
    add("--tokenizer", metavar="MODEL", help="model whose tokenizer makes and counts prompts")
    add("--api-key", metavar="KEY", help="bearer token (default: OPENAI_API_KEY)")
    add("--header", action="append", default=[], metavar="NAME=VALUE", help="repeatable")
    add("--extra-body", type=_json, default={}, metavar="JSON", help="more fields of each body")
    text = "seconds that one request may take (default: 600)"
    add("--request-timeout", type=float, default=600.0, metavar="X", help=text)
    text = "seconds to wait until the server answers (default: 30)"
    add("--ready-check-timeout-sec", type=float, default=30.0, metavar="X", help=text)
    add("--no-stream", action="store_true", help="whole answers: no TTFT, TPOT and ITL")


def _add_load(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("workload").add_argument
    add("--dataset-name", default="random", choices=WORKLOADS, help="workload (default: random)")
    add("--dataset-path", type=Path, metavar="FILE", help="ShareGPT, Mooncake or Azure file")
    add("--num-prompts", type=int, default=1000, metavar="N", help="requests (default: 1000)")
    text = "prompt tokens of random requests (default: 1024)"
    add("--random-input-len", "--input-len", type=int, default=1024, metavar="N", help=text)
    text = "output tokens of random requests (default: 128)"
    add("--random-output-len", "--output-len", type=int, default=128, metavar="N", help=text)
    text = "lengths vary from 1 - X to 1 + X of these (default: 0)"
    add("--random-range-ratio", type=float, default=0.0, metavar="X", help=text)
    text = "tokens that begin all random prompts (default: 0)"
    add("--random-prefix-len", type=int, default=0, metavar="N", help=text)
    add("--max-input-len", type=int, metavar="N", help="cut a file's prompts to so many tokens")
    add("--max-output-len", type=int, metavar="N", help="cut a file's outputs to so many tokens")
    text = "prompts as text or as token ids (default: text)"
    add("--prompt-form", default="text", choices=PROMPT_FORMS, help=text)
    add("--vocab-size", type=int, metavar="N", help="token ids are below it (prompt form ids)")
    text = "the same seed makes the same requests (default: 0)"
    add("--seed", type=int, default=0, metavar="N", help=text)
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default: 0)")
    add("--ignore-eos", action="store_true", help="outputs of exactly the length asked for")
    add = parser.add_argument_group("arrivals").add_argument
    text = "requests per second (default: inf, all at once; traces: their times)"
    add("--request-rate", type=float, default=math.inf, metavar="X", help=text)
    text = "1: Poisson; less: burstier; more: evener (default: 1)"
    add("--burstiness", type=float, default=1.0, metavar="X", help=text)
    text = "gaps between requests (default: trace where there is one, else poisson)"
    add("--arrival", choices=ARRIVALS, help=text)
    text = "seconds of the run per second of the trace (default: 1)"
    add("--time-scale", type=float, default=1.0, metavar="X", help=text)
    add("--max-concurrency", type=int, metavar="N", help="requests at a time (default: no limit)")
    text = "requests before the run that do not count (default: 0)"
    add("--num-warmups", type=int, default=0, metavar="N", help=text)


def _add_report(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("report").add_argument
    text = "objectives of goodput, ttft=1s,tpot=50ms,e2el=5s; repeatable"
    add("--slo", action="append", default=[], metavar="LIST", help=text)
    text = "the same as vllm writes it, in ms: ttft:1000 tpot:50"
    add("--goodput", nargs="+", default=[], metavar="NAME:MS", help=text)
    text = "percentiles of latencies, beside the median (default: 90,99)"
    add("--metric-percentiles", type=_percentiles, default=(90.0, 99.0), metavar="LIST",
        help=text)  # fmt: skip
    add("--json", metavar="FILE", help="also write the figures as JSON; - prints that instead")
    add("--markdown", type=Path, metavar="FILE", help="also write the report to this file")
    add("--requests-jsonl", type=Path, metavar="FILE", help="a line for each request")
    add("--quiet", action="store_true", help="no progress")


def _json(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"a JSON object is needed, not {text!r}")
    return value


def _percentiles(text: str) -> tuple[float, ...]:
    message = f"numbers from 0 to 100 with commas between are needed, not {text!r}"
    try:
        values = tuple(float(one) for one in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(message) from error
    if not all(0 <= one <= 100 for one in values):
        raise argparse.ArgumentTypeError(message)
    return values


def run_serve(args: argparse.Namespace) -> int:
    from ..bench import plan, session

    tokenizer = plan.load_tokenizer(args.tokenizer) if args.tokenizer else None
    slo, load = _slo(args), _load(args)
    what = plan.make(load, _writer(args, tokenizer))
    target, outcome = session.run_loop(_serve(args, what, tokenizer))
    setting = {"server": target.url, "model": target.model, **plan.describe(load, what)}
    return _report(args, setting, outcome, slo)


async def _serve(
    args: argparse.Namespace, what: Plan, tokenizer: Tokenizer | None
) -> tuple[Target, Outcome]:
    from ..bench import client, session

    url = client.address(args.base_url or f"{args.host}:{args.port}")
    headers = _headers(args)
    async with client.session() as http:
        patience = args.ready_check_timeout_sec
        names = await client.wait_ready(http, url, headers, patience)
        if not (args.model or names):
            raise ConfigError(f"{url} names no models: give --model")
        extra = {"temperature": args.temperature, **args.extra_body}
        if args.ignore_eos:
            extra["ignore_eos"] = True
        target = client.Target(
            url,
            args.model or names[0],
            args.backend,
            args.endpoint,
            stream=not args.no_stream,
            timeout=args.request_timeout,
            extra_body=extra,
            headers=headers,
        )
        sender = client.HttpSender(http, target, tokenizer)
        limit, warmups = args.max_concurrency, args.num_warmups
        return target, await session.measure(sender, what, limit, warmups, args.quiet)


def _headers(args: argparse.Namespace) -> dict[str, str]:
    from ..bench.client import authorization

    headers = authorization(args.api_key)
    for one in args.header:
        name, equals, value = one.partition("=")
        if not equals:
            raise ConfigError(f"--header takes NAME=VALUE, not {one!r}")
        headers[name] = value
    return headers


def run_offline(args: argparse.Namespace) -> int:
    from ..bench import offline, plan, session

    config = only_model(config_of(args))
    slo, load = _slo(args), _load(args)
    with running(config, args.quiet) as engine:
        what = plan.make(load, _writer(args, engine.tokenizer))
        sender = offline.EngineSender(engine, args.temperature, args.ignore_eos)
        limit, warmups = args.max_concurrency, args.num_warmups
        measured = session.measure(sender, what, limit, warmups, args.quiet)
        outcome = session.run_loop(measured)
        topology = config.cluster.topology
        setting = {"engine": f"in process, {topology}", "model": engine.model_name}
    # The engine computes in this process: its CPU is not the client's.
    outcome = session.Outcome(outcome.records, None, outcome.interrupted)
    return _report(args, {**setting, **plan.describe(load, what)}, outcome, slo)


def _load(args: argparse.Namespace) -> Load:
    from ..bench import plan, workloads

    if args.max_concurrency is not None and args.max_concurrency < 1:
        raise ConfigError(f"--max-concurrency must be at least 1, not {args.max_concurrency}")
    return plan.Load(
        args.dataset_name,
        args.dataset_path,
        args.num_prompts,
        workloads.Lengths(
            args.random_input_len,
            args.random_output_len,
            args.random_range_ratio,
            args.random_prefix_len,
        ),
        workloads.Limits(args.max_input_len, args.max_output_len),
        time_scale=args.time_scale,
        arrival=args.arrival,
        rate=args.request_rate,
        burstiness=args.burstiness,
        seed=args.seed,
    )


def _writer(args: argparse.Namespace, tokenizer: Tokenizer | None) -> Writer:
    from ..bench.workloads import Writer

    return Writer(tokenizer, args.prompt_form == "ids", args.vocab_size)


def _slo(args: argparse.Namespace) -> dict[str, float]:
    from ..bench import slo

    limits = slo.parse(args.slo) if args.slo else {}
    return limits | (slo.parse(args.goodput, bare_unit=1e-3) if args.goodput else {})


def _report(
    args: argparse.Namespace, setting: dict[str, Any], outcome: Outcome, slo: dict[str, float]
) -> int:
    from ..bench import report, statistics

    if args.max_concurrency is not None:
        setting["requests at a time, at most"] = args.max_concurrency
    summary = statistics.summarize(
        outcome.records, args.metric_percentiles, slo, outcome.client_cpu
    )
    if outcome.interrupted:
        summary.notes.insert(0, "interrupted: these are the figures so far")
    text, data = report.markdown(summary, setting), report.as_json(summary, setting)
    print(data if args.json == "-" else text, end="", flush=True)
    if args.json not in (None, "-"):
        report.write(Path(args.json), data)
    if args.markdown is not None:
        report.write(args.markdown, text)
    if args.requests_jsonl is not None:
        report.write(args.requests_jsonl, report.jsonl(outcome.records))
    if outcome.interrupted:
        return EXIT_INTERRUPTED
    return 0 if summary.completed else EXIT_FAILED
