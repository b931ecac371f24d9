"""Renders chat templates as transformers does, in a sandbox: a template is untrusted code."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..core.errors import RequestError


class _Generation(Extension):
    """``{% generation %}`` marks what a model wrote, for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 reads it from the class

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def render(template: str, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
    """The prompt that ``template`` makes of ``messages``; ``RequestError`` if it refuses them."""
    try:
        return str(_compile(template).render({**variables, "messages": messages}))
    except _REFUSALS as error:
        raise RequestError(
            f"the model's chat template does not take these messages: {error}", "messages"
        ) from error


def render_open(template: str, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
    """The same, up to the end of the last message's text, for the model to go on with it."""
    last = messages[-1]
    marked = [*messages[:-1], {**last, "content": last["content"] + _MARK}]
    text, mark, _ = render(template, marked, variables).rpartition(_MARK)
    if not mark:
        raise RequestError(
            "the chat template does not show the last message, so it cannot be continued",
            "continue_final_message",
        )
    return text


def check_template(template: str) -> None:
    """``RequestError`` for a template that does not parse."""
    try:
        _compile(template)
    except jinja2.TemplateError as error:
        raise RequestError(f"the chat template does not parse: {error}", "chat_template") from error


_MARK = "\ue000end\ue001"
"""Private characters, which no template takes for white space or for a word of its own."""
_REFUSALS = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError,
    RecursionError,
)  # fmt: skip
"""What a template raises over messages or variables that it was not written for."""


@functools.lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML, which no model was trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
