"""The models that one server answers for: their names, engines and how each is spoken to.

Engines are started and closed by whoever made them; the failure of one is none of the others'.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config import ChatConfig
from ..core.errors import ConfigError, RequestError
from .engine import Engine
from .errors import ApiError

LONGEST_PATH = 4000
"""Characters; what is longer, or has several lines, is no path."""


@dataclass(frozen=True)
class Chat:
    """How chats become prompts, and answers tool calls."""

    template: str | None = None
    """None: the model's own."""
    auto_tools: bool = False
    tool_call_parser: str | None = None


def load_chat(config: ChatConfig) -> Chat:
    """Reads the template; ``ConfigError`` where it is neither a file nor a template that parses."""
    return Chat(
        _load_template(config.chat_template),
        config.enable_auto_tool_choice,
        config.tool_call_parser,
    )


def _load_template(given: str | None) -> str | None:
    if given is None:
        return None
    text, where = given, "chat.chat_template"
    if len(given) < LONGEST_PATH and "\n" not in given and Path(given).expanduser().is_file():
        where = given
        try:
            text = Path(given).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"chat.chat_template: cannot read {given}: {error}") from error
    elif "{{" not in given and "{%" not in given:
        raise ConfigError(f"chat.chat_template: {given!r} is neither a file nor a Jinja template")
    from ..models.chat_template import check_template  # late: it brings PyTorch with it

    try:
        check_template(text)
    except RequestError as error:
        raise ConfigError(f"{where}: {error}") from error
    return text


@dataclass(frozen=True)
class Model:
    """One served model."""

    names: tuple[str, ...]
    """What clients may call it, the first in answers; never empty."""
    engine: Engine
    chat: Chat = field(default_factory=Chat)

    @property
    def name(self) -> str:
        return self.names[0]


class Catalog:
    """All served models, by name."""

    def __init__(self, models: Sequence[Model]) -> None:
        assert models, "a server needs a model"
        self.models = tuple(models)
        self._by_name = {name: model for model in models for name in model.names}
        if len(self._by_name) < sum(len(model.names) for model in models):
            raise ConfigError("two served models have the same name: give each a name of its own")

    @classmethod
    def of(
        cls,
        engines: Sequence[Engine],
        names: Sequence[tuple[str, ...]],
        chats: Sequence[Chat],
    ) -> Catalog:
        """One model for each engine; no names stand for the engine's own."""
        rows = zip(engines, names, chats, strict=True)
        return cls([Model(given or (one.model_name,), one, chat) for one, given, chat in rows])

    @classmethod
    def single(cls, engine: Engine, name: str | None = None, chat: Chat | None = None) -> Catalog:
        return cls.of([engine], [(name,) if name else ()], [chat or Chat()])

    def find(self, name: str | None) -> Model:
        """The model of that name; None is the only one. Raises a 404 in OpenAI's form for a name
        that nobody has, ``RequestError`` where there is none and several are served.
        """
        known = ", ".join(map(repr, self._by_name))
        if name is None:
            if len(self.models) > 1:
                raise RequestError(f"model is missing; this server has {known}", "model")
            return self.models[0]
        model = self._by_name.get(name)
        if model is None:
            message = f"the model {name!r} does not exist; this server has {known}"
            raise ApiError(404, message, "invalid_request_error", "model", "model_not_found")
        return model

    def cards(self) -> Iterator[dict[str, Any]]:
        """Rows of ``/v1/models``: one for each name."""
        for name in self._by_name:
            yield self.card(name)

    def card(self, name: str) -> dict[str, Any]:
        model = self.find(name)
        return {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "cloverinfer",
            "root": model.engine.model_name,
            "parent": None,
            "max_model_len": model.engine.max_model_len,
        }
