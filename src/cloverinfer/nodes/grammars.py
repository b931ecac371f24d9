"""A node's thread beside its loop that compiles grammars, so that no step waits for one.

Knows nothing of requests: what is compiled stays in the process's cache, where joins find it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ..core.errors import describe
from ..models import ResolvedModel
from ..models.grammar import grammars_of
from ..wire.messages import CompileGrammar, GrammarCompiled

log = logging.getLogger(__name__)


class GrammarWorker:
    """``report`` is called from its thread, once for each grammar."""

    def __init__(
        self, name: str, model: ResolvedModel, report: Callable[[GrammarCompiled], None]
    ) -> None:
        self._name = name
        self._model = model
        self._report = report
        self._thread: ThreadPoolExecutor | None = None

    def compile(self, message: CompileGrammar) -> None:
        """Returns at once."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"{self._name}-grammars")
        self._thread.submit(self._compile, message)

    def close(self) -> None:
        """Waits for the one under way, which the compiler's limits bound."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)

    def _compile(self, message: CompileGrammar) -> None:
        """The boundary where a grammar's errors become an answer."""
        error = ""
        try:
            grammars_of(self._model).compile(message.grammar)
        except Exception as problem:
            log.info("%s: a grammar was not compiled: %s", self._name, problem)
            error = describe(problem)
        self._report(GrammarCompiled(self._name, message.key, error))
