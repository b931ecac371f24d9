"""The commands: ``cloverinfer generate``, ``serve``, ``orchestrate``, ``node``, ``bench``,
``verify``.

Text, JSON and the ready line go to stdout; progress, tables and errors to stderr. Exit status: 0;
1 where something failed; 2 for bad input or configuration; 130 after Ctrl-C, 143 after SIGTERM,
141 when stdout is closed early. What is slow to import is imported where it is used, so that
``--help`` and bad flags answer at once.

``entry`` runs a command; ``parser`` is the command line; ``flags`` are the flags that commands
share; each command has a module of its own with ``add`` (its flags) and ``run``.
"""

from __future__ import annotations

from .entry import main

__all__ = ["main"]
