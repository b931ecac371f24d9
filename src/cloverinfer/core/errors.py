"""Every error that CloverInfer raises on purpose.

``ValueError`` subclasses are the caller's to mend and say how; the others say what broke.
"""

from __future__ import annotations


class CloverError(Exception):
    """Base of all errors raised on purpose by this package."""


class ConfigError(CloverError, ValueError):
    """A configuration value or key is wrong; the message names it and what is allowed."""


class RequestError(CloverError, ValueError):
    """A request cannot be served as asked (empty or too long prompt, bad parameter)."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        """Name of the offending field, where there is one."""


class PromptTooLongError(RequestError):
    """A prompt leaves no room for output."""

    @classmethod
    def of(cls, length: str, most: int, param: str = "prompt") -> PromptTooLongError:
        """``length``: what it has; ``most``: tokens that prompt and output may be together."""
        return cls(
            f"the prompt has {length}, which leaves no room for output: the longest prompt and "
            f"output of this model together are {most} tokens",
            param,
        )


class QueueFullError(CloverError):
    """The bounded waiting queue is full; try again later."""


class ModelError(CloverError, ValueError):
    """A model is unknown, or its files are missing, damaged or not supported."""


class NodeStartError(CloverError):
    """A node could not start; the message carries the node's name and its own reason."""


class NodeDiedError(CloverError):
    """A node that was serving is gone."""


class TransportError(CloverError):
    """A put, a connection or a registration failed."""


class PeerGoneError(TransportError):
    """A put to another node failed: for this node's purposes that one is gone."""

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(f"{peer}: {reason}")
        self.peer = peer
        """The node's name."""


class RefusedError(TransportError):
    """A peer is there and will never meet this one: another secret, another version of the wire."""


class DeadlineError(TransportError, TimeoutError):
    """Something did not finish within its deadline."""


class EngineClosedError(CloverError):
    """The engine was shut down, or failed, before the request could finish."""


def describe(problem: BaseException) -> str:
    """One line that says what went wrong, for reports to other processes."""
    return (
        str(problem) if isinstance(problem, CloverError) else f"{type(problem).__name__}: {problem}"
    )


def check_text(text: str, param: str = "prompt") -> None:
    """``RequestError`` for text that no tokenizer can read (a lone surrogate)."""
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        raise RequestError(f"the {param} is not valid Unicode text", param) from problem
