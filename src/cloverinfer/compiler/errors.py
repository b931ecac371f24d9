"""Why a model cannot be compiled, with the line of its own code where there is one."""

from __future__ import annotations

import linecache
import sys
import sysconfig
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from ..core.errors import ModelError

_OURS = str(Path(__file__).resolve().parent.parent)
_TORCH = str(Path(torch.__file__).resolve().parent)
_LIBRARY = sysconfig.get_paths()["stdlib"]
_LONGEST = 400
"""Characters of another's error that are repeated."""
_LENGTHS = (2, 3, 1000, 1 << 20)
"""Numbers of tokens that a model must take."""


class LengthWatch(TorchFunctionMode):
    """While a model is exported: notes the line of its code after which not every number of tokens
    was possible, of which ``torch.export`` tells only at the end, and not where."""

    def __init__(self) -> None:
        super().__init__()
        self.line = ""
        self._seen = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [one for one in _pytree.tree_leaves(result) if isinstance(one, torch.Tensor)]
        sizes = [size for one in made for size in one.shape if isinstance(size, torch.SymInt)]
        if sizes and not self.line:
            guards = sizes[0].node.shape_env.guards
            new, self._seen = guards[self._seen :], len(guards)
            if any(_excludes_a_length(guard.expr) for guard in new):
                self.line = _line_that_runs(sys._getframe(1))
        return result


def _excludes_a_length(guard: Any) -> bool:
    given = (dict.fromkeys(guard.free_symbols, tokens) for tokens in _LENGTHS)
    return any(guard.subs(one) == False for one in given)  # noqa: E712 - it may be undecided


def _line_that_runs(frame: FrameType | None) -> str:
    while frame is not None:
        if _is_own(frame.f_code.co_filename):
            return _line(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return ""


def refuse_export(problem: Exception, length_line: str = "") -> ModelError:
    """What to tell a user for whatever ``torch.export`` raised over the model's code;
    ``length_line``: of it, as ``LengthWatch`` noted it."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    reason = (lines[0] if lines else type(problem).__name__)[:_LONGEST]
    if "data-dependent" in str(problem).lower() or "GuardOnDataDependent" in type(problem).__name__:
        reason = f"it branches on a tensor's value ({reason})"
    if ("marked" in reason and "specialized" in str(problem)) or "Constraints violated" in reason:
        reason = "its code fixes the number of tokens, or treats some numbers in another way"
        line = length_line
    else:
        line = _own_line(problem.__traceback__) or _own_line_of_cause(problem)
    where = f" at {line}" if line else ""
    return ModelError(f"the model cannot be exported{where}: {reason}")


def _own_line_of_cause(problem: BaseException) -> str:
    cause = problem.__cause__ or problem.__context__
    return _own_line(cause.__traceback__) if cause is not None else ""


def _own_line(traceback: TracebackType | None) -> str:
    """``file:line: text`` of the innermost frame that is the model's."""
    found = ""
    while traceback is not None:
        name = traceback.tb_frame.f_code.co_filename
        if _is_own(name):
            found = _line(name, traceback.tb_lineno)
        traceback = traceback.tb_next
    return found


def _is_own(name: str) -> bool:
    """Whether a file is the model's."""
    library = name.startswith(_LIBRARY) and "site-packages" not in name
    return not library and not name.startswith((_OURS, _TORCH))


def _line(name: str, number: int) -> str:
    return f"{name}:{number}: {linecache.getline(name, number).strip()}"
