"""Chat templates with tools, variables and messages that go on; what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.test_tokenizer import byte_level

from cloverinfer.core.errors import RequestError
from cloverinfer.models import Tokenizer
from cloverinfer.models.chat_template import check_template

TEMPLATE = """
{%- if tools %}[{% for tool in tools %}{{ tool.function | tojson }}{% endfor %}]{% endif %}
{%- for message in messages %}<{{ message.role }}>{{ message.content | trim }}
{%- for call in message.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}
{%- if not loop.last or not open %}</s>{% endif %}
{%- endfor %}
{%- if think is defined %}{{ think }}{% endif %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""
MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I am "}]


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level(), {"eos_token": "</s>"}, TEMPLATE)


def test_tools_and_variables_reach_the_template(tokenizer: Tokenizer) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    call = {"function": {"name": "f", "arguments": {"q": "<é>"}}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    text = tokenizer.apply_chat_template(messages, variables={"tools": tools, "think": False})
    assert text == '[{"name": "f"}]<assistant>{"q": "<é>"}</s>False<assistant>'
    plain = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=False)
    assert plain == "<user>hi</s><assistant>I am</s>"


def test_the_last_message_is_left_open_as_it_was_written(tokenizer: Tokenizer) -> None:
    text = tokenizer.apply_chat_template(MESSAGES, continue_final=True)
    # Its last space stays, which the template trims from messages that are over.
    assert text == "<user>hi</s><assistant>I am "
    empty = [*MESSAGES[:1], {"role": "assistant", "content": ""}]
    assert tokenizer.apply_chat_template(empty, continue_final=True) == "<user>hi</s><assistant>"
    hidden = "{{ messages[0].content }}"
    with pytest.raises(RequestError, match="does not show the last message") as caught:
        tokenizer.apply_chat_template(MESSAGES, continue_final=True, template=hidden)
    assert caught.value.param == "continue_final_message"


def test_another_template_takes_the_place_of_the_models(tokenizer: Tokenizer) -> None:
    other = "{{ messages | length }} {{ eos_token }}"
    assert tokenizer.apply_chat_template(MESSAGES, template=other) == "2 </s>"
    bare = Tokenizer(byte_level())
    assert bare.decode(bare.chat_token_ids(MESSAGES, template="{{ messages[0].content }}")) == "hi"
    with pytest.raises(RequestError, match="no chat template"):
        bare.chat_token_ids(MESSAGES)


@pytest.mark.parametrize(
    ("template", "variables"),
    [
        ("{{ 1 / think }}", {"think": 0}),
        ("{{ messages[9].content.x }}", {}),
        ("{{ raise_exception('no') }}", {}),
        ("{{ think | tojson }}", {"think": {1, 2}}),
        ("{{ ''.__class__.__mro__ }}{{ ().__class__.__bases__[0].__subclasses__() }}", {}),
        ("{{ 'x' * think }}", {"think": 10**30}),
        ("{% for i in range(think) %}{% endfor %}", {"think": 10**12}),
        ("{{ messages.append(1) }}", {}),
        ("{{ '\ud800' }}", {}),
    ],
)
def test_what_a_template_does_not_take_is_the_requests_fault(
    tokenizer: Tokenizer, template: str, variables: dict[str, Any]
) -> None:
    with pytest.raises(RequestError):
        tokenizer.chat_token_ids(MESSAGES, template=template, variables=variables)


def test_a_template_that_does_not_parse_is_told() -> None:
    check_template(TEMPLATE)
    with pytest.raises(RequestError, match="does not parse"):
        check_template("{% for %}")
