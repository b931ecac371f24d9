"""Where a request goes: to an instance that answers whole, or to a decode and a prefill instance.

Half a pair is no route: a decode instance counts only while a prefill instance of its model can be
had, and the other way round. Policies choose among what is left.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.errors import CloverError, RequestError
from .instances import Instance, Registry
from .policies import Candidate, Policy, create_policy

LONGEST_NAME = 200
"""Characters of a client's text that an error quotes."""


class NoInstanceError(CloverError):
    """The model is known, and no instance can take a request for it now."""


class UnknownModelError(RequestError):
    """No instance that is heard of serves a model of that name."""


@dataclass(frozen=True)
class Wanted:
    """What a request asks of a route."""

    model: str | None
    """None: any."""
    blocks: Sequence[bytes] = ()
    paired: bool = True
    """Whether a pair can share it; else a decode instance may do it alone."""


@dataclass(frozen=True)
class Route:
    """``prefill`` is None where one instance does all."""

    target: Instance
    prefill: Instance | None = None


class Router:
    """Chooses, and tells what can be served."""

    def __init__(self, registry: Registry, policy: str) -> None:
        self._registry = registry
        # Turns and memories of the two are apart: a beginning is held where it was prefilled.
        self._targets, self._prefills = create_policy(policy), create_policy(policy)
        registry.on_gone = self._forget

    @property
    def reads_blocks(self) -> bool:
        return self._targets.reads_blocks

    def route(self, wanted: Wanted, avoid: Collection[str] = ()) -> Route:
        """Raises ``UnknownModelError`` or ``NoInstanceError``; ``avoid``: URLs not to choose."""
        instances = self._serving(wanted.model)
        free = [one for one in instances if one.usable() and one.url not in avoid]
        prefills = _of(free, "prefill")
        pairs = _of(free, "decode") if prefills or not wanted.paired else []
        targets = _of(free, "both") + pairs
        if not targets:
            raise NoInstanceError(_nothing(wanted.model, instances))
        target = _pick(self._targets, targets, wanted)
        alone = target.told.role == "both" or not wanted.paired
        return Route(target, None if alone else _pick(self._prefills, prefills, wanted))

    def another_prefill(self, wanted: Wanted, avoid: Collection[str]) -> Instance | None:
        """A prefill instance for a request that others failed; None where there is no other."""
        free = [one for one in self._serving(wanted.model) if one.usable()]
        prefills = [one for one in _of(free, "prefill") if one.url not in avoid]
        return _pick(self._prefills, prefills, wanted) if prefills else None

    def cards(self) -> list[dict[str, Any]]:
        """The cards of models that a request could be served of now, one for each name."""
        healthy = [one for one in self._registry.all() if one.told.problem is None]
        cards: dict[str, dict[str, Any]] = {}
        for one in healthy:
            for card in one.told.models:
                if card["id"] not in cards and _servable(healthy, card["id"]):
                    cards[card["id"]] = card
        return list(cards.values())

    def _serving(self, model: str | None) -> list[Instance]:
        instances = self._registry.all()
        if model is None:
            if len({name for one in instances for name in one.told.names}) > 1:
                raise RequestError("name one of the models: several are served", "model")
            return instances
        serving = [one for one in instances if model in one.told.names]
        if instances and not serving:
            raise UnknownModelError(f"the model {model[:LONGEST_NAME]!r} does not exist", "model")
        return serving

    def _forget(self, url: str) -> None:
        self._targets.forget(url)
        self._prefills.forget(url)


def _of(instances: Iterable[Instance], role: str) -> list[Instance]:
    return [one for one in instances if one.told.role == role]


def _pick(policy: Policy, instances: Sequence[Instance], wanted: Wanted) -> Instance:
    candidates = [Candidate(one.url, one.pressure) for one in instances]
    return instances[candidates.index(policy.pick(candidates, wanted.blocks))]


def _servable(instances: Sequence[Instance], model: str) -> bool:
    roles = {one.told.role for one in instances if model in one.told.names}
    return "both" in roles or {"prefill", "decode"} <= roles


def _nothing(model: str | None, instances: Sequence[Instance]) -> str:
    what = f"the model {model!r}" if model is not None else "any model"
    if not instances:
        return f"no instance that serves {what} is heard of"
    roles = {role: _of(instances, role) for role in ("both", "decode", "prefill")}
    usable = {role: sum(one.usable() for one in ones) for role, ones in roles.items()}
    told = ", ".join(f"{usable[role]} of {len(ones)} {role}" for role, ones in roles.items())
    return f"no instance can serve {what} now (usable: {told})"
