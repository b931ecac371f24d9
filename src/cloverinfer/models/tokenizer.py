"""Text to token ids and back, over the ``tokenizers`` library; chat messages to text.

It reads a Hugging Face folder and does not need transformers. Streams of ids become text through
``IncrementalDetokenizer``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from ..core.errors import ModelError, PromptTooLongError, RequestError, check_text
from .chat_template import render, render_open
from .convert import NO_TOKENIZER
from .text_bound import byte_letters, characters_per_token

_REPLACEMENT = "\ufffd"
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


class Tokenizer:
    """A model's tokenizer and its chat template."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: dict[str, str] | None = None,
        chat_template: str | None = None,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        """``special_tokens``: by role (``bos_token``, ...), as templates name them."""
        self._backend = backend
        self._special = special_tokens or {}
        self._template = chat_template
        ids = list(eos_token_ids)
        if "eos_token" in self._special:
            own = backend.token_to_id(self._special["eos_token"])
            ids += [] if own is None else [own]
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys(ids))
        description = json.loads(backend.to_str())
        kinds = _decoder_kinds(description)
        self._characters = characters_per_token(description, backend.get_vocab())
        self._byte_tokens = "ByteFallback" in kinds
        self._byte_level = "ByteLevel" in kinds
        added = backend.get_added_tokens_decoder()
        self._added = frozenset(added)
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """The tokenizer of a Hugging Face folder; ``ModelError`` where there is none."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            return cls._from_transformers(folder)
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more specific
            raise ModelError(f"{path}: damaged or unknown tokenizer ({error})") from error
        return cls._finish(backend, folder)

    @property
    def vocab_size(self) -> int:
        """Token ids are below this; a model's matrix may have more rows."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def serialized(self) -> str:
        """The text of a ``tokenizer.json`` that describes it."""
        return str(self._backend.to_str())

    def encode(
        self, text: str, add_special_tokens: bool = True, most: int | None = None
    ) -> list[int]:
        """Token ids of ``text``; special tokens written out in it are recognised.

        ``PromptTooLongError`` at once where its length alone shows more than ``most`` tokens.
        """
        each = self._characters
        if most is not None and each is not None and len(text) > most * each:
            raise PromptTooLongError.of(f"{len(text)} characters", most)
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ``ids``; bytes that are no UTF-8 become U+FFFD. Unknown ids have no text."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling; None for an id that it does not have."""
        return self._backend.id_to_token(token_id)

    def is_byte(self, token_id: int) -> bool:
        """Whether the token is a byte whose meaning depends on the bytes around it."""
        if not self._byte_tokens:
            return False
        token = self._backend.id_to_token(token_id)
        return token is not None and len(token) == 6 and token.startswith("<0x")

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to a text, which need not be whole characters; empty if unknown."""
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._added:
            return token.encode()
        if self.is_byte(token_id):
            return bytes([int(token[3:5], 16)])
        if self._byte_level:
            table = byte_letters()
            return bytes(table[letter] for letter in token if letter in table)
        return token.replace("\u2581", " ").encode()

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        template: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for ``messages`` (each with ``role`` and ``content``).

        ``continue_final``: it ends within the last message, which the model goes on with.
        ``template`` replaces the model's own; ``variables`` are what it reads beside the messages
        (``tools``, say). Encode the prompt with ``add_special_tokens=False``: a template writes its
        own. ``RequestError`` where there is no template or it refuses the messages.
        """
        template = template or self._template
        if template is None:
            raise RequestError("the model has no chat template; use a plain completion", "messages")
        known = {**self._special, "tools": None, **(variables or {})}
        known["add_generation_prompt"] = add_generation_prompt and not continue_final
        return (render_open if continue_final else render)(template, messages, known)

    def chat_token_ids(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        template: str | None = None,
        variables: Mapping[str, Any] | None = None,
        most: int | None = None,
    ) -> list[int]:
        """``apply_chat_template`` as tokens; ``most`` as for ``encode``."""
        text = self.apply_chat_template(
            messages, add_generation_prompt, continue_final, template, variables
        )
        check_text(text, "messages")  # names and tools may bring what no tokenizer can read
        return self.encode(text, add_special_tokens=False, most=most)

    @classmethod
    def _finish(cls, backend: tokenizers.Tokenizer, folder: Path) -> Tokenizer:
        backend.no_truncation()
        backend.no_padding()
        config = _json(folder / "tokenizer_config.json")
        special = {name: _token_text(config[name]) for name in _SPECIAL if config.get(name)}
        eos: list[int] = []
        for name in ("generation_config.json", "config.json"):
            value = _json(folder / name).get("eos_token_id")
            eos += [value] if isinstance(value, int) else list(value or ())
        return cls(backend, special, _chat_template(folder, config), eos)

    @classmethod
    def _from_transformers(cls, folder: Path) -> Tokenizer:
        """Folders with an older kind of vocabulary: transformers converts it, if installed."""
        note = folder / NO_TOKENIZER
        if note.is_file():
            raise ModelError(note.read_text(encoding="utf-8"))
        older = ("tokenizer.model", "vocab.json", "vocab.txt")
        if not any((folder / name).is_file() for name in older):
            raise ModelError(
                f"{folder}: there is no tokenizer.json, so text cannot be tokenized; "
                "add the model's tokenizer files, or give prompts as token ids"
            )
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise ModelError(
                f"{folder}: there is no tokenizer.json; pip install transformers to convert its "
                "older vocabulary, or give prompts as token ids"
            ) from error
        try:
            converted = AutoTokenizer.from_pretrained(str(folder), use_fast=True)
        except (ValueError, OSError, KeyError, ImportError) as error:
            raise ModelError(
                f"{folder}: transformers cannot read its tokenizer ({error})"
            ) from error
        if not getattr(converted, "is_fast", False):
            raise ModelError(f"{folder}: its tokenizer has no fast form, which is needed here")
        return cls._finish(converted.backend_tokenizer, folder)


class IncrementalDetokenizer:
    """Turns a growing list of ids into text, piece by piece; the pieces join to ``decode(all)``.

    Only the ids since the last piece, and those of that piece as context (a decoder may treat the
    first token of a text in its own way), are decoded. Text that ends within a character waits
    for the rest of it; the longer it has waited the rarer it is looked at, so that the cost per
    token stays bounded whatever the model says.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._context: list[int] = []
        """Ids whose text has been given out, kept for what they mean to those after them."""
        self._context_text = ""
        self._pending: list[int] = []
        self._given = 0
        """Characters of the pending ids' text that have been given out."""
        self._look_at = 1

    def add(self, token_ids: Sequence[int]) -> str:
        """The text that these ids complete; empty while it is not yet certain."""
        if self._skip:  # they are not there: bytes on either side of one belong together
            token_ids = [one for one in token_ids if one not in self._tokenizer.special_token_ids]
        if not token_ids:
            return ""
        self._pending += token_ids
        if len(self._pending) < self._look_at:
            return ""
        if self._tokenizer.is_byte(self._pending[-1]):
            return self._wait()
        text = self._decode(self._context + self._pending)
        if text.endswith(_REPLACEMENT):  # what stands before the unfinished character is certain
            return self._wait(text.rstrip(_REPLACEMENT))
        if len(text) <= len(self._context_text):
            return self._wait()
        return self._give(text)

    def flush(self) -> str:
        """What is left, as it stands: the end of the text."""
        if not self._pending:
            return ""
        return self._give(self._decode(self._context + self._pending))

    def _wait(self, certain: str = "") -> str:
        """Keeps the pending ids; gives out what is new of ``certain``, the text so far."""
        waiting = len(self._pending)
        self._look_at = waiting + max(1, waiting // 8 if waiting >= 16 else 0)
        piece = certain[len(self._context_text) + self._given :]
        self._given += len(piece)
        return piece

    def _give(self, text: str) -> str:
        piece = text[len(self._context_text) + self._given :]
        self._given = 0
        self._context, self._pending = self._pending, []
        self._context_text = self._decode(self._context)
        self._look_at = 1
        return piece

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)


def _decoder_kinds(description: dict[str, Any]) -> set[str]:
    """Types of all decoders, those inside sequences included."""
    decoder = description.get("decoder")
    found, todo = set(), [decoder] if decoder else []
    while todo:
        one = todo.pop()
        found.add(one["type"])
        todo += one.get("decoders", [])
    return found


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """The template named ``default`` where there are several."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default") or next(iter(named.values()), None)
    return template


def _token_text(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _json(path: Path) -> dict[str, Any]:
    """An optional JSON object; empty where there is none."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: not readable as JSON ({error})") from error
    return value if isinstance(value, dict) else {}
