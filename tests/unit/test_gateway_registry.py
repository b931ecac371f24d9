"""Instances, breakers and routes by a clock that the tests turn."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cloverinfer.config import OrchestratorConfig
from cloverinfer.core.errors import ConfigError, RequestError
from cloverinfer.gateway import pulse
from cloverinfer.gateway.breaker import Breaker
from cloverinfer.gateway.instances import (
    Announcement,
    Load,
    Registry,
    StaleError,
    Withdrawal,
    check_url,
)
from cloverinfer.gateway.node import Herald
from cloverinfer.gateway.probe import Probe
from cloverinfer.gateway.router import NoInstanceError, Router, UnknownModelError, Wanted


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def told(url: str = "http://a:1", role: str = "both", **fields: Any) -> Announcement:
    place = "h:1" if role == "decode" else None
    models = [{"id": name} for name in fields.pop("models", ["m"])]
    defaults = {"incarnation": 1, "kv_address": place, "models": models}
    return Announcement(url=url, role=role, **{**defaults, **fields})


def made(**fields: Any) -> tuple[Registry, Clock]:
    clock = Clock()
    return Registry(clock, OrchestratorConfig(**fields)), clock


def urls(registry: Registry) -> list[str]:
    return [one.url for one in registry.all()]


# ---- what an instance says


@pytest.mark.parametrize(
    "answers",
    [
        {"/v1/models": b'{"data": [{"id": ' + b"[" * 5000 + b"]" * 5000 + b"}]}"},
        {"/metrics": b"vllm:num_requests_running +Inf"},
        {"/metrics": b"vllm:num_requests_running many"},
        {"/v1/models": b"\xff"},
    ],
)
def test_what_makes_no_sense_is_told_as_a_problem(answers: dict[str, bytes]) -> None:
    class Said(Probe):
        async def _get(self, http: Any, path: str) -> bytes:
            return {"/health": b"", "/v1/models": b'{"data": []}', **answers}.get(path, b"")

    problem = asyncio.run(Said("http://a:1", "both").ask(cast("Any", None))).problem
    assert problem


# ---- the registry


def test_what_is_silent_is_forgotten_and_comes_back_by_a_heartbeat() -> None:
    registry, clock = made(heartbeat_timeout=5.0)
    gone: list[str] = []
    registry.on_gone = gone.append
    registry.announce(told())
    clock.now = 5.0
    assert urls(registry) == ["http://a:1"]
    clock.now = 5.1
    assert urls(registry) == []
    assert gone == ["http://a:1"]
    registry.announce(told())
    assert urls(registry) == ["http://a:1"]
    clock.now = 11.0  # nobody asked meanwhile: what is forgotten has no say over what comes
    registry.announce(told(incarnation=0))
    assert urls(registry) == ["http://a:1"]


def test_troubles_of_an_instance_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="cloverinfer.instances")
    registry, clock = made()
    for problem in (None, "down\nfor now", "down\nfor now", None, None):
        registry.announce(told(problem=problem))
    clock.now = 100.0
    registry.all()
    assert [record.getMessage().removeprefix("http://a:1 ") for record in caplog.records] == [
        "is here, role both", "takes no requests: down for now", "takes requests again",
        "is not heard of any more",
    ]  # fmt: skip


def test_a_new_incarnation_begins_anew_and_an_old_one_is_not_heard() -> None:
    registry, _ = made(breaker_faults=1)
    gone: list[str] = []
    registry.on_gone = gone.append
    registry.announce(told(incarnation=2))
    registry.all()[0].breaker.fault()
    registry.announce(told(incarnation=2))
    assert registry.all()[0].breaker.state == "open"
    with pytest.raises(StaleError):
        registry.announce(told(incarnation=1))
    with pytest.raises(StaleError):
        registry.withdraw(Withdrawal(url="http://a:1", incarnation=1))
    assert gone == []
    registry.announce(told(incarnation=3))
    assert registry.all()[0].breaker.state == "closed"
    assert gone == ["http://a:1"]
    registry.withdraw(Withdrawal(url="http://a:1/v1/", incarnation=3))
    registry.withdraw(Withdrawal(url="http://a:1", incarnation=3))
    assert urls(registry) == []


def test_pressure_is_what_is_under_way_here_and_what_others_brought() -> None:
    registry, _ = made()
    registry.announce(told(load=Load(running=2, waiting=1)))
    (one,) = registry.all()
    assert one.pressure == 3
    with one.busy(), one.busy():
        assert one.pressure == 5
        registry.announce(told(load=Load(running=2, waiting=1)))  # two of the three are ours
        assert one.pressure == 3
    assert one.pressure == 1


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"role": "dense"}, "role must be one of prefill, decode, both"),
        ({"url": "a:1"}, "http://HOST:PORT"),
        ({"url": "http://"}, "http://HOST:PORT"),
        ({"url": "http://a:1 /x"}, "http://HOST:PORT"),
        ({"url": "http://[::1"}, "http://HOST:PORT"),
        ({"url": "http://a:99999"}, "http://HOST:PORT"),
        ({"url": "http://me:pw@a:1"}, "http://HOST:PORT"),
        ({"url": "http://a:1?x"}, "http://HOST:PORT"),
        ({"role": "decode", "kv_address": None}, "kv_address is needed"),
        ({"models": [3]}, "an id that is a string"),
    ],
)
def test_what_no_instance_can_be_is_refused(fields: dict[str, Any], part: str) -> None:
    registry, _ = made()
    with pytest.raises(ConfigError) as caught:
        registry.announce(told(**fields))
    assert part in str(caught.value)
    assert urls(registry) == []


def test_urls_lose_what_clients_append() -> None:
    for url in ("http://a:1", "http://a:1/", "http://a:1/v1", "http://a:1/v1/"):
        assert check_url(url) == "http://a:1"


@pytest.mark.parametrize("url", ["http://a\0b:1", "http://a:99999", "http://a:0", "http://", "a:1"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="http://HOST:PORT"):
        check_url(url)


@pytest.mark.parametrize("place", ["", "h", "h:0", "h:99999", "http://h:1", "h:1/x", "::1:2"])
def test_what_decodes_tells_where_it_is_met(place: str) -> None:
    registry, _ = made()
    with pytest.raises(ConfigError, match="HOST:PORT"):
        registry.announce(told(role="decode", kv_address=place))
    registry.announce(told(role="decode", kv_address="[::1]:2"))


def test_an_orchestrator_that_hangs_keeps_no_other_from_hearing() -> None:
    heard: list[str] = []

    class Answer:
        status = 200

        async def text(self) -> str:
            return "{}"

    class Http:
        @asynccontextmanager
        async def request(self, method: str, url: str, **_: Any) -> AsyncIterator[Answer]:
            heard.append(f"{method} {url}")
            if "//hangs" in url and method == "POST":
                await asyncio.sleep(60)
            yield Answer()

    async def tell() -> None:
        herald = Herald(cast("Any", Http()), ["http://hangs:1", "http://b:1"], None)
        for _ in range(3):
            await asyncio.wait_for(herald.announce(told()), 10)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        await herald.withdraw()

    asyncio.run(tell())
    hangs, well = "http://hangs:1/v1/instances", "http://b:1/v1/instances"
    assert sorted(heard) == sorted(
        [f"POST {hangs}", *[f"POST {well}"] * 3, f"DELETE {hangs}", f"DELETE {well}"]
    )


@pytest.mark.parametrize(("late", "found"), [(0.0, 30.0), (100.0, 110.0)])
def test_what_answers_nothing_stands_still_after_that_time(
    monkeypatch: pytest.MonkeyPatch, late: float, found: float
) -> None:
    """``late``: seconds for which this process itself stands still; it asks all the same."""
    now, asked = 0.0, 0

    class Http:
        @asynccontextmanager
        async def get(self, _: str, *, timeout: Any, **__: Any) -> AsyncIterator[None]:
            nonlocal now, asked
            now, asked = now + timeout.total, asked + 1
            raise asyncio.TimeoutError
            yield

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += max(seconds, late)

    async def watch() -> None:
        one = cast("Any", SimpleNamespace(url="http://a:1"))
        with pulse.Pulse(cast("Any", Http()), 30.0).of(one) as stands_still:
            await asyncio.wait_for(stands_still, 20)

    monkeypatch.setattr(pulse, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(pulse.asyncio, "sleep", sleep)
    asyncio.run(watch())
    assert (now, asked) == (found, 1)


# ---- the breaker


def test_a_breaker_opens_after_faults_in_a_row_and_lets_one_try() -> None:
    clock = Clock()
    breaker = Breaker(clock, faults=2, seconds=3.0)
    breaker.fault()
    breaker.success()
    breaker.fault()
    assert breaker.allows()
    breaker.fault()
    assert (breaker.state, breaker.allows()) == ("open", False)
    clock.now = 2.0
    breaker.fault()  # of a request that began before: nothing new
    clock.now = 3.0
    assert (breaker.state, breaker.allows()) == ("half_open", True)
    trying = breaker.begin()
    assert trying
    assert not breaker.allows()
    breaker.abandon(trying)
    assert breaker.allows()
    assert breaker.begin()
    breaker.fault()  # one is enough: it was on trial
    assert breaker.state == "open"
    clock.now = 6.0
    breaker.begin()
    breaker.success()
    assert breaker.state == "closed"


class BreakerMachine(RuleBasedStateMachine):
    """Whatever happens in whatever order, an open breaker lets nothing through, a half-open one at
    most one, and none stays shut for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.breaker = Breaker(self.clock, faults=2, seconds=3.0)
        self.running: list[bool] = []

    @precondition(lambda self: self.breaker.allows())
    @rule()
    def begin(self) -> None:
        self.running.append(self.breaker.begin())

    @precondition(lambda self: self.running)
    @rule(how=st.sampled_from(["success", "fault", "abandon"]))
    def end(self, how: str) -> None:
        trying = self.running.pop(0)
        if how == "abandon":
            self.breaker.abandon(trying)
        else:
            getattr(self.breaker, how)()

    @rule(seconds=st.sampled_from([1.0, 3.0]))
    def later(self, seconds: float) -> None:
        self.clock.now += seconds

    @invariant()
    def never_shut_for_ever(self) -> None:
        if not any(self.running):
            assert self.breaker.allows() or self.breaker.state == "open"
        if self.breaker.state == "open":
            assert not self.breaker.allows()


TestBreaker = BreakerMachine.TestCase


# ---- routes


def announced(registry: Registry, *roles: str, **fields: Any) -> None:
    for i, role in enumerate(roles):
        registry.announce(told(f"http://{role}-{i}:1", role, **fields))


@given(
    st.lists(
        st.tuples(st.sampled_from(["prefill", "decode", "both"]), st.booleans(), st.booleans()),
        max_size=6,
    ),
    st.booleans(),
)
def test_no_route_is_half_a_pair(instances: list[tuple[str, bool, bool]], paired: bool) -> None:
    registry, _ = made(breaker_faults=1)
    router = Router(registry, "least_loaded")
    for i, (role, well, closed) in enumerate(instances):
        url = f"http://h{i}:1"
        registry.announce(told(url, role, problem=None if well else "ill"))
        if not closed:
            next(one for one in registry.all() if one.url == url).breaker.fault()
    usable = {role for role, well, closed in instances if well and closed}
    can = "both" in usable or ("decode" in usable and (not paired or "prefill" in usable))
    try:
        route = router.route(Wanted("m", paired=paired))
    except NoInstanceError:
        assert not can
        return
    assert can
    assert route.target.usable()
    if route.target.told.role == "both" or not paired:
        assert route.prefill is None
    else:
        assert route.target.told.role == "decode"
        assert route.prefill is not None
        assert route.prefill.told.role == "prefill"
        assert route.prefill.usable()


def test_models_keep_to_their_instances() -> None:
    registry, _ = made()
    router = Router(registry, "round_robin")
    with pytest.raises(NoInstanceError, match="heard of"):
        router.route(Wanted("m"))
    registry.announce(told("http://a:1", models=["a", "x"]))
    registry.announce(told("http://b:1", models=["b"]))
    announced(registry, "prefill", models=["p"])
    assert router.route(Wanted("a")).target.url == "http://a:1"
    assert router.route(Wanted("b")).target.url == "http://b:1"
    with pytest.raises(UnknownModelError, match="'c' does not exist"):
        router.route(Wanted("c"))
    with pytest.raises(RequestError, match="several are served"):
        router.route(Wanted(None))
    assert [card["id"] for card in router.cards()] == ["a", "x", "b"]  # p has half a pair
    with pytest.raises(NoInstanceError, match="'b' now"):
        router.route(Wanted("b"), avoid=["http://b:1"])


def test_a_request_without_a_model_goes_anywhere_where_one_is_served() -> None:
    registry, _ = made()
    router = Router(registry, "round_robin")
    registry.announce(told("http://a:1"))
    assert router.route(Wanted(None)).target.url == "http://a:1"


def test_another_prefill_is_none_of_those_that_failed() -> None:
    registry, _ = made()
    router = Router(registry, "least_loaded")
    announced(registry, "prefill", "prefill", "decode")
    first = router.route(Wanted("m")).prefill
    assert first is not None
    second = router.another_prefill(Wanted("m"), [first.url])
    assert second is not None
    assert second.url != first.url
    assert router.another_prefill(Wanted("m"), [first.url, second.url]) is None
