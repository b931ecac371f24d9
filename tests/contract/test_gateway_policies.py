"""What every policy of the orchestrator promises, and what each promises beside it."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloverinfer.config.orchestrator import POLICIES
from cloverinfer.core.errors import ConfigError
from cloverinfer.gateway.policies import Candidate, create_policy, policy_names
from cloverinfer.gateway.policies import prefix_aware as prefixes

BLOCKS = [bytes([i]) * 16 for i in range(200)]
CANDIDATES = st.lists(
    st.builds(Candidate, st.sampled_from("abcdef"), st.integers(0, 5)),
    min_size=1,
    unique_by=lambda one: one.name,
)


def idle(names: str) -> list[Candidate]:
    return [Candidate(name, 0) for name in names]


def test_names_are_those_of_the_settings() -> None:
    assert tuple(policy_names()) == POLICIES
    with pytest.raises(ConfigError, match="unknown policy 'x'; known: round_robin"):
        create_policy("x")


@pytest.mark.parametrize("name", POLICIES)
@given(rounds=st.lists(st.tuples(CANDIDATES, st.integers(0, 9), st.booleans()), max_size=20))
def test_a_choice_is_a_candidate_and_repeats_itself(
    name: str, rounds: list[tuple[list[Candidate], int, bool]]
) -> None:
    first, second = create_policy(name), create_policy(name)
    for candidates, length, forget in rounds:
        blocks = BLOCKS[:length]
        picked = first.pick(candidates, blocks)
        assert picked in candidates
        assert picked == second.pick(list(reversed(candidates)), blocks)
        if forget:
            first.forget(picked.name)
            second.forget(picked.name)


@pytest.mark.parametrize("name", POLICIES)
def test_equals_have_equal_shares(name: str) -> None:
    policy = create_policy(name)
    turns = Counter(policy.pick(idle("abc"), []).name for _ in range(30))
    assert turns == {"a": 10, "b": 10, "c": 10}


def test_round_robin_looks_at_nothing_and_skips_nobody() -> None:
    policy = create_policy("round_robin")
    loaded = [Candidate("a", 9), Candidate("b", 0)]
    assert [policy.pick(loaded, []).name for _ in range(4)] == ["a", "b", "a", "b"]
    # c comes, b is away for a while, and has its turn as soon as it is back.
    assert [policy.pick(idle("ac"), []).name for _ in range(3)] == ["c", "a", "c"]
    assert policy.pick(idle("abc"), []).name == "b"


@given(CANDIDATES)
def test_least_loaded_takes_the_fewest(candidates: list[Candidate]) -> None:
    picked = create_policy("least_loaded").pick(candidates, BLOCKS[:3])
    assert picked.pressure == min(one.pressure for one in candidates)


def test_prefix_aware_goes_where_the_beginning_is_until_there_is_too_much_to_do() -> None:
    policy = create_policy("prefix_aware")
    home = policy.pick(idle("ab"), BLOCKS[:8]).name
    other = "b" if home == "a" else "a"
    for length in (8, 6, 8):
        assert policy.pick(idle("ab"), BLOCKS[:length]).name == home
    pressed = [Candidate(home, prefixes.WORTH - 1), Candidate(other, 0)]
    assert policy.pick(pressed, BLOCKS[:8]).name == home
    pressed = [Candidate(home, prefixes.WORTH + 1), Candidate(other, 0)]
    assert policy.pick(pressed, BLOCKS[:8]).name == other


def test_prefix_aware_knows_beginnings_only_and_forgets_with_the_instance() -> None:
    policy = create_policy("prefix_aware")
    home = policy.pick(idle("ab"), BLOCKS[:8]).name
    other = "b" if home == "a" else "a"
    # What begins differently has nothing of it, whatever follows: it is the other's turn.
    assert policy.pick(idle("ab"), [BLOCKS[100], *BLOCKS[1:8]]).name == other
    policy.forget(home)
    pressed = [Candidate(home, 1), Candidate(other, 0)]
    assert policy.pick(pressed, BLOCKS[:8]).name == other


def test_prefix_aware_keeps_a_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "MOST_BLOCKS", 10)
    policy = prefixes.PrefixAware()
    for start in range(0, 100, 8):
        policy.pick(idle("a"), BLOCKS[start : start + 8])
    assert len(policy._held["a"]) == 10
    # The last prompt's beginning is there whole.
    assert policy._share("a", BLOCKS[96:104]) == 1.0
    assert policy._share("a", BLOCKS[:8]) == 0.0
    # Of one that is longer than the memory the beginning is kept: the rest is no use without it.
    policy.pick(idle("a"), BLOCKS[120:140])
    assert policy._share("a", BLOCKS[120:140]) == 0.5
