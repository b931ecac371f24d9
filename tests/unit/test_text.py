"""Text as clients see it: whole, and with nothing of a stop string."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.test_tokenizer import KINDS

from cloverinfer.models import IncrementalDetokenizer
from cloverinfer.orchestrator.text import TextStream


class Letters:
    """A detokenizer whose tokens are characters; holds back a lone ``~`` until more comes."""

    def __init__(self):
        self.held = ""

    def add(self, token_ids):
        text = self.held + "".join(map(chr, token_ids))
        self.held = "~" if text.endswith("~") else ""
        return text[: len(text) - len(self.held)]

    def flush(self):
        text, self.held = self.held, ""
        return text


def feed(text, stops):
    stream = TextStream(Letters(), stops)
    pieces = []
    for char in text:
        if stream.stopped:
            break
        pieces.append(stream.add([ord(char)]))
    pieces.append(stream.flush())
    return stream, pieces


@pytest.mark.parametrize(
    ("text", "stops", "shown"),
    [
        ("hello world", (), "hello world"),
        ("hello END more", ("END",), "hello "),
        ("aab", ("ab",), "a"),
        ("ababac", ("abac",), "ab"),
        ("almost EN", ("END",), "almost EN"),
        ("x~y~", ("~z",), "x~y~"),
        ("one STOP two", ("two", "STOP"), "one "),
    ],
)
def test_text_before_the_stop_string_is_all_that_is_shown(text, stops, shown):
    stream, pieces = feed(text, stops)
    assert "".join(pieces) == shown
    assert stream.stopped == (shown != text)


def test_nothing_is_held_back_but_the_start_of_a_stop_string():
    stream = TextStream(Letters(), ("END",))
    assert stream.add([ord(c) for c in "ab"]) == "ab"
    assert stream.add([ord("E")]) == ""
    assert stream.add([ord("x")]) == "Ex"


def test_random_texts_agree_with_a_plain_search():
    rng = random.Random(7)
    for _ in range(2000):
        text = "".join(rng.choice("abc") for _ in range(rng.randrange(1, 30)))
        stops = tuple(
            "".join(rng.choice("abc") for _ in range(rng.randrange(1, 5))) for _ in range(2)
        )
        ends = [i + len(s) for s in stops for i in [text.find(s)] if i >= 0]
        expected = text
        if ends:
            seen = text[: min(ends)]
            expected = seen[: min(i for i in (seen.find(s) for s in stops) if i >= 0)]
        _, pieces = feed(text, stops)
        assert "".join(pieces) == expected


@pytest.mark.parametrize(
    ("min_tokens", "shown"), [(0, "say stop"), (4, "say stop"), (8, "say stop and stop")]
)
def test_a_stop_string_may_be_kept_and_only_counts_after_the_least_tokens(min_tokens, shown):
    stream = TextStream(Letters(), ("stop",), keep_stop=True, min_tokens=min_tokens)
    pieces = [stream.add([ord(char)]) for char in "say stop and stop, then"]
    assert "".join(pieces) + stream.flush() == shown
    assert stream.stopped_by == "stop"


PARTS = st.sampled_from(
    ["STOP", "ST", "S", "O", "P", "\u4e2d\u6587", "\u4e2d", "\U0001f600", " ", "e\u0301"]
)


@given(
    st.lists(PARTS, max_size=12),
    st.lists(PARTS, min_size=1, max_size=3),
    st.sampled_from(list(KINDS)),
)
@settings(max_examples=300, deadline=None)
def test_stop_strings_of_several_tokens_never_leak_and_nothing_else_waits(parts, stops, kind):
    tokenizer = KINDS[kind]
    if kind == "pieces":  # whose vocabulary is bytes but for a few letters
        parts = [part for part in parts if part.strip()]
    ids = tokenizer.encode("".join(parts))
    text = tokenizer.decode(ids)
    stream = TextStream(IncrementalDetokenizer(tokenizer), tuple(stops))
    shown = ""
    for count, token in enumerate(ids, 1):
        shown += stream.add([token])
        if stream.stopped:
            break
        if kind == "bytes":
            so_far = tokenizer.decode(ids[:count]).rstrip("\ufffd")
            held = max(overlap(so_far, stop) for stop in stops)
            assert shown == so_far[: len(so_far) - held]
    shown += stream.flush()
    found = [text.find(stop) for stop in stops if stop in text]
    assert stream.stopped == bool(found)
    assert text.startswith(shown)
    assert not any(stop in shown for stop in stops)
    if not found:
        assert shown == text
    else:
        assert text[len(shown) :].startswith(stream.stopped_by)


def overlap(text, stop):
    return max(size for size in range(len(stop)) if text.endswith(stop[:size]))
