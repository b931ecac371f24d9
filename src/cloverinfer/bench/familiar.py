"""``scripts/benchmark_client``: one prompt sent many times, under the flags that scripts know.

scripts/benchmark_client --host 127.0.0.1:8000 --prompt "..." --mode throughput --num 32
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ..core.errors import CloverError
from . import client, session, statistics
from .plan import Plan
from .records import Sample
from .statistics import Distribution, Summary

MODES = {"throughput": None, "latency": 1}
"""Requests at a time by mode; None: all at once."""


def main(argv: Sequence[str] | None = None) -> int:
    """Prints throughput and latency; status 1 where a request failed, 2 for bad flags."""
    args = _arguments(argv)
    try:
        summary = session.run_loop(_run(args))
    except CloverError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    _print(summary)
    return 0 if summary.completed == args.num else 1


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    made = argparse.ArgumentParser(prog="benchmark_client", description="Measures a server.")
    made.add_argument("--host", default="127.0.0.1:8000", help="HOST:PORT or URL of the server")
    made.add_argument("--prompt", default="Why is the sky blue?")
    text = "all requests at once, or one after the other"
    made.add_argument("--mode", default="throughput", choices=tuple(MODES), help=text)
    made.add_argument("--num", type=int, default=16, help="requests (default: 16)")
    made.add_argument("--tokens", type=int, default=64, help="output tokens of each (default: 64)")
    made.add_argument("--model", help="as the server calls it (default: its first)")
    args = made.parse_args(argv)
    if args.num < 1 or args.tokens < 1:
        made.error("--num and --tokens are at least 1")
    return args


async def _run(args: argparse.Namespace) -> Summary:
    url = client.address(args.host)
    async with client.session() as http:
        headers = client.authorization()
        names = await client.wait_ready(http, url, headers, 10.0)
        model = args.model or (names[0] if names else "")
        extra = {"temperature": 0, "ignore_eos": True}
        target = client.Target(url, model, extra_body=extra, headers=headers)
        sender = client.HttpSender(http, target)
        plan = Plan([Sample(args.prompt, args.tokens)] * args.num, [0.0] * args.num)
        outcome = await session.measure(sender, plan, MODES[args.mode], 1, quiet=True)
    return statistics.summarize(outcome.records)


def _print(summary: Summary) -> None:
    print(f"requests: {summary.completed} of {summary.requests} in {summary.duration:.2f} s")
    rates = f"{summary.output_throughput:.2f} tokens/s, {summary.request_throughput:.2f} requests/s"
    print(f"throughput: {rates}")
    for title, name in (("latency", "e2el"), ("TTFT", "ttft"), ("TPOT", "tpot")):
        if name in summary.distributions:
            print(f"{title}: {_line(summary.distributions[name])}")
    for error, count in summary.errors.items():
        print(f"failed: {count} x {error}")


def _line(one: Distribution) -> str:
    values = {"mean": one.mean, "median": one.median, **one.percentiles, "max": one.largest}
    return ", ".join(f"{name} {value * 1e3:.2f} ms" for name, value in values.items())
