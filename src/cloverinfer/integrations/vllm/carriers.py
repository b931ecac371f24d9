"""Which transports carry blocks of an engine's cache, by the kind of memory that it is in.

Asks transports what they can do; has no endpoint of any.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...core.errors import ConfigError
from ...transport import DeviceMemory, missing
from ...transport import capabilities as capabilities_of
from ...transport.choice import ORDER
from ...transport.registry import transport_names
from .memory import Memory

AUTO = "auto"
HOST, CUDA = "host", "cuda"
_PLACES = {HOST: "in host memory", CUDA: "on a GPU"}


def kind_of(buffers: Sequence[Memory]) -> str:
    """As ``Capabilities.memory`` names it."""
    return CUDA if any(isinstance(each, DeviceMemory) for each in buffers) else HOST


def carriers(transport: str, kind: str) -> list[str]:
    """``transport`` alone, or where that is auto, all that this host can use, fastest first.
    ``ConfigError`` where none moves memory of this kind between processes, with what does."""
    known = [each for each in ORDER if each in transport_names()]
    direct = [each for each in known if _reaches(each, kind)]
    copying = [each for each in known if is_staged(each, kind)]
    if transport != AUTO:
        if transport not in (*direct, *copying):
            raise ConfigError(
                f"the KV cache is {_PLACES[kind]}, where transport {transport} does not reach: "
                f"set it to auto or to one of {', '.join((*direct, *copying))}"
            )
        return [transport]
    # Processes of one host whose GPUs do not reach each other have the network's wire, too.
    able = [*direct, *(each for each in copying if capabilities_of(each).cross_host)]
    lacking = {each: missing(each) for each in able}
    usable = [each for each in able if not lacking[each]]
    if not usable:
        reasons = "; ".join(f"{each}: {reason}" for each, reason in lacking.items())
        raise ConfigError(f"the KV cache is {_PLACES[kind]}, and nothing here moves it: {reasons}")
    return usable


def is_staged(transport: str, kind: str) -> bool:
    """Whether it moves a GPU's cache by way of copies in host memory."""
    if kind != CUDA or transport == "ray":
        return False
    able = capabilities_of(transport)
    return able.cross_process and kind not in able.memory and able.puts_into_any_memory


def _reaches(transport: str, kind: str) -> bool:
    """Whether peers in other processes can write into the engine's own memory."""
    if transport == "ray":
        return False
    able = capabilities_of(transport)
    if not able.cross_process or kind not in able.memory:
        return False
    return kind == CUDA or able.puts_into_any_memory
