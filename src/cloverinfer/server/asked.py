"""From the names that clients use to ``SamplingParams``, and what is refused on the way.

The core grows: a parameter of which ``SamplingParams`` has a field is handed on; one of which it
has none yet is refused by name unless it asks for nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from ..core.errors import RequestError
from ..core.sampling import SamplingParams

PLAIN = (
    "temperature", "top_p", "top_k", "min_p", "seed", "stop_token_ids", "ignore_eos", "min_tokens",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "bad_words",
    "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens", "n",
)  # fmt: skip
"""Parameters that mean the same to the core, under the same names."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "min_p": (0,),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "bad_words": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "use_beam_search": (False,),
    "audio": (),
    "prediction": (),
    "moderation": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "lora_request": (),
    "chat_template": (),
    "logits_processors": ([],),
}
"""What asks for nothing (beside null), of parameters that the core lacks or nobody serves."""
NEVER = frozenset(NEUTRAL) - frozenset(PLAIN)
"""Parameters that are only read to be refused."""


def refuse_unsupported(body: BaseModel, names: frozenset[str] = NEVER) -> None:
    for name in type(body).model_fields:
        if name in names and not is_neutral(name, getattr(body, name)):
            raise RequestError(f"{name} is not supported by this server", name)


def is_neutral(name: str, value: Any) -> bool:
    # 1 == True in Python, so types are compared too; 0 and 0.0 are alike.
    return value is None or any(
        value == one and isinstance(value, bool) == isinstance(one, bool)
        for one in NEUTRAL.get(name, ())
    )


def known(field: str) -> bool:
    """Whether the core can do what ``field`` asks for."""
    return field in SamplingParams.__struct_fields__


def need(field: str, param: str | None = None) -> None:
    """``RequestError`` naming ``param`` where the core lacks ``field``."""
    if not known(field):
        name = param or field
        raise RequestError(f"{name} is not supported by this server yet", name)


def sampling_of(body: BaseModel, max_tokens: int, more: Mapping[str, Any]) -> SamplingParams:
    """Raises ``RequestError`` naming the parameter that is out of range or not supported yet.

    ``more``: fields of ``SamplingParams`` that the endpoint works out itself; None is left out.
    """
    given = {name: value for name, value in more.items() if value is not None}
    for name in PLAIN:
        value = getattr(body, name, None)
        if value is None:
            continue
        if known(name):
            given[name] = value
        elif not is_neutral(name, value):
            need(name)
    for name in given:
        need(name)
    stop = getattr(body, "stop", None)
    if stop:
        given["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    bias = _logit_bias(getattr(body, "logit_bias", None))
    if bias:
        need("logit_bias")
        given["logit_bias"] = bias
    return SamplingParams(max_tokens=max_tokens, **given)


def _logit_bias(given: Mapping[str, float] | None) -> dict[int, float]:
    """Token ids arrive as strings, since JSON has no other keys."""
    bias = {}
    for key, value in (given or {}).items():
        # Not int(): that takes "1_0", " 1" and digits of other scripts.
        if not (key.isascii() and key.isdigit() and len(key) < 11):
            raise RequestError(f"logit_bias: {key!r} is no token id", "logit_bias")
        bias[int(key)] = float(value)
    return bias


STRUCTURE = "structured_outputs"
"""The core's field for what an answer must look like."""


def structure_of(body: BaseModel) -> tuple[str, dict[str, Any] | None]:
    """What the answer must look like (one of json, json_object, regex, choice or grammar), after
    the name of the parameter that says so.

    ``RequestError`` where several of them say so.
    """
    found: list[tuple[str, dict[str, Any]]] = []
    for param, kind in GUIDED.items():
        value = getattr(body, param, None)
        if value is not None:
            found.append((param, {kind: value}))
    outputs = getattr(body, "structured_outputs", None)
    if outputs is not None:
        found.append(("structured_outputs", _one_kind(outputs)))
    form = getattr(body, "response_format", None)
    if form is not None and form.type != "text":
        found.append(("response_format", _of_format(form)))
    if not found:
        return STRUCTURE, None
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise RequestError(f"{names} exclude each other: give one of them", found[1][0])
    param, structure = found[0]
    if isinstance(structure.get("json"), str):
        structure = {"json": _parsed(structure["json"], param)}
    return param, structure


def renamed(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """The same error about the parameter that the client knows."""
    own = names.get(error.param or "", error.param or "")
    text = str(error)
    if error.param and text.startswith(error.param):
        text = own + text[len(error.param) :]
    return type(error)(text, own or None)


GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}


def _one_kind(outputs: BaseModel) -> dict[str, Any]:
    given = outputs.model_dump(exclude_none=True)
    if given.get("json_object") is False:
        del given["json_object"]
    if len(given) != 1:
        raise RequestError(
            "structured_outputs needs exactly one of json, json_object, regex, choice, grammar",
            "structured_outputs",
        )
    return given


def _of_format(form: Any) -> dict[str, Any]:
    if form.type == "json_object":
        return {"json_object": True}
    if form.json_schema is None:
        raise RequestError("response_format.json_schema is missing", "response_format")
    schema = form.json_schema.schema_
    return {"json_object": True} if schema is None else {"json": schema}


def _parsed(text: str, param: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{param} is not valid JSON: {error}", param) from error
