"""``cloverinfer compile``: splits a model at attention, reports on the parts, saves them."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.cluster import DTYPES, LOAD_FORMATS
from ..core.errors import ConfigError
from .flags import config_of, option

if TYPE_CHECKING:
    from ..compiler.report import Report


def add(commands: Any) -> None:
    command = commands.add_parser(
        "compile",
        help="split a model of transformers into stages and attention",
        description="Captures a causal language model, splits its graph at attention, checks the "
        "parts against the original, and reports on them or saves them for serving.",
    )
    command.set_defaults(command=run, parser=command)
    add_argument = command.add_argument
    add_argument("model", help="Hugging Face directory, known name or GGUF file")
    add_argument("--report", action="store_true", help="print parts, attention calls and bytes")
    add_argument("--html", metavar="FILE", help="write the report as a page with a drawing")
    add_argument("--json", action="store_true", help="print the report as one JSON object")
    text = "save the stages there; serve them with --model DIR (needs no transformers)"
    add_argument("-o", "--output", metavar="DIR", help=text)
    text = "where to cut: attention, ffn (attention with its projections | FFN), or "
    text += "module:function, a predicate on graph nodes (default: attention)"
    add_argument("--target", default="attention", metavar="WHERE", help=text)
    add_argument("--quiet", action="store_true", help="no progress")
    add_argument("--config", metavar="FILE", help="YAML settings; flags win over them")
    option(command, "--dtype", "model.dtype", "of weights and graphs (default: auto)",
           choices=DTYPES)  # fmt: skip
    option(command, "--load-format", "model.load_format", "form of the weights (default: auto)",
           choices=LOAD_FORMATS)  # fmt: skip


def run(args: argparse.Namespace) -> int:
    if not (args.report or args.json or args.html or args.output):
        raise ConfigError("nothing to do: give --report, --html FILE, --json or --output DIR")
    if args.html and not Path(args.html).absolute().parent.is_dir():  # known before the work
        raise ConfigError(f"--html {args.html}: its folder is not there: make it first")
    vars(args)["model.model_path"] = args.model
    config = config_of(args).model
    from ..compiler.command import compile_model

    def progress(line: str) -> None:
        if not args.quiet:
            print(line, file=sys.stderr, flush=True)

    output = Path(args.output) if args.output else None
    report, manifest = compile_model(config, args.target, output, progress)
    if args.html:
        from ..compiler.picture import page

        Path(args.html).write_text(page(report), encoding="utf-8")
    if args.json:
        content = manifest.content_hash() if manifest is not None else None
        print(json.dumps(report.as_dict() | {"content": content}), flush=True)
    elif args.report:
        _show(report)
    if manifest is not None and not args.quiet:
        print(f"saved to {args.output}, content {manifest.content_hash()[:16]}", file=sys.stderr)
    return 0


def _show(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table

    from ..compiler import picture

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)
    console.print(picture.summary(report))
    for headings, rows in (
        (picture.PART_HEADINGS, picture.part_rows(report)),
        (picture.CALL_HEADINGS, picture.call_rows(report)),
    ):
        table = Table(*headings)
        for row in rows:
            table.add_row(*row)
        console.print(table)
