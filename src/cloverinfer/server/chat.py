"""The body of a chat: messages, tools, and what a chat template reads of them."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ..core.errors import RequestError, check_text
from .asked import structure_of
from .protocol import MOST_LOGPROBS, STRICT, Body, _in_range

LENIENT = ConfigDict(extra="ignore", strict=True)
"""Of what clients send back as they got it, or describe freely, more may come than is read."""
RESERVED = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template"}
)


class ContentPart(BaseModel):
    """Parts that are no text are read, so as to be refused by their type."""

    model_config = LENIENT
    type: str
    text: str | None = None

    def plain(self, where: str) -> str:
        if self.type != "text":
            message = f"{where}: content of type {self.type!r} is not supported, only text is"
            raise RequestError(message, where)
        if self.text is None:
            raise RequestError(f"{where}.text is missing", f"{where}.text")
        return self.text


class FunctionCall(BaseModel):
    model_config = LENIENT
    name: str
    arguments: str


class ToolCall(BaseModel):
    model_config = LENIENT
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(BaseModel):
    """Null fields that answers carry are taken back, so a client may append what it got."""

    model_config = STRICT
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None
    reasoning: Any = None
    reasoning_content: Any = None
    parsed: Any = None

    def plain(self, where: str) -> dict[str, Any]:
        """What a chat template reads. ``RequestError`` naming ``where`` if there is nothing."""
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise RequestError(f"{where}.content is missing", f"{where}.content")
        if self.tool_calls and self.role != "assistant":
            raise RequestError(f"{where}: only the assistant calls tools", f"{where}.tool_calls")
        content = self.content or ""
        if not isinstance(content, str):
            parts = enumerate(content)
            content = "".join(part.plain(f"{where}.content.{i}") for i, part in parts)
        check_text(content)
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": content}
        if self.name is not None:
            message["name"] = self.name
        if self.role == "tool":
            message["tool_call_id"] = self.tool_call_id or ""
        if self.tool_calls:
            message["tool_calls"] = [_plain_call(one, where) for one in self.tool_calls]
        return message


def _plain_call(call: ToolCall, where: str) -> dict[str, Any]:
    # Templates write arguments as JSON themselves, so they are given the value.
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError) as error:
        param = f"{where}.tool_calls"
        raise RequestError(f"{param}: the arguments are not valid JSON: {error}", param) from error
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id or "", "type": "function", "function": function}


class FunctionSpec(BaseModel):
    model_config = LENIENT
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    model_config = LENIENT
    type: Literal["function"]
    function: FunctionSpec


class ChosenFunction(BaseModel):
    model_config = STRICT
    name: str


class NamedChoice(BaseModel):
    model_config = STRICT
    type: Literal["function"]
    function: ChosenFunction


class ChatRequest(Body):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: Any = None
    documents: list[dict[str, str]] | None = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    moderation: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None

    def check(self) -> None:
        super().check()
        _in_range("top_logprobs", self.top_logprobs, 0, MOST_LOGPROBS)
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", "top_logprobs")
        if self.continue_final_message and self.add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other",
                "add_generation_prompt",
            )
        if self.add_special_tokens:
            raise RequestError(
                "add_special_tokens must be false for chats: the chat template writes them itself",
                "add_special_tokens",
            )
        reserved = RESERVED & set(self.chat_template_kwargs or ())
        if reserved:
            name = f"chat_template_kwargs.{min(reserved)}"
            raise RequestError(f"{name} is set by a parameter of its own", name)
        self._check_tools()

    def _check_tools(self) -> None:
        names = [tool.function.name for tool in self.tools or ()]
        choice = self.tool_choice
        if choice in (None, "none"):
            return
        if not names:
            raise RequestError("tool_choice needs tools to choose from", "tool_choice")
        if isinstance(choice, NamedChoice) and choice.function.name not in names:
            raise RequestError(
                f"tool_choice: there is no tool {choice.function.name!r}", "tool_choice"
            )
        if choice != "auto" and structure_of(self)[1] is not None:
            raise RequestError(
                "tool_choice and a response_format (or guided decoding) exclude each other",
                "tool_choice",
            )

    def structure_name(self) -> str:
        forced = self.tools and self.tool_choice not in (None, "none", "auto")
        return "tool_choice" if forced else super().structure_name()

    def plain_messages(self) -> list[dict[str, Any]]:
        if not self.messages:
            raise RequestError("messages must not be empty", "messages")
        return [one.plain(f"messages.{i}") for i, one in enumerate(self.messages)]

    def template_variables(self) -> dict[str, Any]:
        """What the template reads beside the messages."""
        variables = dict(self.chat_template_kwargs or {})
        if self.tools and self.tool_choice != "none":
            variables["tools"] = [tool.model_dump(exclude_none=True) for tool in self.tools]
        if self.documents is not None:
            variables["documents"] = self.documents
        return variables

    @property
    def opens_answer(self) -> bool:
        """Whether the prompt ends where the assistant's turn begins."""
        if self.add_generation_prompt is not None:
            return self.add_generation_prompt
        return not self.continue_final_message

    def logprobs_wanted(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def token_limit(self) -> int | None:
        """``max_completion_tokens``, else ``max_tokens``."""
        limit = self.max_completion_tokens
        return self.max_tokens if limit is None else limit
