"""Tokenizers of Hugging Face folders, chat templates, and text that arrives token by token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from cloverinfer.core.errors import ModelError, PromptTooLongError, RequestError
from cloverinfer.models import IncrementalDetokenizer, Tokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level() -> tokenizers.Tokenizer:
    """The 256 bytes, three merges and two special tokens. The last merge cuts characters: a space
    with the first byte of an emoji, as in vocabularies that were trained on many."""
    merges = [("h", "e"), ("l", "l"), ("\u0120", "\u00f0")]
    words = [*ALPHABET, *("".join(merge) for merge in merges)]
    vocab = {token: i for i, token in enumerate(words)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    return backend


def sentence_pieces() -> tokenizers.Tokenizer:
    """Llama 2's way: a mark for spaces, bytes as tokens, the first space stripped."""
    words = [
        "<unk>",
        *(f"<0x{b:02X}>" for b in range(256)),
        "\u2581",
        "\u2581the",
        "a",
        "b",
        "\u2581a",
    ]
    model = models.BPE(
        vocab={word: i for i, word in enumerate(words)}, merges=[], byte_fallback=True
    )
    backend = tokenizers.Tokenizer(model)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<s>"])
    return backend


KINDS = {"bytes": Tokenizer(byte_level()), "pieces": Tokenizer(sentence_pieces())}


def pieces_of(tokenizer: Tokenizer, ids: list[int], step: int = 1) -> list[str]:
    stream = IncrementalDetokenizer(tokenizer)
    pieces = [stream.add(ids[i : i + step]) for i in range(0, len(ids), step)]
    return [*pieces, stream.flush()]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_pieces_join_to_the_whole(kind: str, data: st.DataObject) -> None:
    tokenizer = KINDS[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=60))
    step = data.draw(st.integers(1, 4))
    assert "".join(pieces_of(tokenizer, ids, step)) == tokenizer.decode(ids)


@given(text=st.text(max_size=40) | st.text("a \U0001f600\u00e9\u4e2d\u0301\u200d", max_size=20))
@settings(max_examples=200, deadline=None)
def test_text_comes_back_and_never_in_half_characters(text: str) -> None:
    tokenizer = KINDS["bytes"]
    ids = tokenizer.encode(text)
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert all("\ufffd" not in piece for piece in pieces)
        assert pieces[-1] == ""
        for count in range(len(ids)):
            # Nothing is held back but the character that is not whole yet.
            so_far = tokenizer.decode(ids[:count]).rstrip("\ufffd")
            assert "".join(pieces[:count]) == so_far


@given(text=st.text(max_size=20))
@settings(max_examples=100, deadline=None)
def test_the_bytes_of_tokens_join_to_those_of_the_text(text: str) -> None:
    tokenizer = KINDS["bytes"]
    ids = tokenizer.encode(text)
    assert b"".join(tokenizer.token_bytes(one) for one in ids) == text.encode()


def test_tokens_have_bytes_of_their_own() -> None:
    pieces, letters = KINDS["pieces"], KINDS["bytes"]
    spelled = [pieces.token_bytes(pieces.encode(text)[-1]) for text in ("\u2581", "a", "\u00e9")]
    assert spelled == [b" ", b"a", b"\xa9"]
    (special,) = letters.encode("</s>")
    assert letters.token_bytes(special) == b"</s>"
    assert letters.token_bytes(10**6) == b""


def test_complete_characters_are_not_held_back() -> None:
    tokenizer = KINDS["bytes"]
    assert pieces_of(tokenizer, tokenizer.encode("hi é!"))[:6] == ["h", "i", " ", "", "é", "!"]
    assert pieces_of(tokenizer, tokenizer.encode("! \U0001f600a\U0001f468\u200d\U0001f469")) == [
        "!", " ", "", "", "\U0001f600", "a", "", "", "", "\U0001f468", "", "", "\u200d", "", "", "",
        "\U0001f469", "",
    ]  # fmt: skip


def test_the_cost_per_token_is_bounded() -> None:
    class Counting:
        decoded = 0
        special_token_ids = frozenset[int]()

        def is_byte(self, token_id: int) -> bool:
            return False

        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            self.decoded += len(ids)
            return KINDS["bytes"].decode(ids)

    broken = KINDS["bytes"].encode("é")[1]  # a byte that begins no character
    for ids in ([5] * 4000, [broken] * 4000):
        counting = Counting()
        stream = IncrementalDetokenizer(counting)  # type: ignore[arg-type]
        text = "".join(stream.add([token]) for token in ids) + stream.flush()
        assert text == KINDS["bytes"].decode(ids)
        assert counting.decoded < 20 * len(ids)


def save(folder: Path, **config: Any) -> Path:
    byte_level().save(str(folder / "tokenizer.json"))
    base = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps(base | config))
    return folder


def test_a_folder_gives_ids_and_ends(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.eos_token_ids == (1, 2, 260)
    assert tokenizer.vocab_size == 261
    assert tokenizer.id_to_token(256) == "he"
    assert tokenizer.id_to_token(9999) is None
    assert tokenizer.decode(tokenizer.encode("hello</s>")) == "hello"
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match="no chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])


TEMPLATE = """{{ bos_token }}
{% for message in messages %}
    {% if loop.index > 3 %}{% break %}{% endif %}
    {% if message['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}
{{ message | tojson }}{{ eos_token }}
{% endfor %}
{% if add_generation_prompt %}go{% endif %}"""


@pytest.mark.parametrize("place", ["config", "named", "jinja"])
def test_templates_render_as_in_transformers(place: str, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    named = [{"name": "other", "template": "no"}, {"name": "default", "template": TEMPLATE}]
    template = {"config": TEMPLATE, "named": named}.get(place)
    save(tmp_path, **({"chat_template": template} if template else {}))
    if place == "jinja":
        (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=byte_level(), bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE
    )
    messages = [{"role": "user", "content": "<é & 'x'>"}, {"role": "assistant", "content": "b"}]
    ours = Tokenizer.from_folder(tmp_path)
    for prompt in (True, False):
        expected = theirs.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=prompt
        )
        assert ours.apply_chat_template(messages, add_generation_prompt=prompt) == expected
    with pytest.raises(RequestError, match="no tools"):
        ours.apply_chat_template([{"role": "tool", "content": ""}])


def test_templates_run_in_a_sandbox(tmp_path: Path) -> None:
    save(tmp_path, chat_template="{{ messages.__class__.__mro__ }}")
    with pytest.raises(RequestError, match="unsafe"):
        Tokenizer.from_folder(tmp_path).apply_chat_template([])


def test_damaged_tokenizers_are_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


def composing() -> tokenizers.Tokenizer:
    backend = byte_level()
    backend.normalizer = normalizers.NFC()
    return backend


BOUNDED = {"composing": Tokenizer(composing()), **KINDS}


@pytest.mark.parametrize("kind", BOUNDED)
@given(text=st.text(alphabet="a heltU\u0301\u1100\u1161\u11a8\U0001f60b", max_size=60))
def test_no_text_that_fits_is_refused_for_its_characters(kind: str, text: str) -> None:
    tokenizer = BOUNDED[kind]
    ids = tokenizer.encode(text)
    assert tokenizer.encode(text, most=len(ids)) == ids


def test_what_is_surely_too_long_is_not_read() -> None:
    for kind, longest in (("bytes", 4), ("pieces", 6), ("composing", 16)):
        tokenizer = BOUNDED[kind]
        assert tokenizer.encode("a" * 5 * longest, most=5)
        with pytest.raises(PromptTooLongError, match=f"{5 * longest + 1} characters"):
            tokenizer.encode("a" * (5 * longest + 1), most=5)


def without(part: str) -> Tokenizer:
    """A tokenizer by which any length of text may be few tokens."""
    backend = byte_level()
    if part == "blanks":
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.WhitespaceSplit(), backend.pre_tokenizer]
        )
    elif part == "accents":
        backend.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])
    elif part == "letters":
        backend.pre_tokenizer = pre_tokenizers.Digits()
    else:
        token = tokenizers.AddedToken("<mask>", lstrip=True, special=True)
        backend.add_special_tokens([token])
    return Tokenizer(backend)


@pytest.mark.parametrize("part", ["blanks", "accents", "letters", "margins"])
def test_where_characters_may_be_left_out_there_is_no_bound(part: str) -> None:
    text = {"accents": "a" + "\u0301" * 900, "letters": "\u4e00" * 900}.get(part, "a" + " " * 900)
    text += "<mask>" if part == "margins" else ""
    assert without(part).encode(text, most=1) is not None
