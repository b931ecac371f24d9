"""Requests that wait until every node that samples has compiled their grammar.

So no step ever waits for a grammar. Used by the engine's thread alone.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..core.errors import CloverError, RequestError
from ..core.structured import PARAM, StructuredOutputs
from ..models.grammar import MAX_COMPILED
from ..wire.messages import CompileGrammar, Grammar, GrammarCompiled
from .live import Live


@dataclass
class _Pending:
    grammar: Grammar
    nodes: set[str]
    """Those that have not answered."""
    deadline: float
    lives: list[Live] = field(default_factory=list)


Released = tuple[list[Live], "CloverError | None"]
"""Requests that wait no more, and why they cannot go on, if so."""


class GrammarDesk:
    """Holds requests back, and gives them out again."""

    def __init__(
        self,
        nodes: Sequence[str],
        timeout: float,
        send: Callable[[str, CompileGrammar, float], None],
    ) -> None:
        """``nodes``: names of all that sample; ``timeout``: seconds that they may take."""
        self._nodes = list(nodes)
        self._timeout = timeout
        self._send = send
        self._keys = itertools.count(1)
        self._known: OrderedDict[Grammar, None] = OrderedDict()
        self._pending: dict[int, _Pending] = {}

    def hold(self, live: Live, now: float) -> bool:
        """True where the request must wait; it comes out of one of the methods below."""
        wanted = live.request.sampling.structured_outputs
        if wanted is None:
            return False
        grammar = as_grammar(wanted)
        if grammar in self._known:
            self._known.move_to_end(grammar)
            return False
        for pending in self._pending.values():
            if pending.grammar == grammar:
                pending.lives.append(live)
                return True
        key = next(self._keys)
        self._pending[key] = _Pending(grammar, set(self._nodes), now + self._timeout, [live])
        for node in list(self._nodes):
            self._send(node, CompileGrammar(key, grammar), now)
        return True

    def answered(self, message: GrammarCompiled) -> Released:
        """A node has compiled, or cannot."""
        pending = self._pending.get(message.key)
        if pending is None:
            return [], None
        pending.nodes.discard(message.node)
        if message.error:
            del self._pending[message.key]
            return pending.lives, RequestError(f"{message.node}: {message.error}", PARAM)
        return self._compiled(message.key), None

    def lost(self, name: str) -> Released:
        """Nobody waits for a node that has died."""
        self._nodes = [node for node in self._nodes if node != name]
        for pending in self._pending.values():
            pending.nodes.discard(name)
        return [live for key in list(self._pending) for live in self._compiled(key)], None

    def is_late(self, now: float) -> bool:
        """Whether a node did not answer in time."""
        return any(pending.deadline <= now for pending in self._pending.values())

    def late(self, now: float) -> set[str]:
        """Nodes that did not answer in time."""
        late = [pending for pending in self._pending.values() if pending.deadline <= now]
        return {node for pending in late for node in pending.nodes}

    def expired(self, now: float) -> Released:
        """Those whose nodes did not answer in time."""
        late = [key for key, pending in self._pending.items() if pending.deadline <= now]
        lives = [live for key in late for live in self._pending.pop(key).lives]
        return lives, CloverError(f"a grammar took more than {self._timeout:g} s to compile")

    def withdraw(self, group: str | None = None) -> list[Live]:
        """Takes out the requests of one name, or all."""
        found: list[Live] = []
        for pending in self._pending.values():
            mine = [live for live in pending.lives if group in (None, live.group)]
            pending.lives = [live for live in pending.lives if live not in mine]
            found += mine
        return found

    def holds(self, group: str) -> bool:
        return any(live.group == group for p in self._pending.values() for live in p.lives)

    def _compiled(self, key: int) -> list[Live]:
        pending = self._pending[key]
        if pending.nodes:
            return []
        del self._pending[key]
        self._known[pending.grammar] = None
        while len(self._known) > MAX_COMPILED:
            self._known.popitem(last=False)
        return pending.lives


def as_grammar(wanted: StructuredOutputs) -> Grammar:
    """As nodes are told of it."""
    return Grammar(wanted.kind, wanted.text)
