"""The command line as a whole: its commands, and what is told about flags it does not know."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from .. import __version__
from . import bench, compile, deploy, generate, node, orchestrate, serve, verify

EXIT_USAGE = 2
COMMANDS = (generate, serve, orchestrate, node, bench, verify, deploy, compile)
"""Modules with ``add(commands)``, which adds the command's parser, and ``run(args)``."""


class _Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        # A flag added later must not change what an abbreviation in a script means.
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        print(f"error: {message} (see {self.prog} --help)", file=sys.stderr)
        sys.exit(EXIT_USAGE)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
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
    names = " | ".join(command.__name__.rpartition(".")[2] for command in COMMANDS)
    commands = parser.add_subparsers(required=True, metavar=names)
    for command in COMMANDS:
        command.add(commands)
    return parser
