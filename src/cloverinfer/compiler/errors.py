"""Why a model cannot be compiled, with the line of its own code where there is one."""

from __future__ import annotations

import linecache
import sysconfig
from pathlib import Path
from types import TracebackType

import torch

from ..core.errors import ModelError

_OURS = str(Path(__file__).resolve().parent.parent)
_TORCH = str(Path(torch.__file__).resolve().parent)
_LIBRARY = sysconfig.get_paths()["stdlib"]
_LONGEST = 400
"""Characters of another's error that are repeated."""


def refuse_export(problem: Exception) -> ModelError:
    """What to tell a user for whatever ``torch.export`` raised over the model's code."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    reason = (lines[0] if lines else type(problem).__name__)[:_LONGEST]
    if "data-dependent" in str(problem).lower() or "GuardOnDataDependent" in type(problem).__name__:
        reason = f"it branches on a tensor's value ({reason})"
    if ("marked" in reason and "specialized" in str(problem)) or "Constraints violated" in reason:
        reason = "its code fixes the number of tokens, or treats some numbers in another way"
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
        name, line = traceback.tb_frame.f_code.co_filename, traceback.tb_lineno
        library = name.startswith(_LIBRARY) and "site-packages" not in name
        if not library and not name.startswith((_OURS, _TORCH)):
            found = f"{name}:{line}: {linecache.getline(name, line).strip()}"
        traceback = traceback.tb_next
    return found
